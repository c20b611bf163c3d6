"""The tiers of memory: what is kept where, what is given up first, and that a state is never another's."""

import gc
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from model.state import SavedState
from model.tiers import StateTiers
from tests.sessions.states import SIZE, state, value


def test_the_least_recently_used_goes_down_and_then_away() -> None:
    tiers = StateTiers(2 * SIZE, 2 * SIZE)
    for n in range(4):
        tiers.put(n, state(n))
    assert tiers.used == (2 * SIZE, 2 * SIZE)
    assert value(tiers.get(0)) == 0, "moved up, and 2 down"
    tiers.put(4, state(4))
    assert [value(tiers.get(n)) for n in (0, 1, 2, 3, 4)] == [0, None, 2, 3, 4], "1 was on the host the longest"
    assert tiers.forgotten == tiers.misses == 1


def test_a_state_replaces_the_one_before_in_both_tiers() -> None:
    tiers = StateTiers(SIZE, SIZE)
    tiers.put("a", state(1))
    tiers.put("b", state(2))
    tiers.put("a", state(3))
    assert len(tiers) == 2
    assert (value(tiers.get("a")), value(tiers.get("b"))) == (3, 2)
    tiers.drop("a")
    assert tiers.get("a") is None and "a" not in tiers and "b" in tiers
    tiers.drop("a")


def test_what_was_given_out_counts_until_it_is_let_go() -> None:
    tiers = StateTiers(2 * SIZE, 8 * SIZE)
    for n in range(4):
        tiers.put(n, state(n))
    held = [tiers.get(3), tiers.get(2)]
    tiers.put(5, state(5))
    assert tiers.used[0] == 2 * SIZE, "nothing else has room beside the two that are held"
    assert value(tiers.get(5)) == 5 and value(tiers.get(0)) == 0, "from the host"
    assert tiers.used[0] == 2 * SIZE
    assert [value(one) for one in held] == [3, 2]
    held.clear()
    gc.collect()
    assert value(tiers.get(5)) == 5
    assert tiers.used[0] == SIZE, "now there is room for it on the device"


def test_a_state_that_fits_nowhere_is_not_kept() -> None:
    tiers = StateTiers(SIZE - 1, SIZE - 1)
    tiers.put(1, state(1))
    assert tiers.get(1) is None and tiers.used == (0, 0)
    only_host = StateTiers(0, SIZE)
    only_host.put(1, state(1))
    assert value(only_host.get(1, wait=True)) == 1
    assert only_host.used == (0, SIZE)


def test_threads_may_share_it() -> None:
    tiers, faults = StateTiers(3 * SIZE, 5 * SIZE), []

    def work(first: int) -> None:
        for n in range(2000):
            key = first + n % 5
            tiers.put(key, state(key))
            if value(tiers.get(key)) not in (key, None):
                faults.append(key)
            if n % 7 == 0:
                tiers.drop(key)

    threads = [threading.Thread(target=work, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for key in range(50):
        tiers.drop(key)
    gc.collect()
    assert tiers.used == (0, 0) and len(tiers) == 0


class Tiers(RuleBasedStateMachine):
    """Against two plain lists in the order of use."""

    @initialize(device=st.integers(0, 3), host=st.integers(0, 3))
    def begin(self, device: int, host: int) -> None:
        self.tiers = StateTiers(device * SIZE, host * SIZE)
        self.room = (device, host)
        self.device: OrderedDict[int, int] = OrderedDict()
        self.host: OrderedDict[int, int] = OrderedDict()
        self.written = 0

    def go_down(self, limit: int) -> None:
        while len(self.device) > limit:
            key, written = self.device.popitem(last=False)
            self.host[key] = written
            while len(self.host) > self.room[1]:
                self.host.popitem(last=False)

    @rule(key=st.integers(0, 8))
    def put(self, key: int) -> None:
        self.written += 1
        self.tiers.put(key, state(self.written))
        self.device.pop(key, None), self.host.pop(key, None)
        self.device[key] = self.written
        self.go_down(self.room[0])

    @rule(key=st.integers(0, 8))
    def get(self, key: int) -> None:
        wanted = self.device.get(key, self.host.get(key))
        assert value(self.tiers.get(key)) == wanted
        if key in self.device:
            self.device.move_to_end(key)
        elif key in self.host and self.room[0]:
            self.device[key] = self.host.pop(key)
            self.go_down(self.room[0])
        elif key in self.host:
            self.host.move_to_end(key)

    @rule(key=st.integers(0, 8))
    def drop(self, key: int) -> None:
        self.tiers.drop(key)
        self.device.pop(key, None), self.host.pop(key, None)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "tiers"):
            assert self.tiers.used == (len(self.device) * SIZE, len(self.host) * SIZE)
            assert {key for key in range(9) if key in self.tiers} == self.device.keys() | self.host.keys()


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.gpu
class TestOnCuda:
    """Copies on a stream of their own, used at once by work on another."""

    SIZE = 4 * 32 * (16 * 64 * 64 + 2 * 1024)  # large enough that a copy can be caught half done

    def saved(self, n: float) -> SavedState:
        return SavedState(
            torch.full((32, 16, 64, 64), float(n), device="cuda"), torch.full((32, 2, 1024), float(n), device="cuda")
        )

    def test_states_survive_the_way_down_and_up(self) -> None:
        tiers = StateTiers(2 * self.SIZE, 10 * (self.SIZE + 4096), "cuda")
        for n in range(10):
            tiers.put(n, self.saved(n))
        torch.cuda.synchronize()
        assert tiers.used == (2 * self.SIZE, 8 * self.SIZE)
        for n in (0, 9, 5, 1, 0, 7):
            assert value(tiers.get(n)) == n
        assert tiers.used[0] <= 2 * self.SIZE

    def test_a_copy_is_never_seen_half_done(self) -> None:
        """The states are written by slow work on the current stream, and read on another as soon as they are given."""
        tiers = StateTiers(2 * self.SIZE, 6 * (self.SIZE + 4096), "cuda")
        other = torch.cuda.Stream()
        for round in range(20):
            for n in range(6):
                slow = self.saved(0)
                torch.cuda._sleep(2_000_000)
                slow.wkv.add_(round * 10 + n), slow.shift.add_(round * 10 + n)
                tiers.put(n, slow)
                del slow
            with torch.cuda.stream(other):
                for n in range(6):
                    found = tiers.get(n)
                    assert found is not None
                    assert value(found) == round * 10 + n
                    del found

    def test_the_host_is_pinned_and_no_call_waits_for_the_device(self) -> None:
        tiers = StateTiers(self.SIZE, 4 * (self.SIZE + 4096), "cuda")
        tiers.put("warm", self.saved(0))
        tiers.put("warm too", self.saved(0))
        torch.cuda.synchronize()
        states = [self.saved(n) for n in range(3)]
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy = torch.cuda.current_stream().record_event()
        for n in range(3):
            tiers.put(n, states.pop(0))
            tiers.get(n)
        assert not busy.query(), "the device is still at it"
        assert value(tiers.get(0, wait=True)) == 0

    def test_to_host_gives_what_the_cpu_can_read(self) -> None:
        tiers = StateTiers(self.SIZE, 2 * (self.SIZE + 4096), "cuda")
        made = [tiers.to_host(self.saved(n)) for n in range(4)]
        assert [value(one) for one in made] == [0, 1, 2, 3]
        assert [one.wkv.is_pinned() for one in made] == [True, True, True, False], "all slots were taken"
        del made
        gc.collect()
        assert tiers.to_host(self.saved(5)).wkv.is_pinned()
