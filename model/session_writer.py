"""Writes sessions to their database on a thread of its own, in the order in which they came, several at a time."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from model.errors import SessionNotKeptError
from model.host_memory import nbytes
from model.logs import get_logger
from model.session_database import Record, Row, SessionDatabase
from model.state import SavedState

BATCH = 64 << 20  # bytes of states in a transaction, more or less
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts, after one that failed

log = get_logger()


@dataclass(eq=False)
class _Job:
    """A session to be written, or deleted where ``row`` is None."""

    key: bytes
    row: Row | None
    once: bool = False  # whether a failure is final: somebody waits for it
    done: bool = False
    error: str | None = None

    @property
    def size(self) -> int:
        return nbytes(self.row.state) if self.row else 0


class SessionWriter:
    """At most ``limit`` bytes of states wait in memory, or one state. Any thread may call any method."""

    def __init__(self, database: SessionDatabase, limit: int) -> None:
        self._database, self._limit = database, limit
        self._changed = threading.Condition()
        self._jobs: OrderedDict[bytes, _Job] = OrderedDict()
        self._waiting = 0  # bytes of the states in ``_jobs``
        self._closing = False
        self._pause = 0.0  # before the next attempt; 0 while writing goes well
        self.failure: str | None = None  # why the last attempt failed
        self.written = self.failures = 0
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Bytes of states that are not on disk yet."""
        return self._waiting

    def find(self, key: bytes) -> tuple[Record, SavedState] | None:
        """A session that waits to be written, with its state on the host."""
        with self._changed:
            job = self._jobs.get(key)
            return (job.row.record, job.row.state) if job and job.row else None

    def save(self, row: Row, wait: bool = False) -> None:
        """Have a session written, in place of what waits for the same key; with ``wait`` return once it is on disk.

        It waits for room too. Raises SessionNotKeptError where the session is not and will not be written: with
        ``wait`` for any failure, without it where too many wait already because writing fails.
        """
        job = _Job(row.key, row, once=wait)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(job.size) or self.failure or self._closing)
            if self._closing or not (self._has_room(job.size) or wait):
                raise SessionNotKeptError(f"session: {self.failure or 'the server is ending'}")
            self._add(job)
            if not wait:
                return
            self._changed.wait_for(lambda: job.done)
            if job.error:
                raise SessionNotKeptError(job.error)

    def delete(self, key: bytes) -> None:
        """Have a session deleted."""
        with self._changed:
            self._add(_Job(key, None))

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be written; False where that takes more than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Write what waits, for at most ``timeout`` seconds, and end the thread."""
        with self._changed:
            self._closing, self.failure = True, None
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._jobs:
            log.error("sessions_not_written", sessions=len(self._jobs), error=self.failure)

    def _has_room(self, size: int) -> bool:
        return not self._waiting or self._waiting + size <= self._limit

    def _add(self, job: _Job) -> None:
        if (old := self._remove(job.key)) is not None:
            old.done = True
        self._jobs[job.key] = job
        self._waiting += job.size
        self._changed.notify_all()

    def _remove(self, key: bytes) -> _Job | None:
        if (old := self._jobs.pop(key, None)) is not None:
            self._waiting -= old.size
        return old

    def _run(self) -> None:
        while batch := self._next():
            if not self._attempt(batch) and len(batch) > 1:
                for job in batch:  # one of them may be what is too large, or wrong
                    self._attempt([job])

    def _next(self) -> list[_Job]:
        """The oldest jobs; waits for one. Empty when the thread is to end."""
        with self._changed:
            self._changed.wait_for(self._hurries, self._pause)
            self._changed.wait_for(lambda: self._jobs or self._closing)
            if self._closing and self.failure:
                return []
            batch: list[_Job] = []
            size = 0
            for job in self._jobs.values():
                if batch and size + job.size > BATCH:
                    break
                batch.append(job)
                size += job.size
            return batch

    def _hurries(self) -> bool:
        return self._closing or any(job.once for job in self._jobs.values())

    def _attempt(self, batch: list[_Job]) -> bool:
        rows = [job.row for job in batch if job.row]
        error: str | None = None
        try:
            self._database.save(rows, [job.key for job in batch if not job.row])
        except SessionNotKeptError as problem:
            error = problem.args[0]
        except Exception as problem:  # the thread has to live on
            error = f"{type(problem).__name__}: {problem}"
        with self._changed:
            self._settle(batch, error)
        return error is None

    def _settle(self, batch: list[_Job], error: str | None) -> None:
        alone = len(batch) == 1
        for job in batch:
            if error is None or (job.once and alone):
                job.done, job.error = True, error
                if self._jobs.get(job.key) is job:
                    self._remove(job.key)
        self.written += len(batch) if error is None else 0
        if error is None:
            self.failure, self._pause = None, 0.0
        elif alone:
            self.failures += 1
            self._pause = min(LONGEST_PAUSE, self._pause * 2 or PAUSE)
            if not self.failure:  # once, and not at each attempt
                log.error("sessions_cannot_be_written", error=error, waiting_bytes=self._waiting)
            self.failure = error
        self._changed.notify_all()
