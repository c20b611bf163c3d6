"""layer_norm, time_mix_prepare and time_mix_output: sizes of a model, and values at which a formula could break."""

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops.layer_norm import reference
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import (
    BOUND,
    CASES,
    Case,
    assert_right,
    copied,
    error,
    expected,
    make_layer_norm,
    make_time_mix_output,
    make_time_mix_prepare,
    results,
)

NAMED = {case.name: case for case in CASES}
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
F32 = torch.float32


@every_dtype
def test_widths_of_models(dtype: torch.dtype, device: str) -> None:
    makes = {
        "layer_norm": make_layer_norm,
        "time_mix_prepare": make_time_mix_prepare,
        "time_mix_output": make_time_mix_output,
    }
    for name, make in makes.items():
        for width in (64, 768, 4096):
            arguments = make(5, dtype, F32, device, c=width)
            got = results(NAMED[name], NAMED[name].call, arguments)
            assert_right(NAMED[name], got, arguments, BOUND[dtype], f"width {width}")


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 31, 100, 1023])
def test_layer_norm_at_odd_widths(width: int, device: str) -> None:
    arguments = make_layer_norm(3, F32, F32, device, c=width)
    assert_right(NAMED["layer_norm"], results(NAMED["layer_norm"], cog_rwkv_ops.layer_norm, arguments), arguments, 2e-6)


def test_layer_norm_of_constant_and_of_far_rows(device: str) -> None:
    x = torch.full((2, 96), 7.0, device=device)
    x[1] = torch.linspace(1e4, 1e4 + 1, 96)
    weight, bias = torch.ones(96, device=device), torch.full((96,), 0.5, device=device)
    out = cog_rwkv_ops.layer_norm(x, weight, bias)
    assert (out[0] == 0.5).all()
    wide = [t.cpu().double() for t in (x, weight, bias)]
    assert error(out[1], reference.layer_norm(*wide)[1]) < 5e-3  # the steps of 1e4 are 1e-3
    assert error(cog_rwkv_ops.layer_norm(x, weight, bias, 1.0), reference.layer_norm(*wide, 1.0)) < 5e-3


def test_the_first_layer_has_no_value_residual(device: str) -> None:
    case = NAMED["time_mix_prepare"]
    arguments = make_time_mix_prepare(5, F32, F32, device)
    first = {name: value for name, value in arguments.items() if name not in ("v_first", "v_mix")}
    got = results(case, case.call, first)
    assert_right(case, got, first, BOUND[F32])
    assert torch.equal(got[1], first["v"])
    assert got[1].data_ptr() != first["v"].data_ptr()


@pytest.mark.acceptance(10)
def test_half_a_value_residual_is_refused(device: str) -> None:
    arguments = make_time_mix_prepare(5, F32, F32, device)
    for name in ("v_first", "v_mix"):
        with pytest.raises(RuntimeError, match="cog_rwkv::time_mix_prepare: v_first and v_mix must be given together"):
            cog_rwkv_ops.time_mix_prepare(**arguments | {name: None})


@pytest.mark.parametrize("name", ["time_mix_prepare", "time_mix_output"])
@pytest.mark.acceptance(10)
def test_a_width_that_is_not_made_of_heads_is_refused(name: str, device: str) -> None:
    case = NAMED[name]
    arguments = copied(case.make(2, F32, F32, device), lambda t: t[..., :100])
    with pytest.raises(RuntimeError, match=rf"cog_rwkv::{name}: \w has shape \[2, 100\]; C must be a multiple of 64"):
        case.call(**arguments)


@every_dtype
@pytest.mark.acceptance(7)
def test_extreme_values_stay_finite(dtype: torch.dtype, device: str) -> None:
    case = NAMED["time_mix_prepare"]
    arguments = make_time_mix_prepare(6, dtype, F32, device)
    arguments["k"][0] = 0  # its norm is 0
    arguments["k"][1] = 1e-7
    arguments["a"][2], arguments["a"][3] = 20, -20
    arguments["v_mix"][4], arguments["v_mix"][5] = float("inf"), float("-inf")
    got = results(case, case.call, arguments)
    assert all(t.isfinite().all() for t in got)
    assert (got[2][0] == 0).all()
    assert_right(case, got, arguments, 2 * BOUND[dtype])


def test_a_group_of_equal_values(device: str) -> None:
    case: Case = NAMED["time_mix_output"]
    arguments = make_time_mix_output(2, F32, F32, device)
    arguments["y"][0] = 3.0
    arguments["y"][1] *= 1e-4  # where eps counts
    assert_right(case, results(case, case.call, arguments), arguments, BOUND[F32])
    assert all(t.isfinite().all() for t in expected(case, arguments))
