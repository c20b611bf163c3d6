"""A long prompt comes in while others are being answered, seen by the clients."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.serving.server import PRODUCT, Server

T = TypeVar("T")
Span = tuple[float, float]  # from, to: seconds of time.monotonic()
# Seconds. Beside a running reply of the embedded model a step reads a token or two of the prompt, several hundred a
# second on a machine that has nothing else to do.
PATIENCE = 1200.0
LONG = "def function(value):\n    return value + 1\n\n\n" * 4600  # of 11 tokens each


class Watch(threading.Thread):
    """A client that streams one reply after another, and when each of its pieces came."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.over = server, threading.Event()
        self.gaps: list[tuple[float, float]] = []  # when a piece came, and how long after the one before

    def run(self) -> None:
        seed = 0
        while not self.over.is_set():
            seed += 1
            with self.server.open_stream("class Node:\n", max_tokens=20000, temperature=1.0, seed=seed) as events:
                last = None
                for event in events:
                    if self.over.is_set():
                        return
                    if event.name != "output":
                        continue
                    if last is not None:
                        self.gaps.append((event.time, event.time - last))
                    last = event.time

    def p99(self, *spans: Span) -> float:
        """Of the gaps that ended in a span [begin, end)."""
        gaps = sorted(gap for at, gap in self.gaps if any(begin <= at < end for begin, end in spans))
        assert len(gaps) > 1000
        return gaps[int(len(gaps) * 0.99)]


def _while(call: Callable[[], T]) -> tuple[Span, T]:
    time.sleep(1)
    begin = time.monotonic()
    result = call()
    return (begin, time.monotonic()), result


def _ratio(server: Server, watch: Watch) -> float:
    """Of the p99 while a prompt of 50,000 tokens is read to that in quiet times right before and after it."""
    before, _ = _while(lambda: time.sleep(10))
    reading, reply = _while(lambda: server.post({"prompt": LONG, "max_tokens": 1}, timeout=PATIENCE))
    after, _ = _while(lambda: time.sleep(10))
    metrics = reply.json()["metrics"]
    assert metrics["prompt_tokens"] >= 50000 and metrics["prefill_tokens"] >= 50000
    idle, beside = watch.p99(before, after), watch.p99(reading)
    print(f"p99 between tokens: {idle * 1e3:.1f} ms idle, {beside * 1e3:.1f} ms beside a prompt of 50,000")
    return beside / idle


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 100)
def test_a_long_prompt_does_not_hold_up_a_running_reply(launch: Callable[..., Server]) -> None:
    """The time between two tokens of it, 99th percentile, is at most twice that beside no prompt."""
    server = launch(
        runner=PRODUCT, COG_RWKV_DEVICE="cpu", COG_RWKV_TEXT_INTERVAL="0", COG_RWKV_PREFIX_CACHE="0"
    )  # every token is an event, and every prompt is read from its beginning
    watch = Watch(server)
    watch.start()
    try:
        ratio = _ratio(server, watch)
        if ratio > 2:  # once more, for the machine may have other guests
            ratio = _ratio(server, watch)
    finally:
        watch.over.set()
        watch.join()
    assert ratio <= 2
