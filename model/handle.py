"""One reply on its way from the engine's thread to its reader's."""

import threading
import time
from collections.abc import Iterator
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Handle:
    """The token ids of one reply, as they are drawn. The engine writes it, one reader reads it, anyone may end it.

    ``finish_reason`` is None until the reply ends; ``error`` says why where that is "error". ``tokens`` counts the ids,
    ``cached_tokens`` those of the prompt whose state was known, ``prefill_tokens`` those that have been read.
    Times are ``time.monotonic()`` seconds: ``submitted``, ``admitted`` (it got a row), ``first_token``, ``last_token``.
    """

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.tokens = self.cached_tokens = self.prefill_tokens = 0
        self.submitted = time.monotonic()
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._lock = threading.RLock()  # taken itself, and not through the condition: see engine.py
        self._changed = threading.Condition(self._lock)
        self._ids: list[int] = []
        self._taken = self._due = 0.0  # when a call of take() ended last, and when the next may

    def take(self, pause: float = 0.0) -> list[int]:
        """The ids that have come since the last call; waits for at least one. Empty only at the end of the reply.

        Two calls end ``pause`` seconds apart or more, unless the reply ends sooner, and then with the next id: a reader
        of quick steps wakes up once for a group of ids, and one of slow steps once for each.
        """
        with self._lock:
            self._due = self._taken + pause
            while not self.finish_reason and (not self._ids or (left := self._due - time.monotonic()) > 0):
                self._changed.wait(left if self._ids else None)  # without ids, put() wakes us once it is due
            self._taken = time.monotonic()
            ids, self._ids = self._ids, []
            return ids

    def __iter__(self) -> Iterator[int]:
        """The ids one by one, to the end of the reply."""
        while ids := self.take():
            yield from ids

    def cancel(self) -> None:
        """End the reply now; its row is free before the next step. Does nothing to a reply that has ended."""
        self.finish("cancelled")

    def put(self, token: int) -> None:
        """For the engine: add a drawn id. Ignored once the reply has ended."""
        with self._lock:
            if self.finish_reason is None:
                self.last_token = time.monotonic()
                self.first_token = self.first_token or self.last_token
                self.tokens += 1
                self._ids.append(token)
                if self.last_token >= self._due:
                    self._changed.notify()

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the reply. The first reason counts; a cancelled reader gets no more ids."""
        with self._lock:
            if self.finish_reason is None:
                self.finish_reason, self.error = reason, error
                if reason == "cancelled":
                    self._ids.clear()
                self._changed.notify_all()
