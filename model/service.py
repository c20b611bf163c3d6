"""Text in, text out: what stands between a request and the engine."""

import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from model import checkpoint
from model.device import choose_device, choose_dtype, why_not_cuda
from model.engine import Engine, EngineError
from model.errors import RequestError
from model.handle import FinishReason, Handle
from model.journal import Journal
from model.logs import get_logger
from model.pool_size import fit, open_cache
from model.request import Request
from model.rwkv7 import RWKV7
from model.sampling import SamplingParams
from model.session_setup import open_sessions, origin
from model.sessions import NO_SESSION, Sessions, Turn
from model.settings import PREFIX, Settings, SettingsError
from model.text import CHAT_STOP, ReplyText, chat_prompt, ids_of_text
from model.tokenizer import Tokenizer

# To wake a reader and send its piece takes about 60 us of the interpreter, which the engine needs as well: so readers
# have no more than a fifth of it.
PAUSE_EACH = 0.0003

log = get_logger()


class Service:
    """A model that is loaded and running."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, settings: Settings, sessions: Sessions | None = None
    ) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        self.sessions = sessions or open_sessions(settings, torch.device("cpu"), {})
        self.journal = Journal(self.counters, settings.log_interval)

    @classmethod
    def build(cls, settings: Settings) -> "Service":
        """Load what the settings name and run it once, so that the first request finds everything warm.

        Raises SettingsError, CheckpointError, VocabularyError, or what the device has to say.
        """
        try:
            device = choose_device(settings.device)
        except (ValueError, RuntimeError) as error:
            raise SettingsError(f"{PREFIX}DEVICE: {error}") from None
        found = checkpoint.load(settings.weights, cache=settings.cache)
        tokenizer = Tokenizer(found.vocab)
        allowed = tokenizer.allowed(found.config.vocab)  # before the weights move: a wrong vocabulary fails at once
        dtype = choose_dtype(settings.dtype, device)
        tuned = settings.kernels == "tuned"
        model = RWKV7.load(found, device, dtype, host_embedding=settings.host_embedding, tuned=tuned)
        careful = model.careful()
        pool, sampler, graphs = fit(model, found.config, settings, allowed, careful)
        engine = Engine(
            model, sampler, pool, settings.chunk(device.type),
            grid=settings.grid(device.type), max_queue=settings.max_queue,
            cache=open_cache(settings, pool), careful=careful, graphs=graphs,
        )  # fmt: skip
        sessions = open_sessions(settings, device, origin(found, model, settings))
        service = cls(engine, tokenizer, settings, sessions)
        service.warm_up()
        sessions.warm_up(engine.read([0]))
        details: dict[str, object] = asdict(found.config) | {"rows": pool.rows}
        if reason := why_not_cuda(settings.device):
            details["why_not_cuda"] = reason
        log.info("ready", device=str(device), dtype=str(model.dtype), checkpoint=str(found.path), **details)
        return service

    def warm_up(self) -> None:
        """Read and write a few tokens, with all that sampling can do. Raises EngineError where that fails."""
        params = SamplingParams(top_p=0.5, top_k=50, presence_penalty=0.1, seed=0)
        handle = self.engine.submit([0] * 20, params, 3)
        for _ in handle:
            pass
        if handle.finish_reason == "error":
            raise EngineError(f"the first step failed: {handle.error}")

    def reply(self, request: Request) -> "Reply":
        """The reply to a request; nothing happens before it is iterated."""
        return Reply(self, request)

    def counters(self) -> dict[str, int | float]:
        """Numbers of the engine and of the sessions, since the start and of now."""
        return self.engine.counters() | self.sessions.counters()

    def pause(self) -> float:
        """Seconds between the pieces of a reply: the setting, and more where very many replies run at once."""
        return max(self.settings.text_interval, PAUSE_EACH * self.engine.held())

    def problem(self) -> str | None:
        """Why requests cannot be served now, with the counters, or None."""
        if problem := self.engine.problem():
            return f"{problem} ({', '.join(f'{name}={value:.4g}' for name, value in self.counters().items())})"
        return None


class Reply:
    """The text of one reply, in pieces, and then its numbers. Iterate it once, in one thread; anyone may cancel it."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._created = time.monotonic()
        self._handle = Handle()
        stops = [*request.stop, CHAT_STOP] if request.chat else request.stop
        self._text = ReplyText(service.tokenizer, stops, strip_leading_space=request.chat)
        self._prompt_tokens = self._completion_tokens = 0
        self._drawn: list[int] = []
        self._keeping = Handle()  # of the reading of a session's turn, once the reply is over
        self._session: tuple[int, int] | None = None  # tokens and turns
        self._failed = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the reply has ended. A stop string counts even where the last token allowed completed it."""
        if self._failed:
            return "error"
        if self._request.session and self._keeping.finish_reason == "cancelled":
            return "cancelled"
        return "stop" if self._text.stopped else self._handle.finish_reason

    def cancel(self) -> None:
        """End the reply now, whatever it is doing. A session stays as it is, unless its turn has been read already."""
        self._handle.cancel()
        self._keeping.cancel()

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, never empty and never with part of a character: the first at once, then one each interval.

        Raises RequestError, SessionError or EngineError where the reply fails; a cancelled one just ends.
        """
        try:
            if self._request.session is None:
                self._submit(NO_SESSION)
                yield from self._pieces()
                return
            with self._service.sessions.turn(self._request.session, self._is_cancelled) as turn:
                if turn is not None:
                    yield from self._take_turn(turn)
        except Exception as error:
            self._failed = True
            self._handle.finish("error", str(error))
            raise

    def _take_turn(self, turn: Turn) -> Iterator[str]:
        """A reply within a session, which is kept at the end of it."""
        self._session = turn.tokens, turn.turns
        read = self._submit(turn)
        yield from self._pieces()
        if self.finish_reason == "cancelled":
            return
        service = self._service
        read += ids_of_text(service.tokenizer, self._drawn, self._text.length)
        try:
            state = service.engine.read(read, turn.start, self._keeping)
        except EngineError:
            if self.finish_reason == "cancelled":
                return
            raise
        service.sessions.keep(turn, state, turn.tokens + len(read))
        self._session = turn.tokens + len(read), turn.turns + 1

    def _pieces(self) -> Iterator[str]:
        pause = 0.0
        while not self._text.stopped and (ids := self._handle.take(pause)):
            if piece := self._read(ids):
                yield piece
                pause = self._service.pause()
        if self._handle.finish_reason == "error":
            raise EngineError(self._handle.error)
        if self.finish_reason != "cancelled" and (rest := self._text.finish()):
            yield rest

    def _is_cancelled(self) -> bool:
        return self._handle.finish_reason is not None

    def close(self) -> dict[str, str | int | float]:
        """End it where that has not happened, and note it in the log. Returns its metrics."""
        self.cancel()
        metrics = self.metrics()
        noted: dict[str, object] = dict(metrics)
        if self._handle.error and self.finish_reason == "error":
            noted["error"] = self._handle.error
        if self._service.settings.log_text:
            noted |= {"prompt": self._request.prompt, "text": self._service.tokenizer.decode(self._drawn)}
        self._service.journal.reply(**noted)
        return metrics

    def metrics(self) -> dict[str, str | int | float]:
        """What is known about the reply so far, by the names under which clients see it; times in seconds."""
        handle = self._handle
        found = {
            "prompt_tokens": self._prompt_tokens,
            "session_tokens": self._session and self._session[0],
            "session_turns": self._session and self._session[1],
            "completion_tokens": self._completion_tokens,
            "finish_reason": self.finish_reason,
            "prefill_tokens": handle.prefill_tokens or None,
            "cached_tokens": handle.cached_tokens if handle.admitted else None,
            "queue_time": handle.admitted and handle.admitted - handle.submitted,
            "time_to_first_token": handle.first_token and handle.first_token - self._created,
        }
        if handle.first_token and handle.last_token and handle.last_token > handle.first_token:
            seconds = handle.last_token - handle.first_token
            found |= {
                "time_per_output_token": seconds / (handle.tokens - 1),
                "tokens_per_second": (handle.tokens - 1) / seconds,
            }
        return {name: value for name, value in found.items() if value is not None}

    def _submit(self, turn: Turn) -> list[int]:
        """Queue the request; returns the ids that it reads on top of the turn's start."""
        request, service = self._request, self._service
        if turn.turns and request.system_prompt is not None:
            raise RequestError(
                "system_prompt", f"belongs before the first turn, and this session has {turn.turns}; leave it out"
            )
        prompt = request.prompt
        if request.chat:
            prompt = chat_prompt(prompt, request.system_prompt, later=turn.turns > 0)
        ids = service.tokenizer.encode(prompt)
        self._prompt_tokens = len(ids)
        if service.settings.start_token and not turn.turns:
            ids = [0, *ids]
        service.engine.submit(ids, _sampling(request), request.max_tokens, self._handle, start=turn.start)
        return ids

    def _read(self, ids: list[int]) -> str:
        piece, used = self._text.push_all(ids)
        self._drawn += ids[:used]
        self._completion_tokens += used
        if self._text.stopped:
            self._handle.finish("stop")
        return piece


def _sampling(request: Request) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "penalty_decay", "seed")
    return SamplingParams(**{name: getattr(request, name) for name in names})
