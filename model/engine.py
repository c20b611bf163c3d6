"""Token ids in, token ids out: one thread keeps the model busy with all requests at once.

Requests join at the next step and leave at once. On a GPU a step is launched before the ids of the last one are handed
out, so that the device never waits for the host; a reply that turns out to have ended is in one step too many, whose
draw nobody sees. Nothing here knows about text or about the server.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence as Ids

import torch

from model.counters import Counters
from model.errors import RwkvError
from model.handle import FinishReason, Handle
from model.prefix_cache import PrefixCache, prefix_keys
from model.sampling import Sampler, SamplingParams
from model.scheduler import GRID, Part, Scheduler, Sequence
from model.state import SavedState, StatePool
from model.step_graphs import StepGraphs
from model.stepper import NOT_FINITE, Flight, Model, Stepper

END_OF_TEXT = 0
STALLED_AFTER = 30.0  # seconds without the end of a step
FAILED_STEPS = 8  # so many failed steps in a row, over different requests, are no longer the fault of a request


class EngineError(RwkvError):
    """The engine cannot take or go on with a request."""

    code = "E300"


class QueueFullError(EngineError):
    """Too many requests wait already."""

    code = "E310"


class Engine:
    """Drives ``model`` over the rows of ``pool``. Any thread may call what has no underscore."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        pool: StatePool,
        chunk: int,
        stalled_after: float = STALLED_AFTER,
        *,
        grid: int = GRID,
        max_queue: int | None = None,
        cache: PrefixCache | None = None,
        ahead: int | None = None,
        careful: Model | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        """``chunk``, ``grid``: tokens of a prompt that a step reads at most, and by how many they are cut.

        ``max_queue``: requests that may wait for a row. ``ahead``: steps launched before the ids of an older one are
        handed out; by default 1 on a GPU, and 0 on the CPU, where it would only hold ids back. ``careful``: the same
        model with a wider range of numbers, for requests whose logits are not finite. ``graphs``: of ``model`` over
        ``pool``.
        """
        self._device, self._vocab, self._cache = model.device, model.vocab_size, cache
        self._stepper = Stepper(model, sampler, pool, careful, graphs)
        self._can_be_careful = careful is not None
        self._scheduler = Scheduler(pool.rows, chunk, grid)
        self._ahead = (1 if model.device.type == "cuda" else 0) if ahead is None else ahead
        self._capacity = None if max_queue is None else pool.rows + max_queue
        self._rows = pool.rows
        self._stalled_after = stalled_after
        # Cog throws exceptions into the threads of predictions that it cancels. ``with`` is safe from them on a lock of
        # the interpreter itself, but not on a condition, whose lock would never be given back (test_interrupts.py).
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._inbox: list[Sequence] = []
        self._held = 0  # sequences in the engine
        self._stopping = False
        self._flights: deque[Flight] = deque()  # oldest first
        self._counters = Counters()
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
        it and is no part of it. Raises ValueError for bad ids or fewer than one token, QueueFullError where too many
        wait, EngineError where the engine has stopped.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens: one or more are needed, got {max_tokens}")
        return self._queue(Sequence(list(ids), params, max_tokens, handle or Handle(), start))

    def read(self, ids: Ids[int], start: SavedState | None = None, handle: Handle | None = None) -> SavedState:
        """The state after exactly ``ids`` on top of ``start`` (by default the empty context), on the pool's device.

        It waits its turn as a request does, though it is never refused, and blocks its thread meanwhile; ``handle``
        may cancel it. Raises ValueError for bad ids, EngineError where reading fails or ends early.
        """
        handle = handle or Handle()
        result = self._read(ids, start, handle, careful=False)
        if self._can_be_careful and not result.finite():
            result = self._read(ids, start, Handle(), careful=True)
        return result

    def alive(self) -> bool:
        """Whether the thread that drives the model is there."""
        return self._thread.is_alive()

    def last_step_age(self) -> float:
        """Seconds since a step ended, or since there has been work; 0 where there is none."""
        return time.monotonic() - self._progress if self._held else 0.0

    def held(self) -> int:
        """Requests in the engine, waiting or running."""
        return self._held

    def counters(self) -> dict[str, int | float]:
        """What the engine has done so far and is doing now: counts, seconds of steps, queue depth and busy rows."""
        waiting = len(self._inbox) + self._scheduler.waiting
        return self._counters.report() | {"queue_depth": waiting, "rows_busy": len(self._scheduler.active)}

    def problem(self) -> str | None:
        """Why the engine cannot serve, or None: the truth for a health check."""
        if not self.alive():
            return f"the engine's thread is dead{self._because()}"
        if (age := self.last_step_age()) > self._stalled_after:
            return f"no step has ended for {age:.0f} s, with {self._held} requests in the engine"
        if self._failed_steps >= FAILED_STEPS:
            return f"the last {self._failed_steps} steps failed{self._because()}"
        return None

    def close(self) -> None:
        """End all replies and the thread."""
        with self._lock:
            self._stopping = True
            self._work.notify()
        self._thread.join()

    def _read(self, ids: Ids[int], start: SavedState | None, handle: Handle, careful: bool) -> SavedState:
        sequence = Sequence(list(ids), SamplingParams(temperature=0.0), 0, handle, start, careful=careful)
        self._queue(sequence).take()
        if sequence.result is None:
            raise EngineError(f"the text could not be read: {sequence.handle.error}")
        return sequence.result

    def _queue(self, sequence: Sequence) -> Handle:
        ids = sequence.ids
        if not ids or min(ids) < 0 or max(ids) >= self._vocab:
            raise ValueError(f"ids: one or more from 0 to {self._vocab - 1} are needed, got {len(ids)}")
        if self._cache is not None and sequence.start is None and not sequence.careful:
            sequence.keys = prefix_keys(ids, self._scheduler.chunk)
        sequence.handle.submitted = time.monotonic()
        with self._lock:
            if self._stopping:
                raise EngineError(f"the engine has stopped{self._because()}")
            if self._capacity is not None and self._held >= self._capacity and sequence.max_tokens:
                self._counters.requests["refused"] += 1
                waiting = self._capacity - self._rows
                raise QueueFullError(f"the queue is full: {waiting} requests wait already; try again later")
            if not self._held:
                self._progress = time.monotonic()
            self._held += 1
            self._inbox.append(sequence)
            self._work.notify()
        return sequence.handle

    def _because(self) -> str:
        return f": {self._last_error}" if self._last_error else ""

    def _drive(self) -> None:
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)  # for this thread
            while self._collect():
                self._turn()
                self._progress = time.monotonic()
        except BaseException as error:
            self._last_error = _describe(error)
            raise
        finally:
            with self._lock:
                self._stopping = True
                for sequence in self._inbox + self._scheduler.everything():
                    sequence.handle.finish("error", f"the engine has stopped{self._because()}")

    def _collect(self) -> bool:
        """Move new requests to the scheduler; waits where there is nothing to do. False once the engine is to stop."""
        with self._lock:
            while not (self._inbox or len(self._scheduler) or self._flights or self._stopping):
                self._work.wait(1.0)  # a thread that was thrown an exception may have queued, and not notified
            for sequence in self._inbox:
                self._scheduler.add(sequence)
            self._inbox.clear()
            return not self._stopping

    def _turn(self) -> None:
        """Launch the next step, then hand out the ids of the one before it, or of this one."""
        for sequence in self._scheduler.ended():
            self._release(sequence)
        for sequence in self._scheduler.forget():
            self._count(sequence)
        for sequence in self._scheduler.admit():
            sequence.handle.admitted = time.monotonic()
            self._resume(sequence)
        if parts := self._scheduler.plan():
            self._launch(parts)
        self._settle(self._ahead if parts and not self._scheduler.suspicious() else 0)

    def _resume(self, sequence: Sequence) -> None:
        """Go on from the longest prefix whose state is known."""
        if self._cache is not None and sequence.keys:
            idle = len(self._scheduler) == 1
            if found := self._cache.find(sequence.keys, alone=idle):
                sequence.resume(found.chunks * self._scheduler.chunk, found.state, found.alone)
                self._counters.cached_tokens += sequence.handle.cached_tokens

    def _launch(self, parts: list[Part]) -> None:
        chunk = self._scheduler.chunk
        keep = {part.sequence for part in parts if part.completes or (part.end % chunk == 0 and self._kept(part))}
        try:
            flight = self._stepper.launch(parts, keep)
        except Exception as error:  # whatever a model or a device may raise: the engine goes on
            self._settle(0)  # steps before it are whole
            self._blame(parts, error)
        else:
            self._scheduler.launched(parts)
            self._flights.append(flight)

    def _kept(self, part: Part) -> bool:
        """Whether the state after a part is worth a place in the cache."""
        sequence, chunk = part.sequence, self._scheduler.chunk
        if self._cache is None or sequence.suspect or part.end % chunk:
            return False
        return self._cache.wants(part.end // chunk, len(sequence.keys))

    def _settle(self, ahead: int) -> None:
        """Hand out what the oldest steps have drawn, until no more than ``ahead`` are left."""
        while len(self._flights) > ahead:
            flight = self._flights[0]
            try:
                drawn = flight.result()
            except Exception as error:
                parts = [part for one in self._flights for part in one.parts]  # the later ones went on from it
                self._flights.clear()
                self._blame(parts, error)
                return
            self._flights.popleft()
            self._measure(flight)
            self._deliver(flight, drawn)

    def _measure(self, flight: Flight) -> None:
        now = time.monotonic()
        seconds = now - max(flight.launched, self._progress)
        self._progress = now
        self._failed_steps = 0
        self._counters.steps += 1
        self._counters.step_times.append(seconds)
        self._scheduler.pacer.measured(flight.writing, flight.reading, seconds)
        self._scheduler.settled(flight.parts)

    def _blame(self, parts: list[Part], error: Exception) -> None:
        self._failed_steps += 1
        self._counters.steps_failed += 1
        self._last_error = _describe(error)
        if guilty := self._scheduler.failed(parts):
            self._end(guilty, "error", self._last_error)

    def _deliver(self, flight: Flight, drawn: list[int]) -> None:
        tokens = iter(drawn)
        for part in flight.parts:
            sequence = part.sequence
            token = next(tokens) if part.draws else None
            if sequence.over:
                continue
            state = flight.saved.get(sequence)
            if token is not None:
                self._append(sequence, token)
            elif part.completes and state is None:
                self._end(sequence, "error", "there is no memory for its state")
            elif part.completes:
                sequence.result = state
                self._end(sequence, "length")
            if state is not None and self._cache is not None and token != NOT_FINITE and self._kept(part):
                self._cache.put(sequence.keys[part.end // self._scheduler.chunk - 1], state, sequence.alone)

    def _append(self, sequence: Sequence, token: int) -> None:
        if token == NOT_FINITE and self._can_be_careful and not sequence.careful:
            self._again(sequence)
        elif token == NOT_FINITE:
            self._end(sequence, "error", "the model's logits are not finite for this request")
        elif token == END_OF_TEXT:
            self._end(sequence, "stop")
        else:
            sequence.ids.append(token)
            sequence.handle.put(token)
            self._counters.tokens_out += 1
            if len(sequence.ids) - sequence.prompt >= sequence.max_tokens:
                self._end(sequence, "length")

    def _again(self, sequence: Sequence) -> None:
        """Its numbers left the range of the fast path."""
        self._scheduler.release(sequence)
        self._stepper.end(sequence.row)
        self._scheduler.retry(sequence.carefully())

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self._release(sequence, reason)
        sequence.handle.finish(reason, error)

    def _release(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        self._scheduler.release(sequence)
        self._stepper.end(sequence.row)
        self._count(sequence, reason)

    def _count(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """A sequence leaves the engine, as its handle says or else for ``reason``."""
        self._counters.tokens_in += sequence.handle.prefill_tokens
        if sequence.max_tokens:
            self._counters.requests[str(sequence.handle.finish_reason or reason)] += 1
        else:
            self._counters.reads += 1
        with self._lock:
            self._held -= 1


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
