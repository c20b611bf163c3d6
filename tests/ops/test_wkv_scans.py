"""wkv4, wkv5 and wkv6: every length, cuts, extreme decays and keys, long gradients, any number of heads."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import (
    BOUND,
    CASES,
    CHUNKED,
    CHUNKED_FROM,
    Arguments,
    Case,
    Fill,
    copied,
    error,
    expected,
    results,
)

F32 = torch.float32
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127]
SCANS = [case for case in CASES if case.name in ("wkv4", "wkv5", "wkv6")]
MATRICES = SCANS[1:]
every_scan = pytest.mark.parametrize("case", SCANS, ids=lambda case: case.name)
every_matrix = pytest.mark.parametrize("case", MATRICES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))


def limits(case: Case, dtype: torch.dtype, length: int, device: str) -> tuple[float, float]:
    """What y and the last state may be off, after `length` tokens. See CHUNKED."""
    if case.chunked and device == "cuda" and length >= CHUNKED_FROM:
        return CHUNKED[dtype], CHUNKED[F32 if dtype == F32 else torch.float16]
    return BOUND[dtype], 2 * BOUND[F32]


def nothing(case: Case, given: Arguments) -> Arguments:
    """The same with the state of no tokens."""
    state = torch.zeros_like(given["state"])
    if case.name == "wkv4":
        state[:, 2] = -1e38
    return given | {"state": state}


def tokens(given: Arguments, begin: int, end: int, state: Tensor) -> Arguments:
    length = given["k"].shape[1]
    cut = {n: t[:, begin:end] if t.dim() > 2 and t.shape[1] == length else t for n, t in given.items()}
    return cut | {"state": state}


@every_scan
@every_dtype
@pytest.mark.parametrize("start", ["zero", "random"])
def test_every_length(case: Case, dtype: torch.dtype, start: str, device: str) -> None:
    for n in [*LENGTHS, *([1000] if dtype == F32 else [])]:
        given = case.make(n, dtype, dtype, device)
        given = nothing(case, given) if start == "zero" else given
        y, end = results(case, case.call, given)
        y_wanted, end_wanted = expected(case, given)
        y_limit, end_limit = limits(case, dtype, n, device)
        assert error(y, y_wanted) <= y_limit, n
        assert error(end, end_wanted) <= end_limit, n


@every_scan
def test_every_cut_of_33_tokens(case: Case, device: str) -> None:
    given = case.make(33, F32, F32, device)
    y, end = case.call(**given)
    for cut in range(1, 33):
        first, between = case.call(**tokens(given, 0, cut, given["state"]))
        second, after = case.call(**tokens(given, cut, 33, between))
        parts = torch.cat([first, second], 1)
        if device == "cpu":
            assert torch.equal(parts, y)
            assert torch.equal(after, end)
        assert error(parts, y.cpu().double()) <= BOUND[F32]
        assert error(after, end.cpu().double()) <= BOUND[F32]


@every_scan
@every_dtype
@pytest.mark.parametrize("w", [-math.inf, -20.0, 2.0, 5.0, 20.0, 100.0])
def test_extreme_decays(case: Case, dtype: torch.dtype, w: float, device: str) -> None:
    given = case.make(65, dtype, dtype, device)
    given["w"] = torch.full_like(given["w"], w)
    y, end = results(case, case.call, given)
    y_wanted, end_wanted = expected(case, given)
    y_limit, end_limit = limits(case, dtype, 65, device)
    assert y.isfinite().all()
    assert error(y, y_wanted) <= y_limit
    assert error(end, end_wanted) <= end_limit


@pytest.mark.parametrize("size", [60.0, 500.0])
def test_exponents_of_wkv4_that_overflow_alone(size: float, device: str) -> None:
    case = SCANS[0]
    given = nothing(case, case.make(65, F32, F32, device))
    given["k"] = given["k"] * size
    y, end = results(case, case.call, given)
    y_wanted, end_wanted = expected(case, given)
    assert error(y, y_wanted) <= 1e-4  # e^k for a k rounded to 24 bits
    assert error(end, end_wanted) <= 1e-4


def gradients(call: Callable[..., Any], given: Arguments, incoming: list[Tensor]) -> list[Tensor]:
    leaves = copied(given, lambda t: t.detach().requires_grad_())
    return list(torch.autograd.grad(call(**leaves), list(leaves.values()), incoming))


@every_scan
def test_gradients_over_300_tokens(case: Case, device: str) -> None:
    given = case.make(300, F32, F32, device)
    fill = Fill(device, 70)
    incoming = [fill(*t.shape) for t in case.call(**given)]
    found = gradients(case.call, given, incoming)
    wide = copied(given, lambda t: t.cpu().double())
    right = gradients(case.definition, wide, [t.cpu().double() for t in incoming])
    for name, a, b in zip(given, found, right, strict=True):
        assert error(a, b) <= 2e-5, name


@every_matrix
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 50, 90, 300])
def test_any_share_of_a_head_in_a_block_on_cuda(case: Case, heads: int, cuda: str) -> None:
    fill = Fill(cuda)
    given: Arguments = {name: fill(2, 70, heads, 64) for name in ("r", "w", "k", "v")}
    given["w"] = fill(heads, 64) - 1 if case.name == "wkv5" else given["w"] - 1
    given |= {"u": fill(heads, 64), "state": fill(2, heads, 64, 64)}
    y, end = getattr(cog_rwkv_ops, case.name)(**given)
    y_wanted, end_wanted = case.definition(**copied(given, lambda t: t.double()))
    y_limit, end_limit = limits(case, F32, 70, cuda)
    assert error(y, y_wanted.cpu()) <= y_limit
    assert error(end, end_wanted.cpu()) <= end_limit


@every_dtype
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(14, 40, 8192), (14, 40, 4097), (5, 70, 4096), (1, 530, 4096), (2, 530, 33), (1, 7, 64)]
)
def test_any_number_of_channels_of_wkv4_on_cuda(shape: tuple[int, int, int], dtype: torch.dtype, cuda: str) -> None:
    """Enough to fill the GPU or few, which share the time; an even number, and odd ones; from anywhere in memory."""
    fill, count, (batch, _, channels) = Fill(cuda), math.prod(shape), shape
    for offset in (0, 1):
        k, v = (fill(count + 1, dtype=dtype)[offset : offset + count].view(shape) for _ in range(2))
        given: Arguments = {"w": fill(channels) - 1, "u": fill(channels), "k": k, "v": v}
        given["state"] = torch.stack(
            [fill(batch, channels), fill(batch, channels).abs() + 0.5, fill(batch, channels)], 1
        )
        y, end = cog_rwkv_ops.wkv4(**given)
        incoming = [fill(*shape, dtype=dtype), fill(*end.shape)]
        wide = copied(given, lambda t: t.double())
        y_wanted, end_wanted = SCANS[0].definition(**wide)
        assert error(y, y_wanted.cpu()) <= BOUND[dtype]
        assert error(end, end_wanted.cpu()) <= 2 * BOUND[F32]
        found = gradients(cog_rwkv_ops.wkv4, given, incoming)
        right = gradients(SCANS[0].definition, wide, [t.double() for t in incoming])
        for name, a, b in zip(given, found, right, strict=True):
            assert error(a, b.cpu()) <= max(2e-5, BOUND[a.dtype]), name
