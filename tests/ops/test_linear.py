"""linear and low_rank: sizes, values beyond what 16 bits hold, rows that are not numbers."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.linear import reference
from cog_rwkv_ops.low_rank import reference as low_rank_reference
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import BOUND, Fill, error

every_weight = pytest.mark.parametrize("weight", FLOAT_OR_HALF, ids=lambda dtype: f"{dtype}_weight"[6:])
F32 = torch.float32


def limit(weight: torch.dtype, device: str) -> float:
    return BOUND[F32] if device == "cpu" else BOUND[weight] + BOUND[F32]


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = [None if t is None else t.cpu().double() for t in (x, weight, bias)]
    return reference.linear(*wide)


@every_weight
def test_every_size(weight: torch.dtype, device: str, guard) -> None:
    fill = Fill(device)
    sizes = [0, 1, 15, 16, 17, 33, 64, 130]
    for k in sizes:
        for m in sizes:
            for n in (0, 1, 2, 3, 5, 19):
                x, matrix = guard(fill(n, k)), guard(fill(m, k, dtype=weight), k % 2)
                out = cog_rwkv_ops.linear(x, matrix)
                assert out.shape == (n, m)
                right, most = wanted(x, matrix), wanted(x.abs(), matrix.abs())
                # Few terms may cancel and share one rounding: a unit of it, against the sum of their sizes.
                unit = 0.0 if device == "cpu" else torch.finfo(weight).eps / 2
                assert (out.cpu() - right).norm() <= (unit + BOUND[F32]) * most.norm(), (n, k, m)


@every_weight
def test_sizes_of_a_model(weight: torch.dtype, device: str) -> None:
    fill = Fill(device)
    for n, k, m in [(1, 768, 3072), (8, 3072, 768), (300, 768, 768), (520, 768, 96), (2, 768, 65536)]:
        x, matrix, bias = fill(n, k), fill(m, k, dtype=weight), fill(m)
        assert error(cog_rwkv_ops.linear(x, matrix, bias), wanted(x, matrix, bias)) <= limit(weight, device)


@every_weight
@pytest.mark.acceptance(7)
def test_values_beyond_float16(weight: torch.dtype, device: str) -> None:
    """512 ones by 200 are 102,400; and x itself may be beyond 65,504, or so small that float16 has no bits for it."""
    ones = torch.ones(3, 512, device=device)
    out = cog_rwkv_ops.linear(ones, torch.full((5, 512), 200.0, dtype=weight, device=device))
    assert out.tolist() == [[102_400.0] * 5] * 3
    fill = Fill(device)
    x, matrix = fill(6, 300), fill(40, 300, dtype=weight)
    x *= torch.tensor([1e-30, 1e-6, 1.0, 1e5, 1e9, 1e30], device=device)[:, None]
    out = cog_rwkv_ops.linear(x, matrix)
    assert out.isfinite().all()
    for row, row_wanted in zip(out, wanted(x, matrix), strict=True):
        assert error(row, row_wanted) <= limit(weight, device)


@every_weight
@pytest.mark.acceptance(7)
def test_a_row_that_is_not_finite_harms_no_other(weight: torch.dtype, device: str) -> None:
    fill = Fill(device)
    x, matrix = fill(6, 300), fill(40, 300, dtype=weight).abs() + 1
    whole = cog_rwkv_ops.linear(x, matrix)
    x[1, 7], x[2, 8], x[3, 9], x[4] = math.nan, math.inf, -math.inf, 0.0
    out = cog_rwkv_ops.linear(x, matrix)
    assert out[1].isnan().all()
    assert (out[2] == math.inf).all()
    assert (out[3] == -math.inf).all()
    assert (out[4] == 0).all()
    assert torch.equal(out[[0, 5]], whole[[0, 5]])


@every_weight
@pytest.mark.parametrize("activation", ["none", "tanh", "sigmoid"])
def test_low_rank(weight: torch.dtype, activation: str, device: str) -> None:
    fill = Fill(device)
    sizes = [(1, 768, 64, 768), (7, 100, 17, 33), (300, 128, 96, 128), (3, 0, 5, 7), (3, 5, 0, 7), (0, 5, 6, 7)]
    for n, c, d, m in sizes:
        x, down, up = fill(n, c), fill(d, c, dtype=weight, scale=0.1), fill(m, d, dtype=weight)
        for bias in (None, fill(m)):
            out = cog_rwkv_ops.low_rank(x, down, up, bias, activation)
            wide = [None if t is None else t.cpu().double() for t in (x, down, up, bias)]
            right = low_rank_reference.low_rank(*wide, activation)
            assert error(out, right) <= 2 * limit(weight, device), (n, c, d, m)


def test_low_rank_saturates(device: str) -> None:
    x = torch.tensor([[-math.inf], [-1e30], [-100.0], [0.0], [1e-20], [100.0], [1e30], [math.inf]], device=device)
    one = torch.ones(1, 1, device=device)
    tanh = cog_rwkv_ops.low_rank(x, one, one, None, "tanh")
    assert tanh.flatten().tolist() == pytest.approx([-1, -1, -1, 0, 1e-20, 1, 1, 1], rel=1e-6)
    sigmoid = cog_rwkv_ops.low_rank(x, one, one, None, "sigmoid").flatten().tolist()
    assert sigmoid == pytest.approx([0, 0, 0, 0.5, 0.5, 1, 1, 1], abs=1e-37)


def test_functions_to_two_units_in_the_last_place(device: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 40_001), torch.logspace(-8, 0, 1001), -torch.logspace(-8, 0, 1001)])
    x, one = x[:, None].to(device), torch.ones(1, 1, device=device)
    units = 3 if device == "cpu" else 5  # CUDA's own expf may be off by two units
    for name in ("tanh", "sigmoid"):
        out = cog_rwkv_ops.low_rank(x, one, one, None, name).cpu().double()
        right = getattr(torch, name)(x.cpu().double())
        assert ((out - right).abs() <= units * 2**-24 * right.abs()).all(), name


def test_an_unknown_activation_is_named(device: str) -> None:
    one = torch.ones(1, 1, device=device)
    with pytest.raises(RuntimeError, match=r'cog_rwkv::low_rank: activation is "gelu"; it must be "none", "tanh" or'):
        cog_rwkv_ops.low_rank(one, one, one, None, "gelu")
