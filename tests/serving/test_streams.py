"""Event streams: order and time of the events, many at once, slow and late readers."""

import contextlib
import json
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.orders import order, words
from tests.serving.server import Event, Server, Streamed


@pytest.mark.acceptance(16)
def test_the_events_of_a_stream(stub: Server) -> None:
    began = time.monotonic()
    health: list[tuple[float, str]] = []
    finished = threading.Event()

    def watch() -> None:
        while not finished.is_set():
            asked = time.monotonic()
            status = stub.health()["status"]
            health.append((time.monotonic() - asked, status))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    streamed = stub.stream(order(words=400, delay=0.005), max_tokens=200)
    finished.set()
    watcher.join()
    took = time.monotonic() - began
    assert [event.name for event in streamed.events].index("start") == 0
    assert [event.data["index"] for event in streamed.named("output")] == list(range(len(streamed.named("output"))))
    assert "".join(streamed.final["output"]) == streamed.text
    assert words(400).startswith(streamed.text) and streamed.final["metrics"]["completion_tokens"] == 200
    assert streamed.named("output")[0].time - began < 0.2 * took
    assert max(seconds for seconds, _ in health) < 1
    assert {status for _, status in health} == {"READY"}


def test_text_comes_in_groups_and_the_first_at_once(stub: Server, tmp_path: Path) -> None:
    """By the times at which pieces are handed to the server: on their way to us they may bunch up."""
    handed = tmp_path / "pieces"
    streamed = stub.stream(order(words=1000, pieces=str(handed)), max_tokens=600)
    times = [float(line) for line in handed.read_text().split()]
    assert len(times) == len(streamed.named("output"))
    assert len(times) <= (times[-1] - times[0]) / 0.02 + 2  # the last one does not wait: the reply is over
    assert len(streamed.named("output")[0].data["chunk"]) < 0.1 * len(streamed.text)


@pytest.mark.acceptance(17)
def test_streams_that_overlap_equal_their_single_runs(stub: Server) -> None:
    prompts = [f"def f{n}(x):" for n in range(1, 21)]
    alone = [stub.text(prompt, max_tokens=n) for n, prompt in enumerate(prompts, start=1)]

    def run(n: int) -> str:
        time.sleep(0.05 * n)
        return stub.stream(prompts[n], max_tokens=n + 1).text

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(run, range(20))) == alone


@pytest.mark.acceptance(17)
def test_eight_clients_at_once_all_see_a_first_chunk_early(stub: Server) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda n: stub.stream(order(words=300 + n), max_tokens=300), range(8)))
    took = time.monotonic() - began
    for n, streamed in enumerate(streams):
        assert words(300 + n).startswith(streamed.text) and len(streamed.text) > 300
        assert streamed.named("output")[0].time - began < 0.3 * took


@pytest.mark.acceptance(19)
def test_a_client_that_stops_reading_for_some_seconds_gets_all_the_text(stub: Server) -> None:
    seen: list[Event] = []
    with stub.open_stream(order(words=4000), max_tokens=3000) as events:
        for event in events:
            seen.append(event)
            if len(seen) == 3:
                time.sleep(4)
    streamed = Streamed(seen)
    assert streamed.final["metrics"]["completion_tokens"] == 3000
    assert "".join(streamed.final["output"]) == streamed.text == words(4000)[: len(streamed.text)]


@pytest.mark.acceptance(19)
def test_a_client_that_joins_late_gets_all_the_text(stub: Server) -> None:
    inputs: dict[str, Any] = {"max_tokens": 600}
    with stub.open_stream(order(words=1000, delay=0.002), id="shared-reply", **inputs) as first:
        for event in first:
            if event.name == "output" and event.data["index"] == 10:
                break
        with stub.open_stream(order(words=1000, delay=0.002), id="shared-reply", **inputs) as late:
            joined = Streamed(list(late))
        rest = "".join(event.data["chunk"] for event in first if event.name == "output")
    assert joined.final["metrics"]["completion_tokens"] == 600
    assert "".join(joined.final["output"]) == joined.text == words(1000)[: len(joined.text)]
    assert joined.text.endswith(rest) and rest


def _read_slowly(server: Server, n: int, pauses: int, pause: float) -> Streamed:
    """A reply of 1,200 tokens to a client that stops reading now and then."""
    seen: list[Event] = []
    with server.open_stream(order(words=1000 + n), max_tokens=1200) as events:
        for event in events:
            seen.append(event)
            if event.name == "output" and len(seen) <= 2 * pauses and len(seen) % 2:
                time.sleep(pause)
    return Streamed(seen)


def _slow_readers_hold_nobody_up(server: Server, readers: int, pauses: int, pause: float) -> None:
    with ThreadPoolExecutor(readers + 4) as pool:
        slow = [pool.submit(_read_slowly, server, n, pauses, pause) for n in range(readers)]
        time.sleep(0.3)
        began = time.monotonic()
        assert list(pool.map(lambda n: server.text(order(words=n), max_tokens=500), range(80, 88))) == [
            words(n) for n in range(80, 88)
        ]
        quick = time.monotonic() - began
        replies = [one.result() for one in slow]
    assert quick < pauses * pause
    for n, reply in enumerate(replies):
        assert words(1000 + n).startswith(reply.text)
        assert reply.final["metrics"]["completion_tokens"] == 1200
    assert server.health()["status"] == "READY"


@pytest.mark.acceptance(19)
def test_slow_readers_get_all_the_text_and_hold_nobody_up(stub: Server) -> None:
    _slow_readers_hold_nobody_up(stub, readers=4, pauses=3, pause=2.0)


@pytest.mark.slow
@pytest.mark.acceptance(19)
def test_many_slow_readers(stub: Server) -> None:
    _slow_readers_hold_nobody_up(stub, readers=24, pauses=8, pause=5)


def _vanish(server: Server, draw: random.Random) -> None:
    """A client that goes away at some moment: before a byte has come, in the middle of an event, after some."""
    body = json.dumps({"input": {"prompt": order(words=3000), "max_tokens": 3000, "temperature": 0.0}})
    accept = draw.choice(["text/event-stream", "application/json"])
    head = f"POST /predictions HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request[: draw.choice([len(request)] * 4 + [draw.randrange(len(request))])])
        connection.settimeout(draw.random() * 0.5)
        with contextlib.suppress(TimeoutError):
            while connection.recv(draw.randrange(1, 400)) and draw.random() < 0.9:
                pass
        if draw.random() < 0.5:  # the end of a process that was killed: a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _clients_vanish(server: Server, count: int) -> None:
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: _vanish(server, random.Random(n)), range(count)))
    _all_slots_are_free(server, 32)
    assert server.health()["status"] == "READY"


def _all_slots_are_free(server: Server, slots: int) -> None:
    """As many replies as there are slots and rows run at the same time, and all are right."""
    together = threading.Barrier(slots, timeout=60)

    def run(n: int) -> str:
        with server.open_stream(order(words=n, delay=0.002), max_tokens=500) as events:
            first = next(event for event in events if event.name == "output")
            together.wait()
            return Streamed([first, *events]).text

    with ThreadPoolExecutor(slots) as pool:
        assert list(pool.map(run, range(20, 20 + slots))) == [words(n) for n in range(20, 20 + slots)]


@pytest.mark.acceptance(16)
def test_clients_that_vanish_leave_nothing_behind(stub: Server) -> None:
    _clients_vanish(stub, 60)


@pytest.mark.slow
@pytest.mark.acceptance(16)
def test_thousands_of_clients_that_vanish(stub: Server) -> None:
    _clients_vanish(stub, 3000)
