"""Token ids in, token ids out: one thread keeps the model busy with all requests at once.

Requests join at the next step and leave at once. Nothing here knows about text or about the server.
"""

import threading
import time
from collections.abc import Sequence as Ids
from typing import Protocol

import torch
from torch import Tensor

from model.errors import RwkvError
from model.handle import FinishReason, Handle
from model.sampling import Sampler, SamplingParams
from model.scheduler import Part, Scheduler, Sequence
from model.state import SavedState, StatePool

END_OF_TEXT = 0
STALLED_AFTER = 30.0  # seconds without the end of a step
FAILED_STEPS = 8  # so many failed steps in a row, over different requests, are no longer the fault of a request


class EngineError(RwkvError):
    """The engine cannot take or go on with a request."""

    code = "E300"


class Model(Protocol):
    """What the engine asks of a model."""

    @property
    def device(self) -> torch.device:
        """Where ids, rows and logits lie."""

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""

    def forward(self, ids: Tensor, pool: StatePool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """ids int64 [N] of B sequences -> float32 logits [B, vocab] after the last id of each; updates ``pool``."""


class Engine:
    """Drives ``model`` over the rows of ``pool``. Any thread may call what has no underscore."""

    def __init__(
        self, model: Model, sampler: Sampler, pool: StatePool, chunk: int, stalled_after: float = STALLED_AFTER
    ) -> None:
        """``chunk``: tokens of prompts that a step reads beside the running replies (scheduler.py)."""
        self._model, self._sampler, self._pool = model, sampler, pool
        self._scheduler = Scheduler(pool.rows, chunk)
        self._stalled_after = stalled_after
        self._work = threading.Condition()
        self._inbox: list[Sequence] = []
        self._stopping = False
        self._failed_steps, self._last_error = 0, ""
        self._progress = time.monotonic()  # when a step last ended, or work came after none
        self._thread = threading.Thread(target=self._drive, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        ids: Ids[int],
        params: SamplingParams,
        max_tokens: int,
        handle: Handle | None = None,
        *,
        start: SavedState | None = None,
    ) -> Handle:
        """Queue a request: continue ``ids`` (one or more, within the vocabulary) by at most ``max_tokens`` ids.

        The ids are read on top of ``start`` (by default the empty context), which is kept until the reply has ended and
        never written. The reply comes through the returned handle, which is ``handle`` where one is given. Id 0 ends
        it and is no part of it. Raises ValueError for bad ids or fewer than one token, EngineError where the engine has
        stopped.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens: one or more are needed, got {max_tokens}")
        return self._queue(Sequence(list(ids), params, max_tokens, handle or Handle(), start))

    def read(self, ids: Ids[int], start: SavedState | None = None) -> SavedState:
        """The state after exactly ``ids`` on top of ``start`` (by default the empty context), on the pool's device.

        It waits its turn as a request does and blocks its thread meanwhile. Raises ValueError for bad ids, EngineError
        where reading fails or the engine has stopped.
        """
        sequence = Sequence(list(ids), SamplingParams(temperature=0.0), 0, Handle(), start)
        self._queue(sequence).take()
        if sequence.result is None:
            raise EngineError(f"the text could not be read: {sequence.handle.error}")
        return sequence.result

    def _queue(self, sequence: Sequence) -> Handle:
        ids = sequence.ids
        if not ids or min(ids) < 0 or max(ids) >= self._model.vocab_size:
            raise ValueError(f"ids: one or more from 0 to {self._model.vocab_size - 1} are needed, got {len(ids)}")
        sequence.handle.submitted = time.monotonic()
        with self._work:
            if self._stopping or not self._thread.is_alive():
                raise EngineError(f"the engine has stopped{self._because()}")
            if not self._inbox and not len(self._scheduler):
                self._progress = time.monotonic()
            self._inbox.append(sequence)
            self._work.notify()
        return sequence.handle

    def alive(self) -> bool:
        """Whether the thread that drives the model is there."""
        return self._thread.is_alive()

    def last_step_age(self) -> float:
        """Seconds since a step ended, or since there has been work; 0 where there is none."""
        return time.monotonic() - self._progress if self._inbox or len(self._scheduler) else 0.0

    def problem(self) -> str | None:
        """Why the engine cannot serve, or None: the truth for a health check."""
        if not self.alive():
            return f"the engine's thread is dead{self._because()}"
        if (age := self.last_step_age()) > self._stalled_after:
            return f"no step has ended for {age:.0f} s, with {len(self._scheduler)} requests in the engine"
        if self._failed_steps >= FAILED_STEPS:
            return f"the last {self._failed_steps} steps failed{self._because()}"
        return None

    def close(self) -> None:
        """End all replies and the thread."""
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join()

    def _because(self) -> str:
        return f": {self._last_error}" if self._last_error else ""

    def _drive(self) -> None:
        try:
            while self._collect():
                self._step()
                self._progress = time.monotonic()
        except BaseException as error:
            self._last_error = _describe(error)
            raise
        finally:
            with self._work:
                self._stopping = True
                for sequence in self._inbox + self._scheduler.everything():
                    sequence.handle.finish("error", f"the engine has stopped{self._because()}")

    def _collect(self) -> bool:
        """Move new requests to the scheduler; waits where there is nothing to do. False once the engine is to stop."""
        with self._work:
            self._work.wait_for(lambda: self._inbox or len(self._scheduler) or self._stopping)
            for sequence in self._inbox:
                self._scheduler.add(sequence)
            self._inbox.clear()
            return not self._stopping

    def _step(self) -> None:
        for sequence in self._scheduler.ended():
            self._release(sequence)
        for sequence in self._scheduler.admit():
            sequence.handle.admitted = time.monotonic()
        if not (parts := self._scheduler.plan()):
            return
        try:
            drawn = self._forward(parts)
        except Exception as error:  # whatever a model or a device may raise: the engine goes on
            self._failed_steps += 1
            self._last_error = _describe(error)
            if guilty := self._scheduler.failed(parts):
                self._end(guilty, "error", self._last_error)
        else:
            self._failed_steps = 0
            self._deliver(parts, drawn)

    @torch.inference_mode()
    def _forward(self, parts: list[Part]) -> list[int | None]:
        """Read the parts; one drawn id a part that draws, in their order, None where its logits are not finite."""
        for part in parts:
            if part.begin == 0:
                if part.sequence.start is None:
                    self._pool.clear(part.sequence.row)
                else:
                    self._pool.load(part.sequence.row, part.sequence.start)
                self._sampler.set_row(
                    part.sequence.row, part.sequence.params, part.sequence.ids[part.sequence.prompt :]
                )
        ids = [one for part in parts for one in part.sequence.ids[part.begin : part.end]]
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + part.end - part.begin)
        rows = self._tensor([part.sequence.row for part in parts])
        logits = self._model.forward(self._tensor(ids), self._pool, rows, self._tensor(ends))
        for part in parts:
            if part.completes:
                part.sequence.result = self._pool.save(part.sequence.row)
        drawing = [index for index, part in enumerate(parts) if part.draws]
        if not drawing:
            logits[0, 0].item()  # the step ends once the device has done it, not when it has been told to
            return []
        if len(drawing) < len(parts):
            index = self._tensor(drawing)
            logits, rows = logits[index], rows[index]
        drawn, finite = self._sampler.sample(logits, rows)
        return [one if good else None for one, good in zip(drawn.tolist(), finite.tolist(), strict=True)]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)

    def _deliver(self, parts: list[Part], drawn: list[int | None]) -> None:
        drawing = [part.sequence for part in parts if part.draws]
        self._scheduler.succeeded(parts)
        for sequence, token in zip(drawing, drawn, strict=True):
            self._append(sequence, token)
        for part in parts:
            if part.completes:
                self._end(part.sequence, "length")

    def _append(self, sequence: Sequence, token: int | None) -> None:
        if token is None:
            self._end(sequence, "error", "the model's logits are not finite for this request")
        elif token == END_OF_TEXT:
            self._end(sequence, "stop")
        else:
            sequence.ids.append(token)
            sequence.handle.put(token)
            if len(sequence.ids) - sequence.prompt >= sequence.max_tokens:
                self._end(sequence, "length")

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._release(sequence)
        sequence.handle.finish(reason, error)

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.release(sequence)
        self._sampler.clear_row(sequence.row)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
