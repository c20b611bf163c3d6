"""Requests that go on from a state, and states made of a text."""

from collections.abc import Iterator

import pytest
import torch

from model import checkpoint
from model.engine import Engine, EngineError
from model.rwkv7 import RWKV7
from model.sampling import Sampler, SamplingParams
from model.state import SavedState, StatePool
from tests import tiny
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, StubPool, mixed, reply_of

GREEDY = SamplingParams(temperature=0.0)


def test_a_request_goes_on_from_a_state(start: StartEngine) -> None:
    engine = start(StubModel(mixed), chunk=8)
    before = list(range(1, 20))
    state = engine.read(before)
    assert state == before
    assert list(engine.submit([7, 8], GREEDY, 6, start=state)) == reply_of(mixed, [*before, 7, 8], 6)
    assert engine.read([9], state) == [*before, 9]
    assert state == before, "a state that others start from is never written"
    assert list(engine.submit([7, 8], GREEDY, 6)) == reply_of(mixed, [7, 8], 6)


def test_a_text_is_read_beside_running_replies_and_in_turn(start: StartEngine) -> None:
    model = StubModel(mixed, delay=0.001)
    engine = start(model, rows=2, chunk=8)
    running = engine.submit([1], GREEDY, 10000)
    running.take()
    assert engine.read([5] * 100) == [5] * 100
    assert running.finish_reason is None
    with_text = [step for step in model.steps if any(len(ids) > 1 for ids in step.ids)]
    assert len(with_text) >= 13 and all(len(step.rows) == 2 for step in with_text)
    running.cancel()


def test_reading_that_fails_is_an_error(start: StartEngine) -> None:
    def script(ids: list[int]) -> int:
        if 63 in ids:
            raise ValueError("broken")
        return mixed(ids)

    engine = start(StubModel(script))
    with pytest.raises(EngineError, match="could not be read: ValueError: broken"):
        engine.read([1, 63])
    assert engine.read([1, 2]) == [1, 2]
    with pytest.raises(ValueError, match="ids: one or more"):
        engine.read([])


def test_without_memory_for_its_state_one_reading_fails(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(pool: StubPool, row: int) -> None:
        raise torch.OutOfMemoryError("no room")

    engine = start(StubModel(mixed, delay=0.001))
    running = engine.submit([1], GREEDY, 60)
    running_ids = running.take()
    monkeypatch.setattr(StubPool, "save", save)
    with pytest.raises(EngineError, match="no memory for its state"):
        engine.read([1, 2])
    assert running_ids + list(running) == reply_of(mixed, [1], 60)
    assert engine.counters()["steps_failed"] == 0


def test_a_request_with_a_state_survives_a_neighbour_that_fails(start: StartEngine) -> None:
    def script(ids: list[int]) -> int:
        if ids[0] == 63 and len(ids) == 4:
            raise ValueError("broken")
        return mixed(ids)

    engine = start(StubModel(script, delay=0.001))
    state = engine.read([1, 2, 3])
    handle = engine.submit([4], GREEDY, 50, start=state)
    first = handle.take()
    guilty = engine.submit([63], GREEDY, 50)
    assert first + list(handle) == reply_of(mixed, [1, 2, 3, 4], 50)
    assert len(list(guilty)) == 3 and guilty.finish_reason == "error"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RWKV7:
    """A real one, tiny, on the CPU."""
    path = tiny.write(tiny.Shape(vocab=300), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    return RWKV7.load(checkpoint.load(str(path)), "cpu", progress=False)


@pytest.fixture
def engine(model: RWKV7) -> Iterator[Engine]:
    """Over it, with a pool whose rows are dirty."""
    pool = StatePool(model.config, 3)
    pool.wkv.fill_(7.0)
    pool.shift.fill_(7.0)
    allowed = torch.ones(model.vocab_size, dtype=torch.bool)
    engine = Engine(model, Sampler(model.vocab_size, 3, "cpu", allowed), pool, 16)
    yield engine
    engine.close()


def _equal(one: SavedState, other: SavedState) -> bool:
    return torch.equal(one.wkv, other.wkv) and torch.equal(one.shift, other.shift)


@pytest.mark.parametrize("cut", [1, 16, 17, 39])
def test_states_on_states_equal_the_whole_text_bit_for_bit(model: RWKV7, engine: Engine, cut: int) -> None:
    ids = [1 + (7 * n) % 250 for n in range(40)]
    pool = StatePool(model.config, 1)
    model.forward(torch.tensor(ids), pool, torch.tensor([0]), torch.tensor([0, 40]))
    busy = engine.submit([5], SamplingParams(seed=1), 200)
    half = engine.read(ids[:cut])
    kept = SavedState(half.wkv.clone(), half.shift.clone())
    assert _equal(engine.read(ids[cut:], half), pool.save(0))
    whole = list(engine.submit([*ids, 9], SamplingParams(seed=3), 10))
    assert list(engine.submit([*ids[cut:], 9], SamplingParams(seed=3), 10, start=half)) == whole
    assert _equal(half, kept)
    busy.cancel()
