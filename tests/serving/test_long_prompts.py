"""A long prompt comes in while others are being answered, seen by the clients."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.serving.server import PRODUCT, Server

PATIENCE = 300.0  # seconds; beside a running reply the prompt gets less than half of the time
LONG = "def function(value):\n    return value + 1\n\n\n" * 4000


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
                    if event.name != "output" or self.over.is_set():
                        break
                    if last is not None:
                        self.gaps.append((event.time, event.time - last))
                    last = event.time

    def p99(self, begin: float, end: float) -> float:
        """Of the gaps that ended in [begin, end)."""
        gaps = sorted(gap for at, gap in self.gaps if begin <= at < end)
        assert len(gaps) > 200
        return gaps[int(len(gaps) * 0.99)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_prompt_does_not_hold_up_a_running_reply(launch: Callable[..., Server]) -> None:
    """The time between two tokens of it, 99th percentile, is at most twice that beside no prompt."""
    server = launch(
        runner=PRODUCT, COG_RWKV_DEVICE="cpu", COG_RWKV_TEXT_INTERVAL="0", COG_RWKV_PREFIX_CACHE="0"
    )  # every token is an event, and every prompt is read from its beginning
    watch, ratios = Watch(server), []
    watch.start()
    try:
        for _ in range(3):
            time.sleep(1)
            begin = time.monotonic()
            time.sleep(8)
            middle = time.monotonic()
            metrics = server.post({"prompt": LONG, "max_tokens": 1}, timeout=PATIENCE).json()["metrics"]
            assert metrics["prompt_tokens"] >= 50000 and metrics["prefill_tokens"] >= 50000
            idle, beside = watch.p99(begin, middle), watch.p99(middle, time.monotonic())
            print(f"p99 between tokens: {idle * 1e3:.1f} ms idle, {beside * 1e3:.1f} ms beside a prompt of 50,000")
            ratios.append(beside / idle)
            if ratios[-1] <= 2:
                break
    finally:
        watch.over.set()
        watch.join()
    assert min(ratios) <= 2, ratios  # of up to three, for the machine may have other guests
