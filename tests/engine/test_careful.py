"""Requests whose numbers leave the range of the fast path: read once more, by a model with a wider one."""

from itertools import pairwise

import pytest
from torch import Tensor

from model.handle import Handle
from model.sampling import SamplingParams
from model.state import SavedState
from model.step_graphs import ladder
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, StubPool, StubStatePool, ids_in, mixed, reply_of

GREEDY = SamplingParams(temperature=0.0)
LARGE = 9  # an id that the fast model cannot bear


def narrow(ids: list[int]) -> int:
    return StubModel.NAN_LOGITS if LARGE in ids else mixed(ids)


def replies(handles: list[Handle]) -> list[list[int]]:
    return [list(handle) for handle in handles]


def test_it_is_read_again_and_its_neighbours_never_notice(start: StartEngine) -> None:
    fast, careful = StubModel(narrow), StubModel(mixed)
    engine = start(fast, rows=3, careful=careful)
    prompts = [[1, 2, 3], [LARGE, 5], [4] * 20, [6, LARGE] * 9, [7]]
    handles = [engine.submit(ids, GREEDY, 12) for ids in prompts]
    assert replies(handles) == [reply_of(mixed, ids, 12) for ids in prompts]
    assert {handle.finish_reason for handle in handles} <= {"length", "stop"}
    assert careful.steps and engine.held() == 0


def test_what_came_before_is_not_given_twice(start: StartEngine) -> None:
    """It leaves the range in the middle of a reply."""

    def later(ids: list[int]) -> int:
        return StubModel.NAN_LOGITS if len(ids) >= 9 else mixed(ids)

    engine = start(StubModel(later), careful=StubModel(mixed))
    params = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert list(engine.submit([1, 2], params, 20)) == list(start(StubModel(mixed)).submit([1, 2], params, 20))


def test_one_that_is_not_finite_even_so_fails_alone(start: StartEngine) -> None:
    engine = start(StubModel(narrow), careful=StubModel(narrow))
    guilty, other = engine.submit([LARGE], GREEDY, 5), engine.submit([1], GREEDY, 5)
    assert list(other) == reply_of(mixed, [1], 5)
    assert list(guilty) == [] and guilty.finish_reason == "error" and "not finite" in str(guilty.error)


def test_it_can_be_cancelled_meanwhile(start: StartEngine) -> None:
    engine = start(StubModel(narrow), careful=StubModel(mixed, delay=0.005))
    handle = engine.submit([LARGE], GREEDY, 50000)
    assert handle.take()
    handle.cancel()
    assert list(engine.submit([3], GREEDY, 4)) == reply_of(mixed, [3], 4)
    assert engine.held() == 0


class LargePool(StubStatePool):
    """A state is not finite where the fast model has read what it cannot bear."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.spoiled = [False] * rows

    def clear(self, row: int) -> None:
        super().clear(row)
        self.spoiled[row] = False

    def save(self, row: int) -> SavedState:  # type: ignore[override]
        saved = super().save(row)
        if self.spoiled[row]:
            saved.shift.fill_(float("nan"))
        return saved


class Spoiling(StubModel):
    """The fast model of a LargePool."""

    def forward(self, ids: Tensor, pool: StubPool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        logits = super().forward(ids, pool, rows, cu_seqlens)
        assert isinstance(pool, LargePool)
        for row in rows.tolist():
            pool.spoiled[row] = LARGE in pool.read[row]
        return logits


def test_a_text_that_is_only_read(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.conftest.StubPool", LargePool)
    careful = StubModel(mixed)
    engine = start(Spoiling(mixed), careful=careful)
    assert ids_in(engine.read([1, 2])) == [1, 2] and not careful.steps
    read = engine.read([1, LARGE])
    assert read.finite() and ids_in(read) == [1, LARGE] and careful.steps


def test_the_ladder_of_batch_sizes() -> None:
    for most in (1, 2, 8, 9, 12, 40, 100, 512, 1024):
        sizes = ladder(most)
        assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
        assert all(after <= 1.5 * before + 1 for before, after in pairwise(sizes))
    assert len(ladder(512)) < 30
