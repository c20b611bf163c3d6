"""A failing request fails alone, and the health check tells the truth."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.orders import order, words
from tests.serving.server import Server

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
