"""Text in, text out: what stands between a request and the engine."""

import time
from collections.abc import Iterator
from dataclasses import asdict

from model import checkpoint
from model.device import choose_device, choose_dtype, why_not_cuda
from model.engine import Engine, EngineError
from model.errors import RwkvError
from model.handle import FinishReason, Handle
from model.logs import get_logger
from model.pool_size import fit, open_cache
from model.request import Request
from model.rwkv7 import RWKV7
from model.sampling import SamplingParams
from model.settings import PREFIX, Settings, SettingsError
from model.text import CHAT_STOP, ReplyText, chat_prompt
from model.tokenizer import Tokenizer

log = get_logger()


class Service:
    """A model that is loaded and running."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: Settings) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings

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
        model = RWKV7.load(found, device, dtype, host_embedding=settings.host_embedding)
        pool, sampler = fit(model, found.config, settings, allowed)
        engine = Engine(
            model, sampler, pool, settings.chunk(device.type),
            grid=settings.grid(device.type), max_queue=settings.max_queue,
            cache=open_cache(found.config, settings, device),
        )  # fmt: skip
        service = cls(engine, tokenizer, settings)
        service.warm_up()
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

    def problem(self) -> str | None:
        """Why requests cannot be served now, or None."""
        return self.engine.problem()


class Reply:
    """The text of one reply, in pieces, and then its numbers. Iterate it once, in one thread; anyone may cancel it."""

    def __init__(self, service: Service, request: Request) -> None:
        self._service, self._request = service, request
        self._created = time.monotonic()
        self._handle = Handle()
        stops = [*request.stop, CHAT_STOP] if request.chat else request.stop
        self._text = ReplyText(service.tokenizer, stops, strip_leading_space=request.chat)
        self._prompt_tokens = self._completion_tokens = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the reply has ended. A stop string counts even where the last token allowed completed it."""
        return "stop" if self._text.stopped else self._handle.finish_reason

    def cancel(self) -> None:
        """End the reply now, whatever it is doing."""
        self._handle.cancel()

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, never empty and never with part of a character: the first at once, then one each interval.

        Raises RequestError or EngineError where the reply fails; a cancelled one just ends.
        """
        try:
            self._submit()
        except RwkvError as error:
            self._handle.finish("error", str(error))
            raise
        pause = 0.0
        while not self._text.stopped and (ids := self._handle.take(pause)):
            if piece := self._read(ids):
                yield piece
                pause = self._service.settings.text_interval
        if self.finish_reason == "error":
            raise EngineError(self._handle.error)
        if self.finish_reason != "cancelled" and (rest := self._text.finish()):
            yield rest

    def metrics(self) -> dict[str, str | int | float]:
        """What is known about the reply so far, by the names under which clients see it; times in seconds."""
        handle = self._handle
        found = {
            "prompt_tokens": self._prompt_tokens,
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

    def _submit(self) -> None:
        request, service = self._request, self._service
        prompt = chat_prompt(request.prompt, request.system_prompt) if request.chat else request.prompt
        ids = service.tokenizer.encode(prompt)
        self._prompt_tokens = len(ids)
        start = [0] if service.settings.start_token else []
        service.engine.submit(start + ids, _sampling(request), request.max_tokens, self._handle)

    def _read(self, ids: list[int]) -> str:
        pieces = []
        for token in ids:
            pieces.append(self._text.push(token))
            self._completion_tokens += 1
            if self._text.stopped:
                self._handle.finish("stop")
                break
        return "".join(pieces)


def _sampling(request: Request) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "penalty_decay", "seed")
    return SamplingParams(**{name: getattr(request, name) for name in names})
