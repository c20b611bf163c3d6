"""time_mix_project: rows that do not depend on each other, packed weights, the functions between two products."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import Arguments, make_time_mix_project

every_weight = pytest.mark.parametrize("weight", FLOAT_OR_HALF, ids=lambda dtype: f"{dtype}_weight"[6:])
F32 = torch.float32


def functions(x: Tensor) -> dict[str, Tensor]:
    """What lies between the products of decay and gate, of [N] numbers: a model of width 1 with weights of 1."""
    one, zero = torch.ones(1, 1, device=x.device), torch.zeros(1, device=x.device)
    weights = (one, one, one, one, one, zero, one, one, zero, one, one)
    out = cog_rwkv_ops.time_mix_project(x[None, :, None].expand(6, -1, 1), *weights)
    return {"tanh": out[3, :, 0], "sigmoid": out[5, :, 0], "none": out[4, :, 0]}


@every_weight
@pytest.mark.acceptance(8)
def test_a_row_is_the_same_beside_any_others(weight: torch.dtype) -> None:
    every = make_time_mix_project(300, F32, weight, "cpu")
    whole = cog_rwkv_ops.time_mix_project(**every)
    for begin, end in [(0, 1), (0, 2), (0, 3), (0, 7), (0, 16), (0, 33), (12, 13), (255, 258), (299, 300)]:
        part = cog_rwkv_ops.time_mix_project(**every | {"x": every["x"][:, begin:end]})
        assert torch.equal(part, whole[:, begin:end]), (begin, end)


def test_equals_the_products_one_by_one() -> None:
    """Bit for bit, packed or not, with and without the mixing of values."""
    given = make_time_mix_project(5, F32, torch.bfloat16, "cpu", c=256)
    packed = {name: cog_rwkv_ops.pack_bfloat16(given[name]) for name in ("receptance", "key", "value")}
    out = cog_rwkv_ops.time_mix_project(**given)
    assert torch.equal(cog_rwkv_ops.time_mix_project(**given | packed), out)
    assert torch.equal(cog_rwkv_ops.time_mix_project(**given | dict.fromkeys(("v1", "v2", "v0"))), out[:6])
    mixes = dict(zip(("receptance", "key", "value"), (0, 2, 3), strict=True))
    for place, (name, mix) in enumerate(mixes.items()):
        assert torch.equal(out[place], cog_rwkv_ops.linear(given["x"][mix], given[name]))
    hidden = cog_rwkv_ops.linear(given["x"][4], given["a1"])
    assert torch.equal(out[4], cog_rwkv_ops.linear(hidden, given["a2"], given["a0"]))


def test_the_functions_saturate(device: str) -> None:
    x = torch.tensor([-math.inf, -1e30, -100.0, 0.0, 1e-20, 100.0, 1e30, math.inf], device=device)
    out = functions(x)
    assert out["tanh"].tolist() == pytest.approx([-1, -1, -1, 0, 1e-20, 1, 1, 1], rel=1e-6)
    assert out["sigmoid"].tolist() == pytest.approx([0, 0, 0, 0.5, 0.5, 1, 1, 1], abs=1e-37)
    assert torch.equal(out["none"], x)


def test_the_functions_are_right_to_two_units_in_the_last_place(device: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 40_001), torch.logspace(-8, 0, 1001), -torch.logspace(-8, 0, 1001)])
    units = 3 if device == "cpu" else 5  # CUDA's own expf may be off by two units
    out = functions(x.to(device))
    for name in ("tanh", "sigmoid"):
        right = getattr(torch, name)(x.double())
        assert ((out[name].cpu().double() - right).abs() <= units * 2**-24 * right.abs()).all(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v2": None}, "v1, v2 and v0 must be given together or not at all"),
        ({"key": torch.zeros(71, 70)}, r"key has shape \[71, 70\]; it must have as many rows as x has columns, 70"),
        ({"value": torch.zeros(70, 137, dtype=torch.uint8)}, "value is uint8; it must be float32"),
        ({"g2": torch.zeros(70, 34)}, r"g2 has shape \[70, 34\]; it must be \[C, D\] with D as in g1 = \[70, 33\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: Arguments, message: str) -> None:
    given = make_time_mix_project(2, F32, F32, "cpu")
    with pytest.raises(RuntimeError, match=f"cog_rwkv::time_mix_project: {message}"):
        cog_rwkv_ops.time_mix_project(**given | change)
