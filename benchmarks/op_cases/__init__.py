"""What ``benchmarks/ops.py`` measures: one file an operator (or a family), each with two names.

``OPERATORS`` are those it has cases of, and ``cases(op) -> Iterator[Case]`` makes those of one of them. A case is built
when the measurement reaches it and is dropped after it, so a file yields as many as it likes and holds the memory of
one. To add an operator, add a file; nothing else names it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

L2 = 256 << 20  # bytes of inputs and outputs after which nothing of a first set is in the cache of any of our GPUs
Call = Callable[[], object]


class Missing(Exception):
    """A peer cannot be had here, or not for this size; the message says why, and how to get it."""


@dataclass(frozen=True)
class Peer:
    """Another package's call, over as many sets of buffers as ours; it counts where its result is right."""

    calls: Sequence[Call]
    error: Callable[[], float]  # of its result against the reference; asked once, before any time is taken
    bound: float


@dataclass(frozen=True)
class Case:
    """One operator at one size, beside its peers.

    ``ours`` and each of ``peers`` are the same call over several sets of buffers, taken in turn, so that no call finds
    its inputs in the cache. ``bytes`` is what one call must read and write in device memory, ``bus_bytes`` what must
    cross the bus to the host, ``flops`` its floating-point operations at the rate named ``rate``.
    """

    op: str
    backward: bool
    dtype: torch.dtype
    shape: str  # sizes by name: "B=1 T=4096 H=64"
    ours: Sequence[Call]
    peers: dict[str, Sequence[Call]]
    error: Callable[[], float]  # of ours against a reference; no time is given unless it is within `bound`
    bound: float
    bytes: int = 0
    bus_bytes: int = 0
    flops: float = 0.0
    rate: str = "float32"
    # Other packages' kernels, made when their turn comes; left out, with a line, where they are missing, fail or err.
    packages: dict[str, Callable[[], Peer]] = field(default_factory=dict)
    graph: bool = True  # timed in CUDA graphs; else, where a side needs the host, by the host's clock


def sets_for(bytes_of_one: int, most: int = 32) -> int:
    """How many sets of buffers of this size leave nothing of the first in the cache; 2 at least."""
    return max(2, min(most, -(-L2 // max(1, bytes_of_one))))


def numbers(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal random numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """The relative L2 error; infinite where there is a NaN."""
    difference = (actual.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=float("inf")))


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile`` for one size, as a peer."""
    return torch.compile(function, dynamic=False, fullgraph=True)
