"""Cog ends a prediction that is just beginning by an exception thrown into its thread, between any two instructions.

Whatever that thread was doing with the engine then, the engine goes on for all others.
"""

import ctypes
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from model.engine import Engine
from model.handle import Handle
from model.sampling import SamplingParams
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, mixed, reply_of

LIVES = 150
GREEDY = SamplingParams(temperature=0.0)


class ThrownError(Exception):
    """What is thrown."""


class Reader(threading.Thread):
    """Sends request after request, as the server's threads do, until something is thrown; and so LIVES times."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.open = False  # whether something may be thrown; no lock, for that would be one more to lose
        self.thrown_at = float("inf")
        self.whole = 0

    def run(self) -> None:
        for _ in range(LIVES):
            try:
                self.open = True
                while True:
                    self._one()
            except (ThrownError, RuntimeError):  # the latter: thrown while a lock was let go for a wait
                pass

    def _one(self) -> None:
        handle = Handle()
        try:
            self.engine.submit([3, 4], GREEDY, 3, handle)
            while handle.take():
                pass
            self.whole += 1
        finally:
            handle.cancel()  # as predict.py does


def _lost(reader: Reader) -> bool:
    """Whether what was thrown fell into a callback of the interpreter (of a weak reference), which ignores it."""
    return reader.is_alive() and not reader.open and time.monotonic() - reader.thrown_at > 2


def _throw_at_once(reader: Reader) -> None:
    reader.open, reader.thrown_at = False, time.monotonic()
    identity, error = ctypes.c_ulong(reader.ident or 0), ctypes.py_object(ThrownError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, error)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after every few instructions, so that exceptions arrive at every one of them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_an_exception_thrown_into_a_reader_holds_nobody_up(start: StartEngine) -> None:
    engine = start(StubModel(mixed), rows=8)
    readers = [Reader(engine) for _ in range(4)]
    for reader in readers:
        reader.start()
    draw, thrown = random.Random(0), 0
    while any(reader.is_alive() for reader in readers):
        assert engine.last_step_age() < 5, "a lock was never given back"
        time.sleep(draw.random() * 0.002)
        if (victim := draw.choice(readers)).open:
            _throw_at_once(victim)
            thrown += 1
        elif _lost(victim):
            _throw_at_once(victim)
    assert thrown == LIVES * len(readers) and sum(reader.whole for reader in readers) > 10
    assert list(engine.submit([5], GREEDY, 9)) == reply_of(mixed, [5], 9)
    time.sleep(0.1)
    assert engine.last_step_age() == 0 and engine.counters()["rows_busy"] == 0
