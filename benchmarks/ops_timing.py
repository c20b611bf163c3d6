"""Timing of GPU calls, and the ceilings of the card that they are held against."""

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

Call = Callable[[], object]


class Timed:
    """One side of a comparison: calls taken in turn, in a CUDA graph where they can be captured."""

    def __init__(self, calls: Sequence[Call], graph: bool, milliseconds: float) -> None:
        """``milliseconds`` is how long one round should take."""
        self.calls = calls
        self.replay: Call = self._once
        once = elapsed(self._once, graph)  # also warms up: compiles, loads modules, fills the allocator
        once = min(once, elapsed(self._once, graph))
        self.events = graph
        if graph:
            # One capture of as many turns as last a millisecond: then gaps between replays do not count.
            self.turns = max(1, min(64, round(1.0 / once)))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                for _ in range(self.turns):
                    self._once()
            self.replay = captured.replay
            self.replay()
            once = elapsed(self.replay, graph)
        else:
            self.turns = 1
        self.repeats = max(1, min(200, round(milliseconds / once)))

    def _once(self) -> None:
        for call in self.calls:
            call()

    def round(self) -> float:
        """Milliseconds of one call, the mean over a round."""
        spent = elapsed(lambda: [self.replay() for _ in range(self.repeats)], self.events)
        return spent / (self.repeats * self.turns * len(self.calls))


def elapsed(call: Call, events: bool) -> float:
    """Milliseconds of ``call``: of the device by its events, or of the host until the device has finished."""
    torch.cuda.synchronize()
    if not events:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def side_by_side(sides: dict[str, Timed], rounds: int) -> dict[str, float]:
    """The median milliseconds of each, rounds taken in turn so that the card's mood meets all."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.round())
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after so long: at its next step in Python, so a kernel is waited for."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ceilings() -> dict[str, float]:
    """What this card does at best, measured: bytes a second of a copy, FLOP a second of a large matrix product."""
    properties = torch.cuda.get_device_properties(0)
    to, source = torch.empty(2, 2 << 30, dtype=torch.uint8, device="cuda").random_()
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    part = to[: host.numel()]
    found = {
        "bytes": 2 * to.numel() / _seconds(partial(to.copy_, source)),
        "bus_bytes": host.numel() / _seconds(partial(part.copy_, host, non_blocking=True)),
    }
    for dtype in (torch.float16, torch.bfloat16):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = 2 * 8192**3 / _seconds(partial(torch.matmul, a, b))
    # 128 fused multiply-adds a multiprocessor and cycle, at the highest clock of an H200 where PyTorch gives none.
    clock = getattr(properties, "clock_rate", 0) or 1_980_000  # kHz
    found["float32"] = properties.multi_processor_count * 128 * 2 * clock * 1e3
    return found


def _seconds(call: Call) -> float:
    call()
    return statistics.median(elapsed(call, True) for _ in range(7)) / 1e3
