"""Who gets a row and who is forgotten, without an engine."""

from model.handle import Handle
from model.sampling import SamplingParams
from model.scheduler import Scheduler, Sequence


def _sequence(max_tokens: int = 10) -> Sequence:
    return Sequence([1, 2, 3], SamplingParams(), max_tokens, Handle())


def test_what_is_only_read_goes_before_all_who_wait() -> None:
    scheduler = Scheduler(rows=1, chunk=8)
    running, waiting, read = _sequence(), _sequence(), _sequence(max_tokens=0)
    for one in (running, waiting):
        scheduler.add(one)
    assert scheduler.admit() == [running]
    scheduler.add(read)
    for one in (running, read, waiting):
        assert scheduler.active == [one]
        scheduler.release(one)
        scheduler.admit()


def test_those_who_wait_no_more_are_forgotten_wherever_they_stand() -> None:
    scheduler = Scheduler(rows=1, chunk=8)
    running, head, last = _sequence(), _sequence(), _sequence()
    scheduler.add(running)
    assert scheduler.admit() == [running]
    scheduler.add(head)
    gone = [_sequence() for _ in range(500)]
    for one in gone:
        scheduler.add(one)
        one.handle.cancel()
    scheduler.add(last)
    assert scheduler.forget() == gone
    assert scheduler.admit() == [], "the one row is taken"
    assert scheduler.everything() == [running, head, last]
    scheduler.release(running)
    assert scheduler.admit() == [head]
    assert scheduler.everything() == [head, last]
