"""scattering2d: against its definition and, where it is installed, kymatio; the gradient; the kernels it is made of."""

import pytest
import torch
from torch import Tensor

from cog_rwkv_ops import scattering2d
from cog_rwkv_ops.scattering2d import _scattering2d, filters
from cog_rwkv_ops.scattering2d.reference import scattering2d as reference
from tests.ops.common import FLOAT_OR_HALF, layouts, numbers

ops = torch.ops.cog_rwkv
# planes, M, N, J, L, max_order: M and N at, above and between multiples of 2^J
SIZES = [
    (3, 32, 32, 2, 8, 2),
    (5, 17, 30, 2, 3, 2),
    (2, 33, 24, 3, 4, 2),
    (1, 16, 16, 4, 2, 2),
    (4, 8, 11, 3, 5, 1),
    (7, 4, 5, 2, 1, 2),
    (2, 2, 3, 1, 6, 2),
]


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest error, by the largest coefficient."""
    assert actual.shape == expected.shape
    return ((actual.double().cpu() - expected.double().cpu()).abs().max() / expected.abs().max().cpu()).item()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_definition(size: tuple[int, ...], device: str, guard) -> None:
    planes, m, n, *options = size
    for dtype, limit in ((torch.float32, 2e-6), (torch.float64, 1e-7)):
        x = guard(numbers(planes, m, n, dtype=dtype, device=device))
        out = scattering2d(x, *options)
        assert out.dtype == dtype
        assert out.is_contiguous()
        assert relative(out, reference(x.cpu().double(), *options)) < limit


@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:], ids=str)
def test_half_precisions_are_rounded_once(dtype: torch.dtype, device: str) -> None:
    x = numbers(2, 3, 16, 16, dtype=dtype, device=device)
    assert torch.equal(scattering2d(x, 2), scattering2d(x.float(), 2).to(dtype))


def test_layouts_batches_and_no_images(device: str) -> None:
    x = numbers(12, 16, dtype=torch.float32, device=device)
    plain = scattering2d(x, 2, 4)
    assert plain.shape == (1 + 8 + 16, 3, 4)
    for view in layouts(x).values():
        assert torch.equal(scattering2d(view, 2, 4), plain)
    many = numbers(3, 200, 8, 8, dtype=torch.float32, device=device)  # more than is computed at a time on the CPU
    assert relative(scattering2d(many, 1, 8), torch.stack([scattering2d(part, 1, 8) for part in many])) < 1e-6
    empty = x.new_empty(0, 3, 16, 16).requires_grad_()
    scattering2d(empty, 2).sum().backward()
    assert scattering2d(empty, 2).shape == (0, 3, 81, 4, 4)
    assert empty.grad.shape == empty.shape


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradient(size: tuple[int, ...], device: str) -> None:
    planes, m, n, *options = size
    x = numbers(planes, m, n, dtype=torch.float32, device=device).requires_grad_()
    out = scattering2d(x, *options)
    incoming = numbers(*out.shape, dtype=torch.float32, device=device, seed=1)
    out.backward(incoming)
    wide = x.detach().cpu().double().requires_grad_()
    reference(wide, *options).backward(incoming.cpu().double())
    assert relative(x.grad, wide.grad) < 2e-5


def test_what_pytorch_needs(device: str) -> None:
    x = numbers(2, 8, 9, dtype=torch.float64, device=device).requires_grad_()
    torch.library.opcheck(_scattering2d, (x, 2, 3, 2))
    assert torch.autograd.gradcheck(lambda t: scattering2d(t, 2, 3), (x,))
    gradient = torch.autograd.grad(scattering2d(x, 2, 3).sum(), x, create_graph=False)[0]
    with pytest.raises(NotImplementedError, match="scattering2d_backward has no backward"):
        torch.autograd.grad(scattering2d(x, 2, 3).square().sum(), x, create_graph=True)
    compiled = torch.compile(lambda t: scattering2d(t, 2, 3) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (2, 5):
        y = numbers(count, 8, 9, dtype=torch.float64, device=device, seed=count).requires_grad_()
        compiled(y).sum().backward()
        plain = y.detach().clone().requires_grad_()
        (scattering2d(plain, 2, 3) * 2).sum().backward()
        assert torch.equal(y.grad, plain.grad)
    assert gradient.shape == x.shape


def test_names_what_is_wrong(device: str) -> None:
    x = torch.ones(1, 8, 8, device=device)
    wrong = [
        ((x, 0), "J is 0"),
        ((x, 4), "x has shape .*; M and N must be at least"),
        ((x, 2, 0), "L is 0"),
        ((x[0, 0], 1), "x has"),
    ]
    for arguments, text in [*wrong, ((x, 2, 8, 3), "max_order is 3"), ((x.int(), 2), "x is torch.int32")]:
        with pytest.raises(RuntimeError, match=f"cog_rwkv::scattering2d: {text}"):
            scattering2d(*arguments)
    with pytest.raises(RuntimeError, match="cog_rwkv::scattering_filter: spectrum has shape"):
        ops.scattering_filter(torch.ones(1, 4, 4, 2, device=device), torch.ones(1, 4, 4, device=device), 2)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_filter_and_its_adjoint(step: int, device: str, guard) -> None:
    for planes, count, height, width in [(1, 1, 4, 8), (5, 9, 8, 12), (3, 17, 12, 4)]:
        real = numbers(planes, height, width, dtype=torch.float64, device=device)
        psi = guard(numbers(count, height, width, dtype=torch.float64, device=device, seed=1))
        half = guard(torch.view_as_real(torch.fft.rfft2(real)).contiguous())
        out = ops.scattering_filter(half, psi, step)
        product = torch.fft.fft2(real)[:, None] * psi
        right = product.unflatten(3, (step, -1)).sum(3).unflatten(2, (step, -1)).sum(2)
        torch.testing.assert_close(torch.view_as_complex(out), right)
        gradient = guard(numbers(*out.shape, dtype=torch.float64, device=device, seed=2))
        back = torch.view_as_complex(ops.scattering_filter_adjoint(gradient, psi, step))
        repeated = torch.view_as_complex(gradient).repeat(1, 1, step, step) * psi
        right = torch.fft.rfft2(torch.fft.ifft2(repeated.sum(1)).real)
        torch.testing.assert_close(back, right)


@pytest.mark.parametrize("padded", [(8, 8), (9, 7), (12, 10), (5, 5)], ids=str)
def test_padding_and_its_adjoint(padded: tuple[int, int], device: str, guard) -> None:
    m, n = 5, 4
    x = guard(numbers(3, m, n, dtype=torch.float64, device=device))
    rows, columns = (filters.reflect(size, to).to(device) for size, to in ((m, padded[0]), (n, padded[1] - 1)))
    out = ops.scattering_pad(x, len(rows), len(columns))
    assert torch.equal(out, x[:, rows][:, :, columns])
    gradient = guard(numbers(*out.shape, dtype=torch.float64, device=device, seed=1))
    right = x.new_zeros(3, m, len(columns)).index_add(1, rows, gradient)
    right = x.new_zeros(3, m, n).index_add(2, columns, right)
    torch.testing.assert_close(ops.scattering_pad_adjoint(gradient, m, n), right)


@pytest.mark.parametrize("size", [*SIZES, (2, 64, 224, 3, 8, 2)], ids=str)
def test_equals_kymatio(size: tuple[int, ...], device: str) -> None:
    """To 1e-5 of the largest coefficient, in the same order."""
    kymatio = pytest.importorskip("kymatio.torch", reason="kymatio is not installed", exc_type=ImportError)
    planes, m, n, j, angles, max_order = size
    if min(m, n) <= 2:
        pytest.skip("kymatio's padding fails for two pixels")
    x = numbers(planes, m, n, dtype=torch.float32, device="cpu").abs()
    peer = kymatio.Scattering2D(j, (m, n), L=angles, max_order=max_order)
    assert relative(scattering2d(x.to(device), j, angles, max_order), peer(x)) < 1e-5
