"""What a server under load holds in memory: each of its processes, over the time that is measured."""

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.load_stats import Window

EVERY = 2.0  # seconds between samples
MEGABYTE = 1 << 20


class Memory:
    """Samples what a process and its children hold for themselves (uss), from `with` to its end."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)
        self.samples: list[tuple[float, dict[int, float]]] = []  # time.monotonic(); megabytes by process id
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY):
            with suppress(psutil.Error):
                family = [self._server, *self._server.children(recursive=True)]
                sizes = {one.pid: one.memory_full_info().uss / MEGABYTE for one in family}
                self.samples.append((time.monotonic(), sizes))

    def summary(self, window: Window) -> dict[str, Any]:
        """The numbers of `trend` for all processes together, and for the server's own and its workers apart."""
        samples = [sizes for at, sizes in self.samples if window.begin <= at < window.end]
        if not samples:
            return {}
        own = [sizes[self._server.pid] for sizes in samples]
        all_of = [sum(sizes.values()) for sizes in samples]
        workers = [every - one for every, one in zip(all_of, own, strict=True)]
        return trend(all_of) | {
            "http_server": trend(own),
            "worker": trend(workers),
            "every_s": EVERY,
            "all": [round(size) for size in all_of],
        }


def trend(sizes: Sequence[float]) -> dict[str, float]:
    """Megabytes at the start, half way and at the end, each the median of a tenth of the samples, and the most.

    `late_growth` is what the last half has added, as a share of what there was half way: a process whose caches have
    filled is flat there, one that leaks is not.
    """
    tenth = max(1, len(sizes) // 10)
    half = (len(sizes) - tenth) // 2
    start, middle, end = (
        statistics.median(part) for part in (sizes[:tenth], sizes[half : half + tenth], sizes[-tenth:])
    )
    return {
        "start": round(start, 1),
        "middle": round(middle, 1),
        "end": round(end, 1),
        "most": round(max(sizes), 1),
        "late_growth": round(end / middle - 1, 4),
    }
