"""Who runs when, and that nobody notices the others."""

import random
import threading
import time

import pytest

from model.handle import Handle
from model.sampling import SamplingParams
from model.scheduler import TOGETHER
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, mixed, reply_of

GREEDY = SamplingParams(temperature=0.0)


def test_a_reply_ends_at_its_length(start: StartEngine) -> None:
    handle = start(StubModel(mixed)).submit([5, 6], GREEDY, 7)
    assert list(handle) == reply_of(mixed, [5, 6], 7)
    assert (handle.finish_reason, handle.tokens) == ("length", 7)
    assert handle.submitted <= handle.admitted <= handle.first_token <= handle.last_token


@pytest.mark.acceptance(2)
def test_id_0_ends_a_reply_and_is_no_part_of_it(start: StartEngine) -> None:
    engine = start(StubModel(lambda ids: 0 if len(ids) == 5 else 9))
    handle = engine.submit([1, 2], GREEDY, 100)
    assert list(handle) == [9, 9, 9]
    assert handle.finish_reason == "stop"


@pytest.mark.acceptance(2)
def test_id_0_in_the_prompt_stops_nothing(start: StartEngine) -> None:
    assert list(start(StubModel(mixed)).submit([0, 1, 0], GREEDY, 3)) == reply_of(mixed, [0, 1, 0], 3)


@pytest.mark.acceptance(8)
@pytest.mark.acceptance(17)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
def test_any_mixture_gives_what_each_gives_alone(start: StartEngine, rows: int) -> None:
    random_ = random.Random(rows)
    engine = start(StubModel(mixed, delay=0.0005), rows=rows)
    sent = []
    for length in random_.choices([1, 2, 7, 8, 9, 16, 33, 200], k=40):
        prompt = [random_.randrange(64) for _ in range(length)]
        max_tokens = random_.randrange(1, 20)
        sent.append((prompt, max_tokens, engine.submit(prompt, GREEDY, max_tokens)))
        if random_.random() < 0.3:
            sent.pop()[2].cancel()
        time.sleep(random_.random() * 0.004)
    for prompt, max_tokens, handle in sent:
        assert list(handle) == reply_of(mixed, prompt, max_tokens)
        assert handle.finish_reason == "length"


def test_rows_go_to_those_who_have_waited_longest(start: StartEngine) -> None:
    engine = start(StubModel(mixed, delay=0.001), rows=2)
    handles = [engine.submit([n], GREEDY, 4) for n in range(1, 10)]
    for handle in handles:
        list(handle)
    admitted = [handle.admitted for handle in handles]
    assert admitted == sorted(admitted)


def test_a_request_joins_at_the_next_step_and_leaves_at_once(start: StartEngine) -> None:
    joined: list[Handle] = []

    def script(ids: list[int]) -> int:
        if ids[0] == 1 and len(ids) == 10:
            joined.append(engine.submit([2], GREEDY, 3))
        return mixed(ids)

    model = StubModel(script)
    engine = start(model)
    assert list(engine.submit([1], GREEDY, 20)) == reply_of(mixed, [1], 20)
    assert list(joined[0]) == reply_of(mixed, [2], 3)
    assert [len(step.rows) for step in model.steps] == [1] * 10 + [2] * 3 + [1] * 7


def test_a_long_prompt_stalls_no_running_reply(start: StartEngine) -> None:
    model = StubModel(mixed, delay=0.001)
    engine = start(model, chunk=8)
    running = engine.submit([1], GREEDY, 100)
    running.take()
    entering = engine.submit(list(range(60)) * 3, GREEDY, 1)
    assert list(entering) == reply_of(mixed, list(range(60)) * 3, 1)
    with_prompt = [step for step in model.steps if max(map(len, step.ids)) > 1]
    assert len(with_prompt) >= 20
    assert all(len(step.rows) == 2 and min(map(len, step.ids)) == 1 for step in with_prompt)
    running.cancel()


def test_chunks_lie_on_a_fixed_grid_and_a_step_has_a_budget(start: StartEngine) -> None:
    model = StubModel(mixed, delay=0.0005)
    engine = start(model, rows=6, chunk=8)
    prompts = [[n + 1] * length for n, length in enumerate([37, 5, 8, 9, 21, 3])]
    for handle in [engine.submit(prompt, GREEDY, 2) for prompt in prompts]:
        list(handle)
    position = [0] * 6
    for step in model.steps:
        for row, ids in zip(step.rows, step.ids, strict=True):
            begin, end = position[row], position[row] + len(ids)
            assert begin // 8 == (end - 1) // 8, "a part crosses the grid"
            position[row] = end
        together = TOGETHER if min(map(len, step.ids)) == 1 else 1  # chunks: whether somebody writes beside them
        assert sum(len(ids) for ids in step.ids if len(ids) > 1) <= 8 * together


def test_a_short_prompt_does_not_wait_for_a_long_one(start: StartEngine) -> None:
    joined: list[Handle] = []

    def script(ids: list[int]) -> int:
        if ids[0] == 1 and len(ids) == 80:
            joined.append(engine.submit([2] * 6, GREEDY, 1))
        return mixed(ids)

    model = StubModel(script)
    engine = start(model, chunk=8)
    assert list(engine.submit([1] * 800, GREEDY, 1)) == reply_of(mixed, [1] * 800, 1)
    assert list(joined[0]) == reply_of(mixed, [2] * 6, 1)
    assert [2] * 6 in [ids for step in model.steps[10:12] for ids in step.ids]


@pytest.mark.acceptance(16)
def test_cancelling_stops_generation_at_once(start: StartEngine) -> None:
    def script(ids: list[int]) -> int:
        if len(ids) == 10:
            handle.cancel()
        return mixed(ids)

    model = StubModel(script)
    handle = Handle()
    engine = start(model)
    engine.submit([1], GREEDY, 10000, handle)
    while engine.last_step_age():
        time.sleep(0.01)
    assert (handle.take(), handle.finish_reason) == ([], "cancelled"), "not even what had been drawn"
    assert len(model.steps) == 10
    assert list(engine.submit([2], GREEDY, 3)) == reply_of(mixed, [2], 3)


@pytest.mark.acceptance(16)
def test_cancelling_works_while_the_prompt_is_read_and_in_the_queue(start: StartEngine) -> None:
    model = StubModel(mixed, delay=0.002)
    engine = start(model, rows=1)
    reading = engine.submit([1] * 100000, GREEDY, 1)
    waiting, last = engine.submit([2], GREEDY, 1), engine.submit([3], GREEDY, 2)
    time.sleep(0.02)
    waiting.cancel()
    reading.cancel()
    assert list(last) == reply_of(mixed, [3], 2)
    assert (reading.take(), waiting.take()) == ([], [])
    assert all(ids[0] != 2 for step in model.steps for ids in step.ids)


def test_a_group_of_ids_wakes_its_reader_once(start: StartEngine) -> None:
    handle = start(StubModel(mixed, delay=0.005)).submit([1], GREEDY, 100)
    assert handle.take()
    assert len(handle.take(pause=0.1)) > 3
    began = time.monotonic()
    while handle.take(pause=10):
        pass
    assert time.monotonic() - began < 5, "the end of a reply interrupts the pause"


def test_many_threads_may_submit(start: StartEngine) -> None:
    engine = start(StubModel(mixed), rows=8)
    wrong: list[int] = []

    def client(n: int) -> None:
        wrong.extend(k for k in range(5) if list(engine.submit([n, k], GREEDY, 5)) != reply_of(mixed, [n, k], 5))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ids_outside_the_vocabulary_are_refused(start: StartEngine) -> None:
    engine = start(StubModel(mixed))
    for ids in ([], [64], [-1]):
        with pytest.raises(ValueError, match="ids: one or more from 0 to 63"):
            engine.submit(ids, GREEDY, 1)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_fewer_than_one_token_is_refused(start: StartEngine, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens: one or more are needed, got {max_tokens}"):
        start(StubModel(mixed)).submit([1], GREEDY, max_tokens)
