"""The three ways in which a client ends a prediction, and that nothing of it stays behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.orders import order, words
from tests.serving.server import Server, Streamed, was_cancelled

ENDLESS = order(words=60000)  # at a millisecond or so a token
LIMIT = 60000


def _by_endpoint(server: Server, id: str) -> None:
    with server.open_stream(ENDLESS, id=id, max_tokens=LIMIT) as events:
        next(event for event in events if event.name == "output")
        assert server.cancel(id) == 200
        rest = Streamed(list(events))
    assert rest.final["status"] == "canceled"
    assert rest.final["metrics"]["finish_reason"] == "cancelled"
    assert 0 < rest.final["metrics"]["completion_tokens"] < 5000


def _by_leaving_a_stream(server: Server, id: str) -> None:
    with server.open_stream(ENDLESS, id=id, max_tokens=LIMIT) as events:
        next(event for event in events if event.name == "output")


def _by_leaving_a_post(server: Server, id: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        while (
            server.client.post(
                "/predictions", json={"id": id, "input": {"prompt": ENDLESS, "max_tokens": LIMIT}}, timeout=0.3
            ).status_code
            == 409
        ):
            time.sleep(0.02)


WAYS = [_by_endpoint, _by_leaving_a_stream, _by_leaving_a_post]


def _gone(server: Server, id: str) -> bool:
    return server.cancel(id) == 404


def _wait_until(condition: Callable[[], bool], limit: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.acceptance(16)
@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_prediction_ends_at_once(stub: Server, way: Callable[[Server, str], None]) -> None:
    id = f"ended{way.__name__}"
    way(stub, id)
    assert _wait_until(lambda: _gone(stub, id), limit=2) < 1
    assert stub.text(order(words=5)) == words(5)


@pytest.mark.acceptance(16)
def test_generation_stops_within_two_tokens(stub: Server) -> None:
    with stub.open_stream(order(ids=[98] * 50, delay=0.1), id="two-tokens", max_tokens=500) as events:
        seen = "".join(next(event.data["chunk"] for event in events if event.name == "output") for _ in range(4))
        assert stub.cancel("two-tokens") == 200
        rest = Streamed(list(events))
    assert seen == "aaaa"
    assert len(seen) <= rest.final["metrics"]["completion_tokens"] <= len(seen) + 2


def _leave_stream(server: Server, id: str, prompt: str) -> None:
    with server.open_stream(prompt, id=id, max_tokens=LIMIT) as events:
        next(event for event in events if event.name == "output")


def _leave_post(server: Server, id: str, prompt: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/predictions", json={"id": id, "input": {"prompt": prompt, "max_tokens": LIMIT}}, timeout=1)


@pytest.mark.acceptance(16)
@pytest.mark.parametrize("leave", [_leave_stream, _leave_post])
def test_generation_stops_when_the_client_has_left(
    stub: Server, tmp_path: Path, leave: Callable[[Server, str, str], None]
) -> None:
    """Steps take 0.3 s: one may run when the client leaves, another may begin before the server has noticed."""
    trace, id = tmp_path / "steps", f"left{leave.__name__}"
    leave(stub, id, order(ids=[98] * 50, delay=0.3, trace=str(trace)))
    left = time.monotonic()
    _wait_until(lambda: _gone(stub, id), limit=2)
    time.sleep(1)
    steps = [float(line) for line in trace.read_text().split()]
    assert min(steps) < left, "it was running"
    assert sum(step > left for step in steps) <= 2


@pytest.mark.acceptance(16)
def test_slots_and_rows_are_free_afterwards(stub: Server) -> None:
    """More cancelled predictions than there are slots or rows, in all three ways; then as many whole ones at once."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: WAYS[n % 3](stub, f"many-{n}"), range(48)))
        _wait_until(lambda: all(_gone(stub, f"many-{n}") for n in range(48)), limit=5)
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda n: stub.text(order(words=n), max_tokens=500), range(1, 33))) == [
            words(n) for n in range(1, 33)
        ]


@pytest.mark.acceptance(16)
def test_a_prompt_that_is_being_read_can_be_cancelled(stub: Server) -> None:
    with stub.open_stream(order(delay=0.05) + " x" * 500000, id="long-prompt", max_tokens=5) as events:
        assert next(events).name == "start"
        time.sleep(0.5)
        began = time.monotonic()
        assert stub.cancel("long-prompt") == 200
        rest = Streamed(list(events))
    assert rest.final["status"] == "canceled" and time.monotonic() - began < 3
    assert rest.text == ""


def _cancel_until_gone(server: Server, id: str) -> None:
    """Cog may lose a cancellation that overtakes its prediction on the way to the worker, and answers 200 to it."""
    until = time.monotonic() + 30
    while server.cancel(id) == 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def _cancel_early(server: Server, id: str, pause: float = 0.0) -> dict[str, Any]:
    with server.open_stream(ENDLESS, id=id, max_tokens=LIMIT) as events:
        assert next(events).name == "start"
        time.sleep(pause)
        _cancel_until_gone(server, id)
        return Streamed(list(events)).final


def _cancel_many(server: Server, count: int) -> None:
    """Cancel ``count`` predictions within the first milliseconds of each, and see that nothing of them is left."""

    def one(n: int) -> bool:
        return was_cancelled(_cancel_early(server, f"early-{count}-{n}", pause=n % 13 * 0.0002))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(count)))
    with ThreadPoolExecutor(32) as pool:
        texts = pool.map(lambda n: server.text(order(words=n), max_tokens=500), range(1, 33))
        assert list(texts) == [words(n) for n in range(1, 33)]
    assert server.health()["status"] == "READY"


@pytest.mark.acceptance(16)
def test_hundreds_of_cancellations_just_as_it_has_begun(stub: Server) -> None:
    _cancel_many(stub, 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.acceptance(16)
def test_ten_thousand_cancellations(stub: Server) -> None:
    _cancel_many(stub, 10000)


def test_one_of_two_readers_may_leave(stub: Server) -> None:
    prompt, done = order(words=300, delay=0.003), threading.Event()
    texts: list[str] = []

    def stay() -> None:
        with stub.open_stream(prompt, id="two-readers", max_tokens=2000) as events:
            next(events)
            done.set()
            texts.append(Streamed(list(events)).text)

    reader = threading.Thread(target=stay)
    reader.start()
    assert done.wait(5)
    with stub.open_stream(prompt, id="two-readers", max_tokens=2000) as events:
        next(event for event in events if event.name == "output")
    reader.join()
    assert texts == [words(300)]
