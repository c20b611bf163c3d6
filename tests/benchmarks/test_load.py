"""What the load test counts, and that it asks what it says."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.load_engine import Driver
from benchmarks.load_memory import Memory, trend
from benchmarks.load_stats import Record, Window, percentile, summary
from benchmarks.load_work import Work
from model.engine import Engine
from model.sampling import Sampler
from model.service import Service
from model.settings import Settings
from tests.stub_model import StubModel, StubPool, mixed

WORK = Work(seed=3, prompt_tokens=(30, 60), output_tokens=(5, 20), temperature=1.0, vocab=None)


def record(sent: float, first: float, last: float, tokens: int, **more: object) -> Record:
    return Record("x", sent, first, last, 7, tokens, **more)


def test_only_what_came_in_the_window_counts() -> None:
    window = Window(start=0, begin=10, end=20)
    records = [record(0, 5, 15, 100), record(12, 15, 25, 100), record(19, 21, 30, 50), record(1, 12, 12, 1)]
    assert window.throughput(records) == pytest.approx((50 + 50 + 0 + 1) / 10)
    assert [one.sent for one in window.within(records)] == [12, 19]
    assert len(window.curve(records)) == 40 and sum(window.curve(records)) / 2 == pytest.approx(151, abs=2)


def test_the_numbers_of_a_run() -> None:
    window = Window(start=0, begin=10, end=20)
    records = [record(0, 1, 9, 9), record(10, 10.1, 11.1, 11), record(11, 11.3, 13.3, 11, retried=2)]
    records.append(Record("x", 12, error="HTTP 500"))
    found = summary(records, window)
    assert (found["errors"], found["retried_409"], found["requests"]) == (1, 2, 4)
    assert found["ttft_p50_s"] == pytest.approx(0.2) and found["ttft_p99_s"] == pytest.approx(0.298)
    assert found["tpot_p50_s"] == pytest.approx(0.15)
    assert (found["prompt_tokens"], found["output_tokens"]) == (7, 10)
    assert found["http_tokens_per_s"] == pytest.approx(2.2)


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([1.0, float("inf")], 0.0) == 1.0
    assert percentile([1.0, float("inf")], 1.0) == float("inf")


def test_memory_that_fills_is_told_from_memory_that_leaks() -> None:
    filling = [100.0] * 10 + [120.0 + n for n in range(40)] + [160.0] * 51
    found = trend(filling)
    assert (found["start"], found["end"], found["most"]) == (100.0, 160.0, 160.0)
    assert 0 <= found["late_growth"] < 0.005
    leaking = [100.0 + n for n in range(101)]
    assert trend(leaking)["late_growth"] == pytest.approx(195.5 / 150 - 1, abs=0.01)
    assert trend([100.0, 80.0, 90.0])["late_growth"] == 0.125


def test_the_memory_of_a_process_and_of_its_children() -> None:
    """A process of a few megabytes with a child that holds 50 more."""
    child = "import time; held = b'x' * (50 << 20); print('there', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, process_group=0) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
            begin = time.monotonic()
            with Memory(process.pid) as memory:
                time.sleep(3)
            found = memory.summary(Window(begin, begin, time.monotonic()))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert found["http_server"]["end"] < 30 < 50 < found["worker"]["end"] < 80
    assert found["end"] == pytest.approx(found["http_server"]["end"] + found["worker"]["end"], abs=0.2)


def test_requests_depend_on_the_seed_alone() -> None:
    again = pickle.loads(pickle.dumps(WORK))
    keys = [WORK.key(stream, number) for stream in range(3) for number in range(3)]
    assert len(set(keys)) == 9
    inputs = [WORK.inputs(key) for key in keys]
    assert [again.inputs(key) for key in keys] == inputs
    assert len({one["prompt"] for one in inputs}) == 9
    for one in inputs:
        assert 30 <= len(WORK.tokenizer.encode(one["prompt"])) <= 60
        assert 5 <= one["max_tokens"] <= 20


def test_a_finite_set_of_requests() -> None:
    work = Work(3, (30, 60), (5, 20), 0.0, None, distinct=4)
    drawn = [work.key(stream, number) for stream in range(20) for number in range(5)]
    assert set(drawn) == set(work.all_keys()) == {"0", "1", "2", "3"}


def test_the_closed_loop_over_an_engine() -> None:
    """Over a stub: every stream goes on with its next request, all are read to their ends, none twice."""
    tokenizer = WORK.tokenizer
    model = StubModel(lambda ids: 33 + mixed(ids, 90), 65536, delay=0.001)
    sampler = Sampler(65536, 3, "cpu", tokenizer.allowed(65536))
    engine = Engine(model, sampler, StubPool(3), 512)
    began = time.monotonic()
    records, window = Driver(Service(engine, tokenizer, Settings()), WORK, streams=3).run(seconds=1.5)
    engine.close()
    assert began <= window.start < window.begin == window.end - 1.5
    assert time.monotonic() > window.end
    assert all(one.error is None and one.sent < window.end for one in records)
    keys = sorted(one.key for one in records)
    assert len(set(keys)) == len(keys) > 3
    assert {key.split("-")[0] for key in keys} == {"0", "1", "2"}
    for one in records:
        inputs = WORK.inputs(one.key)
        assert one.tokens == inputs["max_tokens"] and one.prompt_tokens == len(tokenizer.encode(inputs["prompt"]))
        assert one.sent <= one.first <= one.last
