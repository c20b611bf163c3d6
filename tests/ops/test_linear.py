"""linear: sizes, values beyond what 16 bits hold, rows that are not numbers."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.linear import reference
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
