"""Turns: one at a time, all or nothing, within the limits, and over restarts."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model import session_clock
from model.errors import SessionBusyError, SessionNotKeptError, SessionRefusedError
from model.sessions import Limits, Sessions
from model.tiers import StateTiers
from tests.sessions.states import SIZE, state, value

Open = Callable[..., Sessions]


class Clock:
    """Stands for the module time: a wall clock that can be set, and a monotonic one that can only go on."""

    def __init__(self) -> None:
        self.wall, self.steady = 1e9, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(session_clock, "time", found)
    return found


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Open]:
    """``open_(disk=True, host=10, sessions=100, disk_states=100, ttl=100.0, wait=0.2, ...)``."""
    opened: list[Sessions] = []

    def open_(
        disk: bool = True, host: int = 10, sessions: int = 100, disk_states: int = 100, ttl: float = 100.0,
        wait: float = 0.2, durable: bool = False, **origin: str,
    ) -> Sessions:  # fmt: skip
        limits = Limits(sessions, disk_states * SIZE, ttl, wait)
        path = tmp_path / "sessions.db" if disk else None
        opened.append(Sessions(StateTiers(0, host * SIZE), limits, origin, path, durable, 10 * SIZE))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


def turn(sessions: Sessions, name: str, n: float, tokens: int = 5) -> float | None:
    """One whole turn that ends with the state ``n``; returns the state with which it began."""
    with sessions.turn(name) as one:
        assert one is not None
        sessions.keep(one, state(n), one.tokens + tokens)
        return value(one.start)


def look(sessions: Sessions, name: str) -> tuple[float | None, int, int]:
    """State, tokens and turns, without a turn."""
    with sessions.turn(name) as one:
        assert one is not None
        return value(one.start), one.tokens, one.turns


@pytest.mark.parametrize("disk", [False, True])
def test_a_turn_begins_with_the_state_of_the_last(open_: Open, disk: bool) -> None:
    sessions = open_(disk)
    assert turn(sessions, "a", 1) is None
    assert turn(sessions, "b", 2) is None
    assert turn(sessions, "a", 3) == 1
    assert look(sessions, "a") == (3, 10, 2) and look(sessions, "b") == (2, 5, 1)


@pytest.mark.parametrize("disk", [False, True])
def test_a_turn_that_fails_changes_nothing(open_: Open, disk: bool) -> None:
    sessions = open_(disk)
    turn(sessions, "a", 1)
    with pytest.raises(ZeroDivisionError), sessions.turn("a") as one:
        assert one is not None and one.turns == 1
        raise ZeroDivisionError
    with sessions.turn("new"):
        pass
    assert look(sessions, "a") == (1, 5, 1) and look(sessions, "new") == (None, 0, 0)
    assert sessions.counters()["sessions"] == 1


def test_sessions_live_on_after_a_restart(open_: Open) -> None:
    sessions = open_()
    turn(sessions, "a", 1), turn(sessions, "a", 2), turn(sessions, "ü" * 256, 3)
    sessions.close()
    again = open_()
    assert look(again, "a") == (2, 10, 2) and look(again, "ü" * 256) == (3, 5, 1)
    assert again.counters()["session_disk_hits"] == 2
    assert look(again, "a") == (2, 10, 2) and again.counters()["session_host_hits"] >= 1


def test_without_a_database_they_end_with_the_process_or_when_memory_is_short(open_: Open) -> None:
    sessions = open_(disk=False, host=2)
    for n in range(3):
        turn(sessions, f"s{n}", n)
    assert [look(sessions, f"s{n}")[0] for n in (0, 1, 2)] == [None, 1, 2]
    assert look(sessions, "s0") == (None, 0, 0), "it begins anew"
    assert look(open_(disk=False), "s1") == (None, 0, 0)


def test_memory_may_be_short_where_there_is_a_database(open_: Open) -> None:
    sessions = open_(host=1)
    for n in range(20):
        turn(sessions, f"s{n}", n)
    assert [look(sessions, f"s{n}")[0] for n in range(20)] == list(range(20))


def test_durable_means_on_disk_when_the_turn_ends(open_: Open, tmp_path: Path) -> None:
    sessions = open_(durable=True)
    turn(sessions, "a", 1)
    assert sessions.counters()["session_writes"] == 1 and sessions.counters()["session_bytes_unwritten"] == 0


def test_a_second_request_waits_for_the_first(open_: Open) -> None:
    sessions, order = open_(wait=10), []
    inside = threading.Event()

    def first() -> None:
        with sessions.turn("a") as one:
            assert one is not None
            inside.set()
            time.sleep(0.2)
            order.append("first")
            sessions.keep(one, state(1), 5)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(5)
    assert turn(sessions, "b", 7) is None and order == [], "another session waits for nobody"
    assert turn(sessions, "a", 2) == 1, "it goes on from what the first has made"
    assert order == ["first"]
    thread.join()


def test_many_requests_on_one_session_are_made_one_after_the_other(open_: Open) -> None:
    sessions = open_(wait=30)
    seen: list[float | None] = []

    def one_more() -> None:
        with sessions.turn("a") as one:
            assert one is not None
            seen.append(value(one.start))
            time.sleep(0.002)
            sessions.keep(one, state((value(one.start) or 0) + 1), one.tokens + 1)

    threads = [threading.Thread(target=one_more) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [None, *range(1, 30)] and look(sessions, "a") == (30, 30, 30)


def test_a_session_that_stays_busy_is_refused_by_name(open_: Open) -> None:
    sessions = open_(wait=0.1)
    with sessions.turn("a"):
        began = time.monotonic()
        with pytest.raises(SessionBusyError, match=r"^E410 session: another request has it"), sessions.turn("a"):
            pass
        assert 0.1 <= time.monotonic() - began < 2
    assert look(sessions, "a") == (None, 0, 0)


def test_who_waits_may_be_cancelled(open_: Open) -> None:
    sessions, cancelled = open_(wait=60), threading.Event()
    with sessions.turn("a"):
        threading.Timer(0.1, cancelled.set).start()
        with sessions.turn("a", cancelled.is_set) as one:
            assert one is None
    assert turn(sessions, "a", 1) is None


@pytest.mark.parametrize("disk", [False, True])
def test_the_longest_unused_go_when_there_are_too_many(open_: Open, clock: Clock, disk: bool) -> None:
    sessions = open_(disk, sessions=3)
    for n in range(3):
        turn(sessions, f"s{n}", n)
        clock.pass_(1)
    turn(sessions, "s0", 10)
    with sessions.turn("s1") as held:
        turn(sessions, "s3", 3)
        assert held is not None and value(held.start) == 1
    assert [look(sessions, f"s{n}")[0] for n in range(4)] == [10, 1, None, 3], "s1 was in use"
    assert sessions.counters()["sessions"] == 3 and sessions.counters()["sessions_evicted"] == 1
    if disk:
        sessions.close()
        assert [look(open_(), f"s{n}")[0] for n in (2,)] == [None]


def test_the_longest_unused_go_when_the_disk_has_enough(open_: Open, clock: Clock) -> None:
    sessions = open_(disk_states=2)
    for n in range(4):
        turn(sessions, f"s{n}", n)
        clock.pass_(1)
    assert [look(sessions, f"s{n}")[0] for n in range(4)] == [None, None, 2, 3]


def test_a_state_that_is_too_large_for_the_disk_is_refused(open_: Open) -> None:
    with pytest.raises(SessionNotKeptError, match=r"E430 session: .*COG_RWKV_SESSION_DISK_BYTES allows 0"):
        turn(open_(disk_states=0), "x", 1)


@pytest.mark.parametrize("disk", [False, True])
def test_a_session_expires(open_: Open, clock: Clock, disk: bool) -> None:
    sessions = open_(disk, ttl=100)
    turn(sessions, "old", 1), turn(sessions, "used", 2)
    clock.pass_(60)
    turn(sessions, "used", 3)
    clock.pass_(60)
    assert look(sessions, "old") == (None, 0, 0) and look(sessions, "used")[0] == 3
    assert sessions.counters()["sessions_expired"] == 1
    if disk:
        sessions.close()
        clock.pass_(60)
        again = open_(ttl=100)
        assert again.counters()["sessions"] == 0, "while the server was down"


@pytest.mark.parametrize("jump", [-1e9, -1e5, 1e5, 1e9])
def test_a_clock_that_jumps_while_the_server_runs_makes_nobody_older(open_: Open, clock: Clock, jump: float) -> None:
    sessions = open_(ttl=100)
    turn(sessions, "a", 1)
    clock.wall += jump
    turn(sessions, "b", 2)
    assert look(sessions, "a")[0] == 1 and look(sessions, "b")[0] == 2
    clock.pass_(101)
    assert look(sessions, "a")[0] is None and look(sessions, "b")[0] is None


def test_a_clock_that_is_behind_at_a_restart_makes_nobody_younger(open_: Open, clock: Clock) -> None:
    sessions = open_(ttl=100)
    turn(sessions, "a", 1)
    sessions.close()
    clock.wall -= 5000
    sessions = open_(ttl=100)
    clock.pass_(60)
    assert look(sessions, "a")[0] == 1
    turn(sessions, "b", 2)
    clock.pass_(41)
    assert look(sessions, "a")[0] is None and look(sessions, "b")[0] == 2


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_loses_nothing(open_: Open, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.session_writer.PAUSE", 0.05)
    sessions = open_(durable=durable)
    turn(sessions, "a", 1)
    database = sessions._database
    assert database is not None and sessions._writer is not None and sessions._writer.flush(5)
    pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
    database._connection.execute(f"PRAGMA max_page_count={pages}")
    if durable:
        with pytest.raises(SessionNotKeptError, match=r"E430 session: cannot be written to sessions.db: .*full"):
            for n in range(2, 1000):
                turn(sessions, f"s{n}", n)
        assert look(sessions, f"s{sessions.counters()['sessions'] + 1}") == (None, 0, 0)
        assert look(sessions, "a") == (1, 5, 1)
    else:
        for n in range(2, 150):
            try:
                turn(sessions, f"s{n}", n)
            except SessionNotKeptError:
                break
        assert sessions.counters()["session_bytes_unwritten"] > 0
        kept = [n for n in range(2, 150) if look(sessions, f"s{n}")[0] == n]
        assert len(kept) == n - 2 >= 10, "what was taken is there, in memory"
        database._connection.execute("PRAGMA max_page_count=100000")
        sessions.close()
        again = open_()
        assert [look(again, f"s{n}")[0] for n in kept] == kept, "and on disk as soon as there is room"


def test_a_damaged_row_is_refused_and_nothing_else(open_: Open) -> None:
    sessions = open_()
    turn(sessions, "a", 1), turn(sessions, "b", 2)
    database = sessions._database
    assert database is not None and sessions._writer is not None and sessions._writer.flush(5)
    with sessions.turn("a") as one:
        assert one is not None
        database._connection.execute("UPDATE sessions SET wkv = zeroblob(length(wkv)) WHERE key = ?", (one.key,))
    sessions.close()
    again = open_()
    for _ in range(2):
        with pytest.raises(SessionRefusedError, match="damaged"):
            look(again, "a")
    assert look(again, "b")[0] == 2


def test_a_state_of_another_model_is_refused(open_: Open) -> None:
    sessions = open_(model="one")
    turn(sessions, "a", 1)
    sessions.close()
    with pytest.raises(SessionRefusedError, match="model one, and this server has two"):
        look(open_(model="two"), "a")


NAMES = ["../../etc/passwd", "/etc/passwd", "a'; DROP TABLE sessions; --", "..", "\0", "%s", "C:\\x", "a" * 256, "🦩"]


def test_names_are_no_paths_and_no_statements(open_: Open, tmp_path: Path) -> None:
    sessions = open_()
    for n, name in enumerate(NAMES):
        assert turn(sessions, name, n) is None
    assert [look(sessions, name)[0] for name in NAMES] == list(range(len(NAMES)))
    sessions.close()
    files = sorted(tmp_path.iterdir())
    assert {file.name for file in files} <= {"sessions.db", "sessions.db-wal"}
    assert not any(name.encode() in file.read_bytes() for file in files for name in NAMES if len(name) > 8)


def test_no_name_is_in_the_log(open_: Open, clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    sessions = open_(sessions=1)
    turn(sessions, "a secret name", 1), turn(sessions, "another one", 2)
    out = capfd.readouterr().out
    assert "session_deleted" in out and "secret" not in out
