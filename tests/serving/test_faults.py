"""A failing request fails alone, and the health check tells the truth."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.orders import order, words
from tests.serving.server import Server
from tests.serving.stages import STAGES

MESSAGES = {"error": "injected failure", "oom": "out of memory", "nan": "not finite"}


@pytest.mark.acceptance(18)
@pytest.mark.parametrize("kind", list(MESSAGES))
def test_a_fault_at_token_5_fails_one_prediction(stub: Server, kind: str) -> None:
    streamed = stub.stream(order(words=30, fail=kind, at=5))
    assert len(streamed.named("completed")) == 1 and not streamed.named("error")
    assert streamed.final["status"] == "failed" and MESSAGES[kind] in streamed.final["error"]
    assert streamed.final["metrics"]["finish_reason"] == "error"
    assert streamed.final["metrics"]["completion_tokens"] == 5
    plain = stub.predict(order(words=30, fail=kind, at=5))
    assert plain["status"] == "failed" and MESSAGES[kind] in plain["error"]
    assert stub.health()["status"] == "READY"
    assert stub.text(order(words=30)) == words(30)


@pytest.mark.acceptance(18)
def test_a_fault_harms_none_of_those_that_run_beside_it(stub: Server) -> None:
    def run(n: int) -> str:
        if n % 4 == 0:
            return stub.predict(order(words=50, fail="oom" if n % 8 else "error", at=5))["status"]
        return stub.text(order(words=50 + n, delay=0.001), max_tokens=2000)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(run, range(32))) == ["failed" if n % 4 == 0 else words(50 + n) for n in range(32)]
    assert stub.health()["status"] == "READY"


def test_a_dead_driver_thread_is_unhealthy(launch: Callable[..., Server]) -> None:
    server = launch(concurrency=4)
    assert server.health()["status"] == "READY"
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.predict, order(words=5000), max_tokens=60000)
        guilty = server.predict(order(words=30, fail="exit", at=5))
        assert guilty["status"] == other.result(10)["status"] == "failed"
    health = server.health()
    assert health["status"] == "UNHEALTHY"
    assert "thread is dead" in health["user_healthcheck_error"]
    late = server.predict(order(words=3))
    assert late["status"] == "failed" and "has stopped" in late["error"]
    assert late["metrics"]["finish_reason"] == "error"


def test_a_step_that_does_not_end_is_unhealthy_until_it_does(launch: Callable[..., Server]) -> None:
    server = launch(concurrency=4, STUB_STALLED_AFTER="1")
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        reply = pool.submit(server.predict, order(words=30, fail="hang", at=2))
        seen: list[dict[str, Any]] = []
        while not reply.done():
            asked = time.monotonic()
            seen.append(server.health())
            assert time.monotonic() - asked < 1
            time.sleep(0.1)
        assert time.monotonic() - began > 2.5
        assert reply.result()["status"] == "succeeded"
    statuses = [health["status"] for health in seen]
    assert statuses[0] == "READY" and "UNHEALTHY" in statuses
    assert any("no step has ended" in health.get("user_healthcheck_error", "") for health in seen)
    assert server.health()["status"] == "READY"


@pytest.mark.acceptance(11)
@pytest.mark.acceptance(18)
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_at_any_stage_fails_one_prediction(stub: Server, stage: str) -> None:
    before = stub.text("def f(x):", max_tokens=30)
    streamed = stub.stream(order(stage=stage, words=20))
    assert len(streamed.named("completed")) == 1 and not streamed.named("error")
    assert streamed.final["status"] == "failed"
    assert f"InjectedError: injected at {stage}" in streamed.final["error"]
    assert stub.health()["status"] == "READY"
    assert stub.text("def f(x):", max_tokens=30) == before


@pytest.mark.acceptance(18)
def test_exceptions_at_all_stages_cost_no_slot_and_no_row(stub: Server) -> None:
    """More of them at once than there are slots or rows, among others that have to be right."""

    def run(n: int) -> str:
        if n % 3:
            return stub.predict(order(stage=STAGES[n % len(STAGES)], words=20))["status"]
        return stub.text(order(words=20 + n), max_tokens=2000)

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(run, range(84))) == ["failed" if n % 3 else words(20 + n) for n in range(84)]
    with ThreadPoolExecutor(32) as pool:
        whole = pool.map(lambda n: stub.text(order(words=n, delay=0.002), max_tokens=500), range(20, 52))
        assert list(whole) == [words(n) for n in range(20, 52)]


def test_a_killed_worker_ends_its_streams_and_shows(launch: Callable[..., Server]) -> None:
    server = launch(concurrency=4)
    endless: dict[str, Any] = {"prompt": order(words=5000, delay=0.01), "max_tokens": 60000, "temperature": 0.0}
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(server.stream, **endless) for _ in range(2)]
        plain = pool.submit(server.predict, **endless)
        time.sleep(1)
        server.processes()[-1].kill()
        for stream in streams:
            streamed = stream.result(10)
            assert len(streamed.named("completed")) == 1 and streamed.text.startswith("w0 w1 ")
            assert (streamed.final["status"], streamed.final["error"]) == ("failed", "Worker crashed")
        assert plain.result(10)["status"] == "failed"
    assert server.health()["status"] in ("UNHEALTHY", "DEFUNCT")
    assert server.predict(order(words=3))["status"] == "failed", "an end, not a silence"
    server.stop()
    again = launch(concurrency=4)
    assert again.text(order(words=30), temperature=0.0) == words(30)


def test_a_clock_that_jumps_is_no_matter(launch: Callable[..., Server]) -> None:
    server = launch(STUB_CLOCK_JUMPS="1", STUB_STALLED_AFTER="2")
    for n in range(5):
        began = time.monotonic()
        streamed = server.stream(order(words=60 + n, delay=0.003), temperature=0.0)
        took = time.monotonic() - began
        assert streamed.text == words(60 + n)
        metrics = streamed.final["metrics"]
        assert 0 <= metrics["queue_time"] < took and 0 < metrics["time_to_first_token"] < took
        assert 0.003 < metrics["time_per_output_token"] < took
        assert server.health()["status"] == "READY"
