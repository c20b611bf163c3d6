"""Who gets a row and who is forgotten, without an engine."""

from model.handle import Handle
from model.sampling import SamplingParams
from model.scheduler import Scheduler, Sequence


def _sequence() -> Sequence:
    return Sequence([1, 2, 3], SamplingParams(), 10, Handle())


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
