"""Nothing of a request stays behind."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.orders import order
from tests.serving.server import Server


def _one(server: Server, n: int) -> None:
    """Every tenth is cancelled, every tenth fails."""
    if n % 10 == 3:
        with server.open_stream(order(words=5000), max_tokens=60000) as events:
            next(event for event in events if event.name == "output")
    elif n % 10 == 7:
        prompt = order(words=9, fail=("error", "oom", "nan")[n % 3], at=3)
        assert server.predict(prompt)["status"] == "failed"
    else:
        temperature = 1.0 if n % 10 == 5 else 0.0
        assert server.predict(order(words=2 + n % 3), seed=n, temperature=temperature)["status"] == "succeeded"


def _run(server: Server, numbers: range) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: _one(server, n), numbers))


def _check(server: Server, count: int) -> None:
    """A buffer of 6 MB comes and goes, so this compares the most of three samples with the least of three."""
    warm = count // 5  # by then every thread of the server has come into being
    before = max(_memory_after(server, range(n, n + warm // 3)) for n in range(0, warm, warm // 3))
    step = count // 4
    after = [_memory_after(server, range(warm + n, warm + n + step)) for n in range(0, count, step)]
    assert min(after[-3:]) <= before * 1.01
    assert server.health()["status"] == "READY"


def _memory_after(server: Server, numbers: range) -> int:
    _run(server, numbers)
    return server.memory()


@pytest.mark.acceptance(12)
def test_a_thousand_requests_leave_no_trace_in_memory(launch: Callable[..., Server]) -> None:
    server = launch()
    server.defaults = {"temperature": 0.0}
    _check(server, 1000)


@pytest.mark.slow
@pytest.mark.acceptance(12)
def test_ten_thousand_requests_leave_no_trace_in_memory(launch: Callable[..., Server]) -> None:
    server = launch()
    server.defaults = {"temperature": 0.0}
    _check(server, 10000)
