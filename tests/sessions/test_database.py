"""One file: what is written is whole or not there, and what is damaged is refused, set aside, and never deleted."""

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from model.errors import SessionNotKeptError, SessionRefusedError
from model.session_database import Record, Row, SessionDatabase
from model.settings import SettingsError
from model.state import SavedState
from tests.sessions.states import SIZE, state, value

ORIGIN = {"model": "a", "state_dtype": "float32"}
KEYS = [bytes([n]) * 32 for n in range(8)]


def row(key: bytes, n: float, used: float = 1.5) -> Row:
    return Row(key, Record(tokens=int(n), turns=1, used=used, size=SIZE), state(n))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def database(path: Path) -> Iterator[SessionDatabase]:
    found = SessionDatabase(path, ORIGIN)
    yield found
    found.close()


def reopened(database: SessionDatabase, **origin: str) -> SessionDatabase:
    database.close()
    return SessionDatabase(database.path, ORIGIN | origin)


def test_what_was_saved_is_there_after_reopening(database: SessionDatabase) -> None:
    database.save([row(KEYS[0], 1, used=0.1), row(KEYS[1], 2)])
    database.save([row(KEYS[1], 3)], gone=[KEYS[0], KEYS[5]])
    salt = database.salt()
    database = reopened(database)
    assert database.records == {KEYS[1]: Record(3, 1, 1.5, SIZE)}
    assert database.load(KEYS[0]) is None
    found = database.load(KEYS[1])
    assert found is not None and found[0].tokens == 3 and value(found[1]) == 3
    assert len(salt) == 32 and database.salt() == salt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_bit_of_a_state_comes_back(database: SessionDatabase, dtype: torch.dtype) -> None:
    bits = torch.arange(2 * 64 * 64, dtype=torch.int32).to(torch.int16)
    wkv = bits.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).view(2, 1, 64, 64)
    wkv = wkv if dtype != torch.float32 else torch.randn(2, 1, 64, 64)
    saved = SavedState(wkv, torch.randn(2, 2, 64))
    database.save([Row(KEYS[0], Record(1, 1, 1.0, 1), saved)])
    found = database.load(KEYS[0])
    assert found is not None
    assert found[1].wkv.dtype == dtype and found[1].wkv.shape == wkv.shape
    assert found[1].wkv.view(torch.uint8).equal(wkv.view(torch.uint8)) and found[1].shift.equal(saved.shift)


def test_the_file_is_its_owners_alone(database: SessionDatabase) -> None:
    database.save([row(KEYS[0], 1)])
    for file in database.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize(("name", "theirs"), [("model", "b"), ("state_dtype", "float16"), ("start_token", "true")])
def test_a_state_of_another_origin_is_refused_by_name(database: SessionDatabase, name: str, theirs: str) -> None:
    database.save([row(KEYS[0], 1)])
    other = reopened(database, **{name: theirs})
    with pytest.raises(SessionRefusedError, match=rf"^E420 session: it was made with {name} .*, .* has {theirs}"):
        other.load(KEYS[0])
    other.save([row(KEYS[1], 2)])
    assert other.load(KEYS[1]) is not None


def test_it_belongs_to_one_server(database: SessionDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.session_database.BUSY", 0.1)
    with pytest.raises(SettingsError, match=r"E130 COG_RWKV_SESSION_DATABASE: .*sessions.db is open in another server"):
        SessionDatabase(database.path, ORIGIN)


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none" / "sessions.db", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(SettingsError, match=rf"COG_RWKV_SESSION_DATABASE: {path} cannot be used: {reason}"):
            SessionDatabase(path, ORIGIN)


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SettingsError, match="another program"):
        SessionDatabase(path, ORIGIN)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    connection.close()
    assert len(path.read_bytes()) >= len(before)


def test_a_newer_version_is_left_alone(database: SessionDatabase) -> None:
    database._connection.execute("PRAGMA user_version=2")
    database.close()
    with pytest.raises(SettingsError, match="version 2, wanted 1"):
        SessionDatabase(database.path, ORIGIN)


@pytest.mark.parametrize("damage", [b"this is no database, and never was one", b"\0" * 100000])
def test_a_damaged_file_is_set_aside(path: Path, damage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(damage)
    database = SessionDatabase(path, ORIGIN)
    database.save([row(KEYS[0], 1)])
    assert database.load(KEYS[0]) is not None
    (aside,) = path.parent.glob("sessions.db.damaged-*")
    assert aside.read_bytes() == damage
    assert "session_database_damaged" in (out := capfd.readouterr().out) and str(aside) in out
    database.close()


def test_a_file_whose_first_pages_are_damaged_is_set_aside_with_its_log(database: SessionDatabase) -> None:
    database.save([row(KEYS[0], 1)])
    database.close()
    whole = database.path.read_bytes()
    database.path.write_bytes(whole[:100] + b"\xff" * 2000 + whole[2100:])
    log = database.path.with_name("sessions.db-wal")
    log.write_bytes(b"not to be lost")
    again = SessionDatabase(database.path, ORIGIN)
    assert again.records == {}
    kept = {file.name.split(".damaged-")[1][20:]: file.read_bytes() for file in database.path.parent.glob("*damaged*")}
    assert kept[""][100:2100] == b"\xff" * 2000 and kept["-wal"] == b"not to be lost"
    again.close()


@pytest.mark.parametrize(
    "change",
    ["wkv = zeroblob(length(wkv))", "shift = x'00'", "tokens = 7", "used = 1e300", "size = 'many'", "layout = x'ff'",
     "checksum = x'00'", "origin = '{}'"],
)  # fmt: skip
def test_a_damaged_row_is_refused_and_harms_no_other(database: SessionDatabase, change: str) -> None:
    database.save([row(KEYS[0], 1), row(KEYS[1], 2)])
    database._connection.execute(f"UPDATE sessions SET {change} WHERE key = ?", (KEYS[0],))
    database = reopened(database)
    with pytest.raises(SessionRefusedError, match=r"E420 session: its state in sessions.db is damaged .*another name"):
        database.load(KEYS[0])
    found = database.load(KEYS[1])
    assert found is not None and value(found[1]) == 2
    assert database.records.keys() == {KEYS[0], KEYS[1]}, "nothing is deleted"
    assert database.records[KEYS[0]].used < 1e10 and database.records[KEYS[0]].size in (0, SIZE)
    database.close()


def test_a_full_disk_fails_the_write_and_keeps_what_was_there(database: SessionDatabase) -> None:
    database.save([row(KEYS[0], 1)])
    pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
    database._connection.execute(f"PRAGMA max_page_count={pages}")
    large = SavedState(torch.zeros(1 << 20), torch.zeros(1))
    with pytest.raises(SessionNotKeptError, match=r"E430 session: cannot be written to sessions.db: .*full"):
        database.save([row(KEYS[0], 2), Row(KEYS[1], Record(1, 1, 1.0, 1), large)])
    found = database.load(KEYS[0])
    assert found is not None and value(found[1]) == 1 and database.load(KEYS[1]) is None
    database._connection.execute("PRAGMA max_page_count=1000000")
    database.save([row(KEYS[0], 3)])
    found = reopened(database).load(KEYS[0])
    assert found is not None and value(found[1]) == 3


WRITERS = """
import os, sys
from pathlib import Path
from model.session_database import Record, Row, SessionDatabase
from tests.sessions.states import SIZE, state
path, keys = Path(sys.argv[1]), [bytes([n]) * 32 for n in range(8)]
print("ready", flush=True)
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("killed", flush=True)
        continue
    database = SessionDatabase(path, {"model": "a", "state_dtype": "float32"}, durable=True)
    os.write(1, b"pid %d\\n" % os.getpid())
    for n in range(int(line) + 1, 10**9):
        database.save([Row(key, Record(n, 1, 1.0, SIZE), state(n)) for key in keys])
        os.write(1, b"done %d\\n" % n)  # a whole line or nothing
"""


def _kill_while_writing(path: Path, times: int) -> None:
    """Each time a process is killed at another moment: all rows are of one save, the last acknowledged or the next."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    writers = subprocess.Popen(
        [sys.executable, "-c", WRITERS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env=environment,
    )  # fmt: skip
    assert writers.stdin is not None and writers.stdout is not None
    assert writers.stdout.readline() == "ready\n"
    last = 0
    for round in range(times):
        print(last, file=writers.stdin, flush=True)
        pid = int(writers.stdout.readline().split()[1])
        done = [int(writers.stdout.readline().split()[1]) for _ in range(1 + round % 3)][-1]
        time.sleep(round % 10 * 0.0007)
        os.kill(pid, signal.SIGKILL)
        while (line := writers.stdout.readline()) != "killed\n":
            done = int(line.split()[1])
        database = SessionDatabase(path, ORIGIN)
        found = {value(one[1]) for key in KEYS if (one := database.load(key)) is not None}
        database.close()
        assert len(found) == 1
        last = int(found.pop() or 0)
        assert last in (done, done + 1), "what was acknowledged, or what was written when nobody was left to tell"
        assert not list(path.parent.glob("*damaged*"))
    writers.stdin.close()
    assert writers.wait(10) == 0


def test_kill_9_in_the_middle_of_writing(path: Path) -> None:
    _kill_while_writing(path, 12)


@pytest.mark.slow
def test_kill_9_in_the_middle_of_writing_often(path: Path) -> None:
    _kill_while_writing(path, 500)


def test_every_prefix_of_the_log_opens_to_whole_states(database: SessionDatabase, tmp_path: Path) -> None:
    """As after a crash at any moment of writing: the log ends anywhere, or with rubbish."""
    database.save([row(key, 1) for key in KEYS])
    database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for n in (2, 3):
        database.save([row(key, n) for key in KEYS])
    log = Path(f"{database.path}-wal").read_bytes()
    seen = set()
    for end in [*range(0, len(log), 4999), len(log)]:
        for tail in (b"", b"\xa5" * 5000):
            copy = tmp_path / f"copy{end}{len(tail)}.db"
            shutil.copy(database.path, copy)
            Path(f"{copy}-wal").write_bytes(log[:end] + tail)
            crashed = SessionDatabase(copy, ORIGIN)
            (found,) = {value(one[1]) for key in KEYS if (one := crashed.load(key)) is not None}
            seen.add(found)
            crashed.close()
            copy.unlink()
    assert seen == {1, 2, 3}


class Databases(RuleBasedStateMachine):
    """Against a dictionary, with closing and reopening at any time."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.database = SessionDatabase(Path(self.folder.name) / "sessions.db", ORIGIN)
        self.wanted: dict[bytes, float] = {}
        self.written = 0

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), gone=st.lists(st.sampled_from(KEYS), unique=True))
    def save(self, keys: list[bytes], gone: list[bytes]) -> None:
        self.written += 1
        self.database.save([row(key, self.written) for key in keys], gone)
        for key in gone:
            self.wanted.pop(key, None)
        self.wanted |= dict.fromkeys(keys, self.written)

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: bytes) -> None:
        found = self.database.load(key)
        assert (found and (found[0].tokens, value(found[1]))) == (
            (self.wanted[key], self.wanted[key]) if key in self.wanted else None
        )

    @rule()
    def reopen(self) -> None:
        self.database = reopened(self.database)
        assert {key: one.tokens for key, one in self.database.records.items()} == self.wanted

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            self.folder.cleanup()


TestDatabases = Databases.TestCase
TestDatabases.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
