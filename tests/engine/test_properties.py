"""What holds for any requests in any order: each ends once, rows are nobody else's, order is fair, budgets hold."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import checkpoint
from model.engine import QueueFullError
from model.handle import FinishReason, Handle
from model.prefix_cache import PrefixCache
from model.rwkv7 import RWKV7
from model.sampling import SamplingParams
from model.scheduler import TOGETHER, Part, Sequence
from model.state import StatePool
from model.stepper import Flight
from tests import tiny
from tests.engine.by_hand import GREEDY, ByHand, DictStore
from tests.stub_model import StubModel, mixed, reply_of

GUILTY = 63
few = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Order:
    """A request that comes at turn ``at``, whose reader leaves at turn ``leaves``."""

    prompt: list[int]
    max_tokens: int
    at: int
    leaves: int | None
    guilty_at: int | None = None  # the model fails once it has read so many ids of it

    @property
    def ids(self) -> list[int]:
        """Begin with what tells the model to fail."""
        return self.prompt if self.guilty_at is None else [GUILTY, self.guilty_at, *self.prompt]


class Watched(Handle):
    """Notes each end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[FinishReason] = []

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """As any other."""
        if self.finish_reason is None:
            self.ends.append(reason)
        super().finish(reason, error)


def reply(read: list[int]) -> int:
    """The next id of one that is not guilty; sometimes the reply is over."""
    token = mixed(read)
    return 0 if token % 13 == 0 else token


def _script(read: list[int]) -> int:
    if read[0] == GUILTY and len(read) > 1 and len(read) >= read[1]:
        raise ValueError("broken")
    return reply(read)


def _orders(guilty: bool = False, ids: int = 62, length: int = 70) -> st.SearchStrategy[list[Order]]:
    one = st.builds(
        Order,
        prompt=st.lists(st.integers(1, ids), min_size=1, max_size=length),
        max_tokens=st.integers(1, 12),
        at=st.integers(0, 40),
        leaves=st.one_of(st.none(), st.none(), st.integers(0, 60)),
        guilty_at=st.sampled_from([None, None, None, 3, 9, 20]) if guilty else st.none(),
    )
    return st.lists(one, min_size=1, max_size=12)


machines = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 5),
        "chunk": st.sampled_from([1, 3, 8, 20]),
        "grid": st.sampled_from([1, 2, 16]),
        "ahead": st.sampled_from([0, 1, 2]),
    }
)


def _play(engine: ByHand, orders: list[Order]) -> list[Watched | None]:
    """Send the orders as their time comes; the handle of each, None where it was refused."""
    handles: list[Watched | None] = [None] * len(orders)
    turn = 0
    while turn <= max(one.at for one in orders) or engine._held or engine._flights:
        for n, one in enumerate(orders):
            handle = handles[n]
            if one.at == turn:
                handle = Watched()
                with suppress(QueueFullError):
                    engine.submit(one.ids, GREEDY, one.max_tokens, handle)
                    handles[n] = handle
            if handle is not None and one.leaves is not None and one.leaves <= turn:
                handle.cancel()
        engine.turn()
        rows = [sequence.row for sequence in engine._scheduler.active]
        assert len(set(rows)) == len(rows)
        turn += 1
        assert turn < 5000, "it never ends"
    return handles


def _check(one: Order, handle: Watched) -> None:
    ids = list(handle)
    assert len(handle.ends) == 1
    expected = reply_of(reply, one.ids, one.max_tokens)
    to_read = len(one.ids) + len(expected) - (len(expected) == one.max_tokens)
    fails = one.guilty_at is not None and to_read >= one.guilty_at
    if handle.finish_reason in ("stop", "length"):
        assert ids == expected and not fails
        assert handle.finish_reason == ("length" if len(ids) == one.max_tokens else "stop")
    elif handle.finish_reason == "error":
        assert fails and handle.error == "ValueError: broken"
        assert ids == expected[: len(ids)]
    else:
        assert one.leaves is not None and ids == []


@contextmanager
def _engine(machine: dict[str, int], **parameters: Any) -> Iterator[ByHand]:
    engine = ByHand(StubModel(_script), **machine, **parameters)
    try:
        yield engine
        assert engine.clean()
    finally:
        engine.close()


@few
@given(orders=_orders(), machine=machines)
def test_every_request_ends_once_with_its_own_reply(orders: list[Order], machine: dict[str, int]) -> None:
    with _engine(machine) as engine:
        for one, handle in zip(orders, _play(engine, orders), strict=True):
            assert handle is not None
            _check(one, handle)
        assert engine.counters()["steps_failed"] == 0


@few
@given(orders=_orders(guilty=True), machine=machines)
def test_the_guilty_fail_and_no_other(orders: list[Order], machine: dict[str, int]) -> None:
    with _engine(machine) as engine:
        for one, handle in zip(orders, _play(engine, orders), strict=True):
            assert handle is not None
            _check(one, handle)


@few
@given(orders=_orders(), machine=machines, max_queue=st.integers(0, 3))
def test_the_queue_has_an_end(orders: list[Order], machine: dict[str, int], max_queue: int) -> None:
    with _engine(machine, max_queue=max_queue) as engine:
        handles = _play(engine, orders)
        for one, handle in zip(orders, handles, strict=True):
            if handle is not None:
                _check(one, handle)
        together = max(sum(one.at == at for one in orders) for at in range(41))
        refused = handles.count(None)
        assert refused >= together - machine["rows"] - max_queue
        assert refused == 0 or len(orders) > machine["rows"] + max_queue
        counters = engine.counters()
        assert counters["requests_refused"] == refused
        assert sum(counters[f"requests_{end}"] for end in ("stop", "length", "cancelled")) == len(orders) - refused


@few
@given(orders=_orders(), machine=machines)
def test_rows_are_given_in_the_order_of_arrival(orders: list[Order], machine: dict[str, int]) -> None:
    orders = sorted((replace(one, leaves=None) for one in orders), key=lambda one: one.at)
    with _engine(machine) as engine:
        admitted = [handle.admitted for handle in _play(engine, orders) if handle is not None]
        assert admitted == sorted(admitted)


@few
@given(orders=_orders(), machine=machines)
def test_steps_keep_to_the_grid_and_to_their_budget(orders: list[Order], machine: dict[str, int]) -> None:
    with _engine(machine) as engine:
        grid = min(machine["grid"], machine["chunk"])
        chunk = machine["chunk"] // grid * grid
        launch, reading = engine._stepper.launch, []

        def watched(parts: list[Part], keep: set[Sequence]) -> Flight:
            prompts = [part for part in parts if part.end < part.sequence.prompt or part.size > 1]
            together = 1 if len(prompts) == len(parts) else TOGETHER
            assert sum(part.size for part in prompts) <= together * chunk
            for part in prompts:
                assert part.end % grid == 0 or part.draws
                assert part.begin // chunk == (part.end - 1) // chunk
                if len(prompts) == len(parts):
                    assert part.begin % chunk == 0 or reading, "whole chunks where nothing is being written"
            reading[:] = [part for part in prompts if part.end % chunk]
            return launch(parts, keep)

        engine._stepper.launch = watched
        _play(engine, orders)


@few
@given(orders=_orders(), machine=machines, at=st.integers(0, 30))
def test_who_is_cancelled_is_gone_at_the_next_turn(orders: list[Order], machine: dict[str, int], at: int) -> None:
    with _engine(machine) as engine:
        handles = [engine.order(one.ids, one.max_tokens + 20) for one in orders]
        for _ in range(at):
            engine.turn()
        for handle in handles:
            handle.cancel()
        steps = len(engine.model.steps)
        turns = engine.run()
        assert turns <= 2 and len(engine.model.steps) == steps


@few
@given(orders=_orders(ids=2, length=90), machine=machines, most=st.integers(1, 30), exact=st.booleans())
def test_cached_prefixes_change_nothing(orders: list[Order], machine: dict[str, int], most: int, exact: bool) -> None:
    with _engine(machine, cache=PrefixCache(DictStore(most), exact)) as engine:
        for one, handle in zip(orders, _play(engine, orders), strict=True):
            assert handle is not None
            _check(one, handle)
        again = engine.order(orders[0].ids, 5)
        engine.run()
        assert list(again) == reply_of(reply, orders[0].ids, 5)
        assert again.cached_tokens + again.prefill_tokens == len(orders[0].ids)
        assert again.cached_tokens < len(orders[0].ids)


@few
@given(orders=_orders(), machine=machines, late=st.sets(st.integers(1, 60), max_size=6))
def test_errors_that_show_late_end_no_more_than_one_request_each(
    orders: list[Order], machine: dict[str, int], late: set[int]
) -> None:
    """As on a GPU, where a step that was launched without complaint may turn out to have failed."""
    with _engine(machine) as engine, pytest.MonkeyPatch.context() as patch:
        whole, calls = Flight.result, itertools.count(1)

        def result(flight: Flight) -> list[int]:
            if next(calls) in late:
                raise RuntimeError("late")
            return whole(flight)

        patch.setattr(Flight, "result", result)
        failed = 0
        for one, handle in zip(orders, _play(engine, orders), strict=True):
            assert handle is not None
            if handle.finish_reason == "error":
                assert handle.error == "RuntimeError: late"
                failed += 1
            else:
                _check(one, handle)
        assert failed <= engine.counters()["steps_failed"] <= len(late)


@cache
def _real() -> RWKV7:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny.write(tiny.Shape(vocab=300), Path(folder) / "tiny.safetensors")
        return RWKV7.load(checkpoint.load(str(path)), "cpu", progress=False)


@cache
def _alone(ids: tuple[int, ...], max_tokens: int, seed: int) -> list[int]:
    engine = ByHand(_real(), 1, 64, StatePool(_real().config, 1))
    handle = engine.submit(ids, _drawn(seed), max_tokens)
    engine.run()
    engine.close()
    return list(handle)


def _drawn(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=1.5, presence_penalty=0.3 * (seed % 2), top_k=40 * (seed % 3))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    orders=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=50), st.integers(0, 20)), min_size=2, max_size=6
    ),
    machine=machines,
    cached=st.booleans(),
)
def test_a_real_model_gives_each_its_own_reply_bit_for_bit(
    orders: list[tuple[list[int], int]], machine: dict[str, int], cached: bool
) -> None:
    """With a seed, whatever the row, the neighbours, the cuts and the order of arrival: as the CPU promises."""
    pool = StatePool(_real().config, machine["rows"])
    engine = ByHand(_real(), pool=pool, cache=PrefixCache(DictStore(), exact=True) if cached else None, **machine)
    handles = []
    for n, (ids, at) in enumerate(sorted(orders, key=lambda one: one[1])):
        for _ in range(at // (n + 1)):
            engine.turn()
        handles.append((ids, n, engine.submit(ids, _drawn(n), 6)))
    engine.run()
    assert engine.clean()
    engine.close()
    for ids, n, handle in handles:
        assert list(handle) == _alone(tuple(ids), 6, n)
