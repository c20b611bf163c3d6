"""squared_relu and squared_relu_linear: special values, gradient, rows that are not read, values beyond float16."""

import math

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops.squared_relu import reference
from tests.ops.common import FLOAT_OR_HALF, FLOATING, ODD_SIZES, assert_close, layouts, numbers
from tests.ops.model_cases import BOUND, Fill, error

every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_weight = pytest.mark.parametrize("weight", FLOAT_OR_HALF, ids=lambda dtype: f"{dtype}_weight"[6:])
F32 = torch.float32


@every_dtype
def test_equals_the_definition_at_every_size(dtype: torch.dtype, device: str, guard) -> None:
    for size in ODD_SIZES:
        for shift in (0, 1):
            x = guard(numbers(size, dtype=dtype, device=device, scale=2.0), shift)
            assert_close(cog_rwkv_ops.squared_relu(x), reference.squared_relu(x))


@every_dtype
def test_special_values_and_layouts(dtype: torch.dtype, device: str) -> None:
    special = [0.0, -0.0, 1.0, -1.0, 300.0, -math.inf, math.inf, math.nan, 1e-30]
    x = torch.tensor(special, dtype=torch.float64).to(dtype).to(device)
    assert_close(cog_rwkv_ops.squared_relu(x), reference.squared_relu(x))
    for view in layouts(numbers(6, 34, dtype=dtype, device=device)).values():
        assert_close(cog_rwkv_ops.squared_relu(view), reference.squared_relu(view))


@every_dtype
def test_opcheck_and_gradient(dtype: torch.dtype, device: str) -> None:
    for shape in [(3, 5), (0,), ()]:
        x = numbers(*shape, dtype=dtype, device=device).requires_grad_()
        torch.library.opcheck(torch.ops.cog_rwkv.squared_relu.default, (x,))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(cog_rwkv_ops.squared_relu, (x.new_tensor([-1.0, 0.5, 2.0]).requires_grad_(),))


@every_dtype
def test_the_gradient_is_rounded_once(dtype: torch.dtype, device: str) -> None:
    x = numbers(4099, dtype=dtype, device=device, scale=3.0).requires_grad_()
    incoming = numbers(4099, dtype=dtype, device=device, seed=1)
    cog_rwkv_ops.squared_relu(x).backward(incoming)
    wide = x.detach().double().requires_grad_()
    reference.squared_relu(wide).backward(incoming.double())
    assert_close(x.grad, wide.grad.to(dtype), ulps=1, size=0.0)


def test_a_gradient_whose_parts_are_beyond_float16(device: str) -> None:
    x = torch.full((3,), 1e-3, dtype=torch.float16, device=device, requires_grad=True)
    cog_rwkv_ops.squared_relu(x).backward(torch.full_like(x, 60_000.0))
    assert_close(x.grad, (x.detach().double() * 120_000).half())


@pytest.mark.acceptance(10)
def test_a_wrong_dtype_is_named(device: str) -> None:
    with pytest.raises(RuntimeError, match="cog_rwkv::squared_relu: x is int32; it must be float32"):
        cog_rwkv_ops.squared_relu(torch.ones(3, dtype=torch.int32, device=device))


@every_weight
def test_sizes_of_a_model(weight: torch.dtype, device: str) -> None:
    fill = Fill(device)
    for n, f, c in [(1, 3072, 768), (2, 3072, 768), (9, 3072, 770), (300, 640, 160), (3, 1, 1), (3, 0, 5), (3, 5, 0)]:
        k, matrix = fill(n, f) - 1, fill(f, c, dtype=weight)
        right = reference.squared_relu_linear(k.cpu().double(), matrix.cpu())
        allowed = BOUND[F32] + (BOUND[weight] if device == "cuda" else 0)
        assert error(cog_rwkv_ops.squared_relu_linear(k, matrix), right) <= allowed, (n, f, c)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rows_of_inactive_neurons_are_not_read_on_the_cpu(n: int) -> None:
    fill = Fill("cpu")
    k, matrix = fill(n, 500), fill(500, 70)
    idle = (k <= 0).all(0)
    assert idle.any()
    right = cog_rwkv_ops.squared_relu_linear(k, matrix)
    matrix[idle] = math.nan
    assert torch.equal(cog_rwkv_ops.squared_relu_linear(k, matrix), right)


@every_weight
@pytest.mark.acceptance(7)
def test_values_beyond_float16(weight: torch.dtype, device: str) -> None:
    """A key of 300 squared is 90,000; a tenth of a million of those are summed here."""
    k = torch.full((2, 512), 300.0, device=device)
    out = cog_rwkv_ops.squared_relu_linear(k, torch.full((512, 5), 2.0, dtype=weight, device=device))
    assert error(out, torch.full((2, 5), 512 * 90_000 * 2.0).double()) <= BOUND[weight]
    assert (cog_rwkv_ops.squared_relu_linear(-k, torch.ones(512, 5, dtype=weight, device=device)) == 0).all()


@pytest.mark.acceptance(7)
def test_what_is_not_a_number_stays_so(device: str) -> None:
    k = Fill(device)(3, 70)
    k[1, 5] = math.nan
    out = cog_rwkv_ops.squared_relu_linear(k, torch.ones(70, 4, device=device))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
