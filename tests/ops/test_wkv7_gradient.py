"""The gradient of wkv7 against autograd through its definition in float64: lengths, decays, numbers of heads."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.wkv7 import reference
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import BOUND, Arguments, Fill, copied, error, recurrence
from tests.ops.test_wkv7 import HEADS, every_dtype, make_many, pool

F32 = torch.float32
# Of the 16-bit dtypes, rounding a gradient is all that may be seen of its error.
LIMIT = {dtype: max(2e-5, BOUND[dtype]) for dtype in FLOAT_OR_HALF}


def gradients(given: Arguments, incoming: list[Tensor]) -> list[Tensor]:
    leaves = copied(given, lambda t: t.detach().requires_grad_())
    return list(torch.autograd.grad(cog_rwkv_ops.wkv7(**leaves), list(leaves.values()), incoming))


def right_gradients(given: Arguments, incoming: list[Tensor], device: str = "cpu") -> list[Tensor]:
    wide = copied(given, lambda t: t.to(device).double().requires_grad_())
    given_back = [t.to(device).double() for t in incoming]
    return list(torch.autograd.grad(reference.wkv7(**wide), list(wide.values()), given_back))


def make(tokens: int, device: str, dtype: torch.dtype = F32) -> Arguments:
    flat = recurrence(Fill(device), 2 * tokens, HEADS * 64, dtype=dtype)
    return {name: t.view(2, tokens, HEADS, 64) for name, t in flat.items()} | {"state": pool(2, device)}


def incoming_like(given: Arguments, device: str) -> list[Tensor]:
    fill = Fill(device, 70)
    return [fill(*given[name].shape, dtype=given[name].dtype) for name in ("v", "state")]


def assert_right(given: Arguments, incoming: list[Tensor], device: str = "cpu") -> None:
    found, right = gradients(given, incoming), right_gradients(given, incoming, device)
    for name, a, b in zip(given, found, right, strict=True):
        assert error(a, b.cpu()) <= LIMIT[given[name].dtype], name


@every_dtype
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
def test_every_length(tokens: int, dtype: torch.dtype, device: str) -> None:
    given = make(tokens, device, dtype)
    assert_right(given, incoming_like(given, device))


@every_dtype
@pytest.mark.parametrize("decays", ["strong", "weak"])
def test_strong_and_weak_decays(decays: str, dtype: torch.dtype, device: str) -> None:
    given = make(300 if dtype == F32 else 100, device, dtype)
    # past 3 the float32 sigmoid is nearly flat
    given["w"] = torch.full_like(given["w"], 3.0 if decays == "strong" else -9.0)
    assert_right(given, incoming_like(given, device))


@every_dtype
def test_keys_that_are_alike(dtype: torch.dtype, device: str) -> None:
    """Cosine .9 between what tokens look up: where inverting a chunk by repeated squaring fails."""
    given, fill = make(100, device, dtype), Fill(device, 7)
    unit = torch.nn.functional.normalize(fill(1, 1, HEADS, 64) + 0.33 * fill(2, 100, HEADS, 64), dim=-1)
    given |= {"k": (3 * unit).to(dtype), "a": -unit.to(dtype), "b": (0.95 * unit).to(dtype), "w": given["w"] - 8}
    assert_right(given, incoming_like(given, device))


@every_dtype
@pytest.mark.parametrize("w", [-20.0, 20.0, -math.inf, math.inf])
@pytest.mark.acceptance(7)
def test_extreme_decays_and_zero_keys(dtype: torch.dtype, w: float, device: str) -> None:
    given = make(65, device, dtype)
    given["w"] = torch.full_like(given["w"], w)
    for name in ("k", "a", "b"):
        given[name][:, ::3] = 0
    incoming = incoming_like(given, device)
    found, right = gradients(given, incoming), right_gradients(given, incoming)
    for name, a, b in zip(given, found, right, strict=True):
        if name == "w":  # as good as 0: the sigmoid is flat
            assert a.abs().max() <= 1e-5
        else:
            assert error(a, b) <= LIMIT[given[name].dtype], name


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("decays", ["random", "weak"])
def test_1000_tokens_on_cuda(decays: str, dtype: torch.dtype, cuda: str) -> None:
    given = make(1000, cuda, dtype)
    if decays == "weak":
        given["w"] = torch.full_like(given["w"], -9.0)
    assert_right(given, incoming_like(given, cuda), cuda)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("heads", [1, 12, 80])
def test_any_share_of_a_head_in_a_block_on_cuda(dtype: torch.dtype, heads: int, cuda: str) -> None:
    """Few heads: several blocks each. Many: one. Beside every number of multiprocessors."""
    given = make_many(heads, cuda, dtype, tokens=40)
    assert_right(given, incoming_like(given, cuda), cuda)


@pytest.mark.gpu
@every_dtype
def test_the_same_bits_every_time_on_cuda(dtype: torch.dtype, cuda: str) -> None:
    given = make_many(20, cuda, dtype, tokens=200)
    incoming = incoming_like(given, cuda)
    first = gradients(given, incoming)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(given, incoming), strict=True))
