"""Sessions: conversations that go on from their state, under names that their clients choose."""

import hashlib
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model.errors import SessionBusyError, SessionNotKeptError, SessionRefusedError
from model.host_memory import nbytes
from model.logs import get_logger
from model.session_clock import SessionClock
from model.session_database import Record, Row, SessionDatabase
from model.session_writer import SessionWriter
from model.settings import PREFIX
from model.state import SavedState
from model.tiers import StateTiers

POLL = 0.05  # seconds between looks at whether a request that waits was cancelled

log = get_logger()


@dataclass(frozen=True)
class Limits:
    """``sessions`` kept at most, ``disk_bytes`` of states on disk, ``ttl`` seconds after the last turn, ``wait``
    seconds for a session that another request has."""

    sessions: int
    disk_bytes: int
    ttl: float
    wait: float


@dataclass(frozen=True)
class Turn:
    """A session in the hands of one request. ``start``: its state, None for a new one, which has read 0 ``tokens``."""

    key: bytes
    start: SavedState | None
    tokens: int
    turns: int


NO_SESSION = Turn(b"", None, 0, 0)  # of a request without one


class Sessions:
    """The sessions of one server. Any thread may call any method; none holds up another session for long."""

    def __init__(
        self,
        tiers: StateTiers,
        limits: Limits,
        origin: Mapping[str, str] | None = None,
        path: Path | None = None,
        durable: bool = False,
        waiting_bytes: int = 0,
    ) -> None:
        """Open the database at ``path``, if one is named; without it sessions live as long as the process.

        ``origin`` says what makes the states; those of another are refused. ``waiting_bytes`` of states may wait to be
        written, if not ``durable``. Raises SettingsError as SessionDatabase does.
        """
        self._tiers, self._limits, self._durable = tiers, limits, durable
        self._database = SessionDatabase(path, origin or {}, durable) if path else None
        self._writer = SessionWriter(self._database, waiting_bytes) if self._database else None
        self._salt = self._database.salt() if self._database else secrets.token_bytes(32)
        found = self._database.records if self._database else {}
        self._records = OrderedDict(sorted(found.items(), key=lambda item: item[1].used))  # longest unused first
        self._bytes = sum(record.size for record in found.values())
        self._clock = SessionClock(max((record.used for record in found.values()), default=0.0))
        self._changed = threading.Condition()
        self._queues: dict[bytes, deque[object]] = {}  # who has each session, and then who waits for it
        self.disk_hits = self.expired = self.evicted = 0
        with self._changed:
            self._tidy()

    @contextmanager
    def turn(self, name: str, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Turn | None]:
        """The session ``name`` for one request alone; None where ``cancelled()`` came true while it waited.

        Nothing changes unless ``keep`` is called. Raises SessionBusyError where another request has it for too long,
        SessionRefusedError where its state is damaged or another model's.
        """
        key = hashlib.blake2b(name.encode(), key=self._salt, digest_size=32).digest()
        ticket = object()
        try:
            yield self._begin(key) if self._enter(key, ticket, cancelled) else None
        finally:
            self._leave(key, ticket)

    def keep(self, turn: Turn, state: SavedState, tokens: int) -> None:
        """The turn has ended well: from now on the session has ``state``, which has read ``tokens`` ids in all.

        ``state`` is finished and nobody writes to it. If the sessions are durable, it is on disk on return. Raises
        SessionNotKeptError where it cannot be kept: the session then is as it was.
        """
        size = nbytes(state)
        record = Record(tokens, turn.turns + 1, self._clock.now(), size)
        host = None
        if self._writer:
            if size > self._limits.disk_bytes:
                limit = f"{PREFIX}SESSION_DISK_BYTES allows {self._limits.disk_bytes:,}"
                raise SessionNotKeptError(f"session: its state has {size:,} bytes, {limit}")
            host = self._tiers.to_host(state)
            self._writer.save(Row(turn.key, record, host), wait=self._durable)
        self._tiers.put(turn.key, state, host)
        with self._changed:
            self._forget(turn.key)
            self._records[turn.key] = record
            self._bytes += size
            self._tidy()

    def warm_up(self, state: SavedState) -> None:
        """Get what the first state would have to wait for, with one that is like all to come."""
        self._tiers.to_host(state)

    def counters(self) -> dict[str, int]:
        """Numbers since the start, and of now."""
        tiers, writer = self._tiers, self._writer
        return {
            "sessions": len(self._records),
            "session_device_hits": tiers.device_hits,
            "session_host_hits": tiers.host_hits,
            "session_disk_hits": self.disk_hits,
            "sessions_expired": self.expired,
            "sessions_evicted": self.evicted,
            "session_writes": writer.written if writer else 0,
            "session_write_failures": writer.failures if writer else 0,
            "session_bytes_unwritten": writer.waiting if writer else 0,
        }

    def close(self, timeout: float = 60.0) -> None:
        """Write what waits to be written, for at most ``timeout`` seconds, and let go of the database."""
        if self._writer and self._database:
            self._writer.close(timeout)
            self._database.close()

    def _enter(self, key: bytes, ticket: object, cancelled: Callable[[], bool]) -> bool:
        until = time.monotonic() + self._limits.wait
        with self._changed:
            queue = self._queues.setdefault(key, deque())
            queue.append(ticket)
            while queue[0] is not ticket:
                if cancelled():
                    return False
                if (left := until - time.monotonic()) <= 0:
                    raise SessionBusyError(
                        f"session: another request has it, and did not end in {self._limits.wait:g} s; try again later"
                    )
                self._changed.wait(min(POLL, left))
            return True

    def _leave(self, key: bytes, ticket: object) -> None:
        with self._changed:
            queue = self._queues[key]
            queue.remove(ticket)
            if not queue:
                del self._queues[key]
            self._changed.notify_all()

    def _begin(self, key: bytes) -> Turn:
        with self._changed:
            self._tidy(also=key)
            record = self._records.get(key)
        if record is None:
            return Turn(key, None, 0, 0)
        state = self._tiers.get(key, wait=True) or self._from_disk(key)
        if state is None:  # there is no disk, and memory was short
            with self._changed:
                self._forget(key)
                self.evicted += 1
            return Turn(key, None, 0, 0)
        return Turn(key, state, record.tokens, record.turns)

    def _from_disk(self, key: bytes) -> SavedState | None:
        if not self._writer or not self._database:
            return None
        found = self._writer.find(key) or self._database.load(key)
        if found is None:
            raise SessionRefusedError("session: its state is missing from the database; use another name")
        self.disk_hits += 1
        self._tiers.put(key, found[1])
        return self._tiers.get(key, wait=True) or found[1]

    def _tidy(self, also: bytes | None = None) -> None:
        """Delete what has expired or is too much, the longest unused first; no session that is in use but ``also``."""
        oldest = self._clock.now() - self._limits.ttl
        for key, record in list(self._records.items()):
            over = len(self._records) > self._limits.sessions
            over |= self._database is not None and self._bytes > self._limits.disk_bytes
            if record.used >= oldest and not over:
                break
            if key in self._queues and (key != also or record.used >= oldest):
                continue
            self.expired += record.used < oldest
            self.evicted += record.used >= oldest
            log.info("session_deleted", session=key.hex()[:8], expired=record.used < oldest)
            self._delete(key)

    def _delete(self, key: bytes) -> None:
        self._forget(key)
        self._tiers.drop(key)
        if self._writer:
            self._writer.delete(key)

    def _forget(self, key: bytes) -> None:
        if (old := self._records.pop(key, None)) is not None:
            self._bytes -= old.size
