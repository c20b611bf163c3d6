"""One step of the model, ready to be repeated and timed: in a CUDA graph on a GPU, as it is on the CPU."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine_cells import Cell
from benchmarks.ops_timing import elapsed
from model.rwkv7 import RWKV7
from model.state import StatePool

LEAST_REPLAYS, MOST_REPLAYS = 20, 200
WARM_UPS = 3
# Kernels, copies and fills, by their CUgraphNodeType; other nodes of a graph do nothing on the device.
LAUNCH_NODES = (0, 1, 2)


class Timer:
    """Milliseconds of a call: of the device by its events, of the host by its clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of one call that finds the device idle, as the peer's own script times its replays."""
        return elapsed(call, events=True) if self._cuda else self.wall(call)

    def wall(self, call: Callable[[], object]) -> float:
        """Of one call by the host's clock, until the device has finished."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        """Until the device has finished what it was given."""
        if self._cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Times:
    """``ms`` is the median of ``count`` calls, ``spread`` what lies between the tenths at either end, over it."""

    ms: float
    spread: float
    count: int


def measure(call: Callable[[], object], timer: Timer, seconds: float = 1.0) -> Times:
    """Times ``call`` for about ``seconds`` after a warm-up: at least LEAST_REPLAYS times, at most MOST_REPLAYS."""
    once = min(timer.milliseconds(call) for _ in range(WARM_UPS))
    count = max(LEAST_REPLAYS, min(MOST_REPLAYS, round(seconds * 1e3 / max(once, 1e-3))))
    times = [timer.milliseconds(call) for _ in range(count)]
    tenths, median = statistics.quantiles(times, n=10), statistics.median(times)
    return Times(median, (tenths[-1] - tenths[0]) / median, count)


class Step:
    """``RWKV7.forward`` of a cell: every row of the batch with random tokens and a random state of its own."""

    def __init__(self, model: RWKV7, cell: Cell, state_dtype: torch.dtype, seed: int = 0) -> None:
        self.model, self.cell, self._seed = model, cell, seed
        self._random = torch.Generator(model.device)
        self.pool = StatePool(model.config, cell.batch, model.device, state_dtype)
        self.rows = torch.arange(cell.batch, device=model.device)
        self.ends = torch.arange(cell.batch + 1, device=model.device) * cell.tokens
        self.begin()
        self.ids = self.draw(cell.size)

    def begin(self) -> None:
        """Set the states that the step begins with: the same at every call."""
        self._random.manual_seed(self._seed)
        self.pool.wkv.normal_(0, 0.3, generator=self._random)
        self.pool.shift.normal_(0, 1, generator=self._random)

    def draw(self, count: int) -> Tensor:
        """Random ids, int64 [count]."""
        return torch.randint(self.model.vocab_size, (count,), generator=self._random, device=self.model.device)

    def run(self) -> Tensor:
        """The step as it is: float32 logits [B, vocab] of the last tokens."""
        return self.model.forward(self.ids, self.pool, self.rows, self.ends)

    def follow(self, ids: Tensor) -> Tensor:
        """One more token for each sequence, ids [B], on the states that there are."""
        ends = torch.arange(self.cell.batch + 1, device=self.model.device)
        return self.model.forward(ids, self.pool, self.rows, ends)


class Repeated:
    """A step to be called again and again. On a GPU it is a replayed graph where it can be captured.

    ``launches``: what a replay starts on the device, None without a graph. ``problem``: why there is no graph.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self.launches: int | None = None
        self.problem = "not on a GPU"
        self._logits = step.run()
        if step.model.device.type == "cuda":
            self._capture()

    @torch.inference_mode()
    def poison(self) -> None:
        """Fill with NaN what the next call must write: the graph's output, or the memory that is handed out next."""
        self._logits.fill_(torch.nan)
        if self._graph is None:
            self._logits = self._logits.new_empty(0)

    def __call__(self) -> Tensor:
        """Run the step; its logits are overwritten by the next call."""
        if self._graph is None:
            self._logits = self._step.run()
        else:
            self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with torch.cuda.graph(graph, stream=stream):
                logits = self._step.run()
            graph.instantiate()
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.problem = str(error).split("\n")[0]
            return
        self._graph, self._logits, self.problem = graph, logits, ""
        self.launches = count_launches(graph.raw_cuda_graph())


def count_launches(graph: int) -> int:
    """Kernels, copies and fills in a captured graph, given as its CUgraph. Raises RuntimeError where CUDA does."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} failed with error {code}")

    count, kind = ctypes.c_size_t(), ctypes.c_int()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    launches = 0
    for node in nodes:
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        launches += kind.value in LAUNCH_NODES
    return launches


def free() -> None:
    """Give back the memory of what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
