"""wkv4 to wkv7, forward and backward, beside other packages' kernels: ``benchmarks/wkv_peers.py``.

Ours and theirs are held against the definition in float64, on two of the heads. A peer in 16 bits may be off by more
than we may: some take a decay that is rounded once more.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, Peer
from benchmarks.wkv_peers import PACKAGES, Package
from benchmarks.wkv_problem import Arguments, Problem, problem
from cog_rwkv_ops._library import operator

OPERATORS = ("wkv7", "wkv6", "wkv5", "wkv4")  # the most wanted first: a run may end before the last
SHORT = (16, 256, 64)  # B, T, H
SHAPES = ((1, 4096, 64), SHORT, (8, 4096, 32))
PEER_BOUND = 0.05


def forward(p: Problem) -> Arguments:
    """Ours."""
    y, end = getattr(ops, p.op)(**p.given)
    return {"y": y, "end": end}


def backward(p: Problem) -> Arguments:
    """Ours, as autograd hands it on: where sequences share an argument, their gradients are added."""
    found = operator(f"{p.op}_backward")(p.d_y, p.d_end, *p.given.values())
    named = dict(zip(p.given, found, strict=True))
    return {name: t.sum(0) if t.ndim > p.given[name].ndim else t for name, t in named.items()}


def make_peer(package: Package, p: Problem, which: str) -> Peer:
    """The kernels of a package for one pass. Raises what its import, its build or its first call raises."""
    kernels = package.make(p)
    call = kernels.forward if which == "forward" else kernels.backward
    assert call is not None, "PACKAGES says that it has this pass"

    def error() -> float:
        return p.error(kernels.of_raw(p.given["w"], call()), kernels.start, kernels.end)

    return Peer([call], error, PEER_BOUND)


def moved(*tensors: Tensor) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def cases(op: str) -> Iterator[Case]:
    """Every size; inputs and results of each exceed the cache several times."""
    for shape in SHAPES:
        p = problem(op, *shape)
        given = list(p.given.values())
        results = moved(p.d_y, p.d_end)
        calls = {"forward": partial(forward, p), "backward": partial(backward, p)}
        for which, call in calls.items():
            yield Case(
                op=op,
                backward=which == "backward",
                dtype=p.d_y.dtype,
                shape="B={} T={} H={}".format(*shape),
                ours=[call],
                peers={},
                packages={
                    name: partial(make_peer, package, p, which)
                    for name, package in PACKAGES.items()
                    if op in getattr(package, which).split() and (shape == SHORT or not package.short)
                },
                error=lambda p=p, call=call: p.error(call()),  # type: ignore[misc]
                bound=torch.finfo(p.d_y.dtype).eps,
                bytes=results + moved(*given) * (1 if which == "forward" else 2),
                graph=False,  # what comes through ctypes is on the default stream, which cannot be captured
            )
        del p, given, calls, call
