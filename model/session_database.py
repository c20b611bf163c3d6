"""Sessions on disk: one SQLite file. A transaction holds whole states, so a crash leaves the last complete ones.

SQLite's write-ahead log makes a transaction happen or not happen, whenever the process is killed; with ``durable`` it
is also synced before ``save`` returns, so that power may fail. The file belongs to one server at a time.
"""

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.errors import SessionNotKeptError, SessionRefusedError
from model.logs import get_logger
from model.settings import PREFIX, SettingsError
from model.state import SavedState

APPLICATION = 0x52574B56  # "RWKV"
VERSION = 1
PAGE = 16384  # bytes: states are large
BUSY = 10.0  # seconds to wait for a server that is ending
SUFFIXES = ("", "-wal", "-shm")
DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.float16, torch.bfloat16)}
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    key BLOB PRIMARY KEY, used REAL NOT NULL, size INTEGER NOT NULL, tokens INTEGER NOT NULL, turns INTEGER NOT NULL,
    origin BLOB NOT NULL, layout BLOB NOT NULL, seal BLOB NOT NULL, checksum BLOB NOT NULL,
    wkv BLOB NOT NULL, shift BLOB NOT NULL
);
"""
# The columns under the seal, so that what is read at the start is known to be whole without reading the states.
HEAD = "key, used, size, tokens, turns, origin, layout"

log = get_logger()


@dataclass(frozen=True)
class Record:
    """What is known of a session beside its state.

    ``tokens``: ids that the state has read. ``turns``: requests that made it. ``used``: when the last of them ended, in
    seconds of the session clock. ``size``: bytes of the state.
    """

    tokens: int
    turns: int
    used: float
    size: int


@dataclass(frozen=True)
class Row:
    """A session to be written."""

    key: bytes
    record: Record
    state: SavedState  # on the host


class SessionDatabase:
    """The file at ``path``, open. Any thread may call any method; one at a time works."""

    def __init__(self, path: Path, origin: Mapping[str, str], durable: bool = False) -> None:
        """Open or create it. A damaged file is set aside under another name, never deleted, and a new one begun.

        ``origin`` says what makes the states: those of another origin are refused. ``records`` are those found, by key.
        Raises SettingsError where the path cannot be used, the file is another program's, or a server has it open.
        """
        self.path = path
        self._origin, self._durable = dict(origin), durable
        self._lock = threading.Lock()
        try:
            self._connection, self.records = self._open(set_aside=True)
        except sqlite3.Error as error:
            if _primary(error) not in DAMAGED:
                raise _unusable(path, error) from None
            try:
                self._connection, self.records = self._open()
            except sqlite3.Error as second:
                raise _unusable(path, second) from None

    def save(self, rows: Sequence[Row], gone: Iterable[bytes] = ()) -> None:
        """Write sessions and delete others, all or nothing. Raises SessionNotKeptError where that fails."""
        values = [_values(row, json.dumps(self._origin).encode()) for row in rows]
        try:
            with self._transaction() as connection:
                connection.executemany("DELETE FROM sessions WHERE key = ?", [(key,) for key in gone])
                connection.executemany(f"INSERT OR REPLACE INTO sessions VALUES ({', '.join('?' * 11)})", values)
        except (sqlite3.Error, OSError) as error:
            raise SessionNotKeptError(f"session: cannot be written to {self.path.name}: {_describe(error)}") from None

    def load(self, key: bytes) -> tuple[Record, SavedState] | None:
        """A session and its state on the host, or None.

        Raises SessionRefusedError where it is damaged or of another origin.
        """
        try:
            with self._lock:
                found = self._connection.execute("SELECT * FROM sessions WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            record, origin, state = _parse(found)
        except (sqlite3.Error, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise SessionRefusedError(
                f"session: its state in {self.path.name} is damaged ({_describe(error)}); use another name"
            ) from None
        for name in self._origin.keys() | origin.keys():
            if (theirs := origin.get(name)) != (ours := self._origin.get(name)):
                raise SessionRefusedError(
                    f"session: it was made with {name} {theirs}, and this server has {ours}; use another name"
                )
        return record, state

    def salt(self) -> bytes:
        """Random bytes that belong to the file, for hashing names."""
        return bytes(self._meta("salt") or b"")

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._connection.close()

    def _open(self, set_aside: bool = False) -> tuple[sqlite3.Connection, dict[bytes, Record]]:
        try:
            # States hold what people wrote: the file is its owner's alone. SQLite gives its other files the same mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise _unusable(self.path, error) from None
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=BUSY)
        try:
            self._prepare(connection)
            return connection, self._read_records(connection)
        except BaseException as error:
            if set_aside and isinstance(error, sqlite3.Error) and _primary(error) in DAMAGED:
                _set_aside(self.path, error)  # before closing, which would delete the write-ahead log
            connection.close()
            raise

    def _read_records(self, connection: sqlite3.Connection) -> dict[bytes, Record]:
        records, damaged = {}, 0
        for *head, seal in connection.execute(f"SELECT {HEAD}, seal FROM sessions"):
            if seal == _seal(head):
                records[head[0]] = _record(head)
            elif isinstance(head[0], bytes):  # it stays where it is, and whoever asks for it is told
                records[head[0]] = Record(tokens=0, turns=0, used=time.time(), size=0)
                damaged += 1
        if damaged:
            log.error("session_rows_damaged", path=str(self.path), rows=damaged)
        return records

    def _prepare(self, connection: sqlite3.Connection) -> None:
        for pragma in (f"page_size={PAGE}", "locking_mode=EXCLUSIVE", "journal_mode=WAL", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute("BEGIN IMMEDIATE")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if not tables and not application:
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO meta VALUES ('salt', ?)", (secrets.token_bytes(32),))
            connection.execute(f"PRAGMA application_id={APPLICATION}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        elif application != APPLICATION:
            raise SettingsError(_setting(self.path, "is a database of another program; name another file"))
        elif version != VERSION:
            raise SettingsError(_setting(self.path, f"is of version {version}, wanted {VERSION}; name another file"))
        connection.execute("COMMIT")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite ends it itself after some errors, a full disk for one
                    self._connection.execute("ROLLBACK")
                raise

    def _meta(self, name: str) -> Any:
        with self._lock:
            found = self._connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return found and found[0]


def _values(row: Row, origin: bytes) -> tuple[Any, ...]:
    """A row of the table. The tensors go in as they lie in memory."""
    wkv, shift = _bytes(row.state.wkv), _bytes(row.state.shift)
    layout = json.dumps([_layout(row.state.wkv), _layout(row.state.shift)]).encode()
    one = row.record
    head = (row.key, one.used, one.size, one.tokens, one.turns, origin, layout)
    seal = _seal(head)
    return (*head, seal, _checksum(seal, wkv, shift), wkv, shift)


def _parse(found: tuple[Any, ...]) -> tuple[Record, dict[str, str], SavedState]:
    """Record, origin and state of a row of the table. Raises various errors where it is damaged."""
    *head, seal, checksum, wkv, shift = found
    if seal != _seal(head) or checksum != _checksum(seal, wkv, shift):
        raise ValueError("the checksum differs")
    origin, layouts = json.loads(head[-2]), json.loads(head[-1])
    return _record(head), origin, SavedState(_tensor(wkv, layouts[0]), _tensor(shift, layouts[1]))


def _record(head: Sequence[Any]) -> Record:
    _, used, size, tokens, turns, _, _ = head
    return Record(tokens, turns, used, size)


def _seal(head: Iterable[Any]) -> bytes:
    return hashlib.sha256(repr(tuple(head)).encode()).digest()


def _checksum(seal: bytes, *data: Any) -> bytes:
    digest = hashlib.sha256(seal)
    for one in data:
        digest.update(one)
    return digest.digest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _layout(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _tensor(data: bytes, layout: dict[str, Any]) -> Tensor:
    memory = torch.empty(len(data), dtype=torch.uint8)
    memory.numpy().data[:] = data
    return memory.view(DTYPES[layout["dtype"]]).view(layout["shape"])


def _primary(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _describe(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0]


def _setting(path: Path, problem: str) -> str:
    return f"{PREFIX}SESSION_DATABASE: {path} {problem}"


def _unusable(path: Path, error: Exception) -> SettingsError:
    if isinstance(error, sqlite3.Error) and _primary(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SettingsError(_setting(path, "is open in another server; a database belongs to one, name another file"))
    reason = error.strerror if isinstance(error, OSError) else _describe(error)
    return SettingsError(_setting(path, f"cannot be used: {reason}"))


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged database and what belongs to it."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}-{secrets.token_hex(2)}")
    try:
        for suffix in SUFFIXES:
            if (old := path.with_name(path.name + suffix)).exists():
                old.rename(aside.with_name(aside.name + suffix))
    except OSError as problem:
        raise _unusable(path, problem) from None
    log.error("session_database_damaged", path=str(path), set_aside=str(aside), error=_describe(error))
