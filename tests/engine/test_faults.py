"""Whatever a step does, it is the trouble of one request at most, and health checks tell the truth."""

import random
import threading
import time

import pytest
import torch
from torch import Tensor

from model.engine import FAILED_STEPS, EngineError
from model.handle import Handle
from model.sampling import SamplingParams
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, StubPool, mixed, reply_of

GREEDY = SamplingParams(temperature=0.0)
GUILTY = 63


def failing(error: BaseException, at: int = 5) -> StubModel:
    """A model that raises once a row whose first id is GUILTY has read 1 + ``at`` ids."""

    def script(ids: list[int]) -> int:
        if ids[0] == GUILTY and len(ids) == 1 + at:
            raise error
        return mixed(ids)

    return StubModel(script, delay=0.001)


@pytest.mark.acceptance(18)
@pytest.mark.parametrize(
    "error", [ValueError("broken"), torch.OutOfMemoryError("CUDA out of memory")], ids=["error", "oom"]
)
def test_only_the_guilty_one_fails(start: StartEngine, error: Exception) -> None:
    engine = start(failing(error), rows=8)
    others = [engine.submit([n, n], GREEDY, 30) for n in range(1, 6)]
    others[0].take()
    guilty = engine.submit([GUILTY], GREEDY, 30)
    assert len(list(guilty)) == 5
    assert guilty.finish_reason == "error" and str(error) in guilty.error
    for n, handle in enumerate(others, start=1):
        rest = list(handle)
        assert rest == reply_of(mixed, [n, n], 30)[-len(rest) :]
        assert (handle.finish_reason, handle.tokens) == ("length", 30)
    assert list(engine.submit([9], GREEDY, 4)) == reply_of(mixed, [9], 4)
    assert engine.problem() is None


@pytest.mark.acceptance(7)
def test_logits_that_are_not_finite_fail_one_request(start: StartEngine) -> None:
    model = StubModel(
        lambda ids: StubModel.NAN_LOGITS if ids[0] == GUILTY and len(ids) > 3 else mixed(ids), delay=0.001
    )
    engine = start(model)
    other, guilty = engine.submit([1], GREEDY, 30), engine.submit([GUILTY], GREEDY, 30)
    assert len(list(guilty)) == 3
    assert guilty.finish_reason == "error" and "not finite" in guilty.error
    assert list(other) == reply_of(mixed, [1], 30)
    assert list(engine.submit([GUILTY, 1], GREEDY, 2)) == reply_of(mixed, [GUILTY, 1], 2)


@pytest.mark.acceptance(11)
def test_the_same_request_gives_the_same_after_cancelled_and_failed_ones(start: StartEngine) -> None:
    engine = start(failing(ValueError("broken")), rows=1)
    first = list(engine.submit([4, 5], GREEDY, 9))
    cancelled = engine.submit([6], GREEDY, 1000)
    cancelled.take()
    cancelled.cancel()
    assert list(engine.submit([4, 5], GREEDY, 9)) == first
    list(engine.submit([GUILTY], GREEDY, 9))
    assert list(engine.submit([4, 5], GREEDY, 9)) == first


def test_a_step_that_is_too_large_is_made_smaller(start: StartEngine) -> None:
    class TooSmall(StubModel):
        def forward(self, ids: Tensor, pool: StubPool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
            if len(rows) > 1:
                raise torch.OutOfMemoryError("no room for two")
            return super().forward(ids, pool, rows, cu_seqlens)

    model = TooSmall(mixed)
    engine = start(model)
    handles = [engine.submit([n], GREEDY, 50) for n in (1, 2, 3)]
    for n, handle in enumerate(handles, start=1):
        assert list(handle) == reply_of(mixed, [n], 50)
    assert len(model.steps) < 200
    assert list(engine.submit([8], GREEDY, 3)) == reply_of(mixed, [8], 3)


@pytest.mark.acceptance(18)
def test_many_guilty_ones_harm_neither_old_nor_new_neighbours(start: StartEngine) -> None:
    engine = start(failing(ValueError("broken"), at=3), rows=4)
    old = engine.submit([1], GREEDY, 200)
    for n in range(2, 8):
        guilty, new = engine.submit([GUILTY], GREEDY, 30), engine.submit([n], GREEDY, 10)
        assert len(list(guilty)) == 3 and guilty.finish_reason == "error"
        assert list(new) == reply_of(mixed, [n], 10)
    assert list(old) == reply_of(mixed, [1], 200)


@pytest.mark.acceptance(18)
@pytest.mark.parametrize("seed", range(5))
def test_in_any_mixture_the_guilty_fail_and_no_other(start: StartEngine, seed: int) -> None:
    random_ = random.Random(seed)

    def script(ids: list[int]) -> int:
        if ids[0] == GUILTY and len(ids) > ids[1] + 2:
            raise ValueError("broken")
        return mixed(ids)

    engine = start(StubModel(script, delay=0.0003), rows=6)
    sent = []
    for n in range(60):
        guilty = random_.random() < 0.3
        prompt = [GUILTY if guilty else n, random_.randrange(20), *([5] * random_.randrange(3))]
        sent.append((guilty, prompt, engine.submit(prompt, GREEDY, 25)))
        time.sleep(random_.random() * 0.003)
    for guilty, prompt, handle in sent:
        ids = list(handle)
        assert ids == reply_of(mixed, prompt, 25)[: len(ids)]
        assert handle.finish_reason == ("error" if guilty else "length"), handle.error


def test_finding_out_who_failed_holds_nobody_up(start: StartEngine) -> None:
    joined: list[Handle] = []

    def script(ids: list[int]) -> int:
        if ids[0] == GUILTY and len(ids) == 411 and not joined:
            joined.append(engine.submit([1], GREEDY, 5))
            failed_at.append(len(model.steps))
            raise ValueError("broken once")
        return mixed(ids)

    model, failed_at = StubModel(script), []
    engine = start(model, chunk=8)
    long = [engine.submit([GUILTY] * 405, GREEDY, 9) for _ in range(2)]
    assert all(list(handle) == reply_of(mixed, [GUILTY] * 405, 9) for handle in long)
    assert list(joined[0]) == reply_of(mixed, [1], 5)
    begun = [index for index, step in enumerate(model.steps) if [1] in step.ids]
    assert begun[0] <= failed_at[0] + 1, "while the two are read again, which takes a hundred steps"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_ends_all_replies_and_shows(start: StartEngine) -> None:
    engine = start(failing(SystemExit("the driver dies")))
    other, guilty = engine.submit([1], GREEDY, 10000), engine.submit([GUILTY], GREEDY, 30)
    list(guilty), list(other)
    assert (guilty.finish_reason, other.finish_reason) == ("error", "error")
    assert "the driver dies" in other.error
    engine.close()
    assert not engine.alive() and "thread is dead" in engine.problem()
    with pytest.raises(EngineError, match="has stopped"):
        engine.submit([1], GREEDY, 1)


def test_a_step_that_does_not_end_shows_and_a_pause_does_not(start: StartEngine) -> None:
    go_on = threading.Event()

    def script(ids: list[int]) -> int:
        if len(ids) == 1:
            go_on.wait(10)
        return mixed(ids)

    engine = start(StubModel(script), stalled_after=0.4)
    time.sleep(0.5)
    assert engine.problem() is None, "an engine without work is well"
    handle = engine.submit([1], GREEDY, 5)
    time.sleep(0.1)
    assert engine.problem() is None, "the time counts from when there was work"
    time.sleep(0.4)
    assert "no step has ended" in engine.problem()
    go_on.set()
    assert list(handle) == reply_of(mixed, [1], 5)
    assert engine.problem() is None


def test_many_short_steps_are_no_long_one(start: StartEngine) -> None:
    engine = start(StubModel(mixed, delay=0.01), stalled_after=0.4)
    handle = engine.submit([1], GREEDY, 80)
    while handle.finish_reason is None:
        assert engine.problem() is None
        time.sleep(0.02)
    assert handle.last_token - handle.first_token > 0.6


def test_steps_that_all_fail_show_until_one_succeeds(start: StartEngine) -> None:
    engine = start(failing(RuntimeError("the device is gone"), at=0))
    for _ in range(FAILED_STEPS):
        assert engine.problem() is None
        list(engine.submit([GUILTY], GREEDY, 1))
    assert "the device is gone" in engine.problem()
    list(engine.submit([1], GREEDY, 1))
    assert engine.problem() is None


def test_closing_ends_what_runs(start: StartEngine) -> None:
    engine = start(StubModel(mixed, delay=0.001))
    handle = engine.submit([1], GREEDY, 10000)
    handle.take()
    engine.close()
    assert handle.finish_reason == "error" and "stopped" in handle.error
