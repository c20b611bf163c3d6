"""Writing behind: order, room, failures, and that nothing which was taken is lost."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest

from model.errors import SessionNotKeptError
from model.session_database import Record, Row
from model.session_writer import SessionWriter
from tests.sessions.states import SIZE, state, value

KEYS = [bytes([n]) * 32 for n in range(8)]


class Disk:
    """A database that takes its time, and fails when it is told to."""

    def __init__(self) -> None:
        self.rows: dict[bytes, float | None] = {}
        self.batches: list[int] = []
        self.fails: Callable[[Sequence[Row]], str | None] = lambda rows: None
        self.free = threading.Event()
        self.free.set()

    def save(self, rows: Sequence[Row], gone: Iterable[bytes] = ()) -> None:
        assert self.free.wait(10)
        if error := self.fails(rows):
            raise SessionNotKeptError(error)
        self.batches.append(len(rows))
        for key in gone:
            self.rows.pop(key, None)
        self.rows |= {row.key: value(row.state) for row in rows}


@pytest.fixture
def disk() -> Disk:
    return Disk()


def row(key: bytes, n: float) -> Row:
    return Row(key, Record(int(n), 1, 1.0, SIZE), state(n))


def writer(disk: Disk, limit: int = 100 * SIZE) -> SessionWriter:
    return SessionWriter(disk, limit)  # type: ignore[arg-type]


def test_the_last_save_of_a_key_counts_and_can_be_found_until_it_is_written(disk: Disk) -> None:
    one = writer(disk)
    disk.free.clear()
    one.save(row(KEYS[7], 7))
    time.sleep(0.05)  # it is being written now
    for n in range(3):
        one.save(row(KEYS[0], n))
    found = one.find(KEYS[0])
    assert found is not None and found[0].tokens == 2 and value(found[1]) == 2
    assert one.waiting == 2 * SIZE
    one.save(row(KEYS[1], 9))
    one.delete(KEYS[1])
    assert one.find(KEYS[1]) is None
    disk.free.set()
    assert one.flush(5)
    assert disk.rows == {KEYS[7]: 7, KEYS[0]: 2}
    assert one.find(KEYS[0]) is None and one.waiting == 0
    assert disk.batches == [1, 1], "what came meanwhile went in one transaction"
    one.close()


def test_waiting_for_the_disk_returns_when_it_is_there(disk: Disk) -> None:
    one = writer(disk)
    disk.free.clear()
    threading.Timer(0.2, disk.free.set).start()
    began = time.monotonic()
    one.save(row(KEYS[0], 1), wait=True)
    assert time.monotonic() - began > 0.15 and disk.rows == {KEYS[0]: 1}
    one.close()


def test_a_failure_is_told_to_who_waits_and_is_final(disk: Disk) -> None:
    one = writer(disk)
    disk.fails = lambda rows: "disk full"
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(SessionNotKeptError, match="disk full"):
            one.save(row(KEYS[0], 1), wait=True)
        assert time.monotonic() - began < 0.5, "it does not sit out the pause of those who do not wait"
    assert one.find(KEYS[0]) is None and one.waiting == 0
    disk.fails = lambda rows: None
    one.save(row(KEYS[0], 2), wait=True)
    one.close()
    assert disk.rows == {KEYS[0]: 2}


def test_one_bad_row_harms_no_other_of_its_transaction(disk: Disk) -> None:
    one = writer(disk)
    disk.free.clear()
    disk.fails = lambda rows: "too large" if any(row.key == KEYS[1] for row in rows) else None
    errors: list[str] = []

    def save(n: int) -> None:
        try:
            one.save(row(KEYS[n], n), wait=True)
        except SessionNotKeptError as error:
            errors.append(f"{n} {error}")

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    disk.free.set()
    for thread in threads:
        thread.join()
    one.close()
    assert errors == ["1 E430 too large"] and disk.rows == {KEYS[n]: n for n in (0, 2, 3)}


def test_without_waiting_a_failure_loses_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("model.session_writer.PAUSE", 0.05)
    one = writer(disk, limit=3 * SIZE)
    disk.fails = lambda rows: "disk full"
    for n in range(3):
        one.save(row(KEYS[n], n))
    time.sleep(0.2)
    assert one.failure == "disk full" and one.waiting == 3 * SIZE
    with pytest.raises(SessionNotKeptError, match="disk full"):
        one.save(row(KEYS[3], 3))
    assert value(one.find(KEYS[0])[1]) == 0  # type: ignore[index]
    disk.fails = lambda rows: None
    assert one.flush(5)
    assert disk.rows == {KEYS[n]: n for n in range(3)} and one.failure is None
    assert capfd.readouterr().out.count("sessions_cannot_be_written") == 1, "once, however often it was tried"
    one.close()


def test_it_waits_for_room_while_writing_goes_well(disk: Disk) -> None:
    one = writer(disk, limit=2 * SIZE)
    disk.free.clear()
    one.save(row(KEYS[0], 0)), one.save(row(KEYS[1], 1))
    threading.Timer(0.2, disk.free.set).start()
    began = time.monotonic()
    one.save(row(KEYS[2], 2))
    assert time.monotonic() - began > 0.15
    one.close()
    assert disk.rows == {KEYS[n]: n for n in range(3)}


def test_a_state_larger_than_the_room_goes_alone(disk: Disk) -> None:
    one = writer(disk, limit=0)
    for n in range(3):
        one.save(row(KEYS[n], n))
    one.close()
    assert disk.rows == {KEYS[n]: n for n in range(3)}


def test_closing_writes_what_waits_and_takes_no_more(disk: Disk) -> None:
    one = writer(disk)
    disk.free.clear()
    for n in range(5):
        one.save(row(KEYS[n], n))
    threading.Timer(0.1, disk.free.set).start()
    one.close()
    assert len(disk.rows) == 5
    with pytest.raises(SessionNotKeptError, match="the server is ending"):
        one.save(row(KEYS[0], 7))


def test_closing_ends_where_nothing_can_be_written(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    one = writer(disk)
    disk.fails = lambda rows: "disk full"
    one.save(row(KEYS[0], 0))
    time.sleep(0.05)
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 2
    assert "sessions_not_written" in capfd.readouterr().out
