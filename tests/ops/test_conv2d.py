"""conv2d: odd sizes, strides, dilations, groups and layouts against the definition; its gradients."""

import math

import pytest
import torch
from torch import Tensor

from cog_rwkv_ops import conv2d
from cog_rwkv_ops.conv2d.reference import conv2d as reference
from tests.ops.common import EPSILON, FLOATING, layouts, numbers

ops = torch.ops.cog_rwkv
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))

# x, outputs, kernel, then stride, padding, dilation, groups
CASES: list[tuple] = [
    ((2, 8, 7, 9), 8, (3, 3), 1, 1, 1, 1),
    ((1, 64, 14, 15), 72, (3, 3), 1, 1, 1, 1),
    ((2, 128, 9, 9), 136, (1, 1), 1, 0, 1, 1),
    ((2, 72, 16, 16), 64, (1, 1), 2, 0, 1, 1),
    ((2, 64, 15, 14), 128, (3, 3), 2, 1, 1, 1),
    ((3, 16, 12, 11), 24, (3, 2), (2, 3), (2, 0), (1, 2), 1),
    ((1, 32, 10, 10), 48, (3, 3), 1, 2, 2, 2),
    ((2, 40, 6, 5), 80, (5, 3), (3, 2), (4, 3), (2, 1), 5),
    ((2, 3, 20, 21), 16, (7, 7), 2, 3, 1, 1),
    ((1, 5, 6, 7), 7, (2, 3), 1, 0, 1, 1),
    ((2, 6, 5, 5), 6, (3, 3), 1, 1, 1, 6),
    ((1, 9, 8, 8), 6, (3, 3), 4, 1, 1, 3),
    ((1, 1, 1, 1), 1, (1, 1), 1, 0, 1, 1),
    ((1, 8, 3, 3), 300, (3, 3), 5, 1, 1, 1),
    ((5, 264, 4, 4), 8, (4, 4), 1, 0, 1, 1),
    ((3, 136, 15, 14), 264, (1, 1), 1, 0, 1, 1),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def make(case: tuple, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, dict]:
    shape, outputs, kernel, stride, padding, dilation, groups = case
    x = numbers(*shape, dtype=dtype, device=device, seed=1)
    weight = numbers(outputs, shape[1] // groups, *kernel, dtype=dtype, device=device, seed=2)
    bias = numbers(outputs, dtype=dtype, device=device, seed=3)

    def pair(value) -> tuple[int, int]:
        return value if isinstance(value, tuple) else (value, value)

    options = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation), "groups": groups}
    return x, weight, bias, options


def close(actual: Tensor, right: Tensor, size: Tensor, terms: int) -> None:
    """`right` in float64; `size` is the same sum with the magnitudes of its terms: sums in float32, one rounding."""
    dtype = actual.dtype
    assert actual.shape == right.shape
    assert actual.isfinite().all()
    sums = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    limit = EPSILON[dtype] * right.abs() + 2 * sums * math.sqrt(terms + 16) * size
    error = (actual.double().cpu() - right).abs()
    assert (error <= limit).all(), f"{(error / limit).max().item():.2f} times what is allowed"


@every_dtype
@every_case
def test_equals_the_definition(case: tuple, dtype: torch.dtype, device: str, guard) -> None:
    x, weight, bias, options = make(case, dtype, device)
    wide = [t.cpu().double() for t in (x, weight, bias)]
    right, size = reference(*wide, **options), reference(*(t.abs() for t in wide), **options)
    terms = weight[0].numel()
    close(conv2d(guard(x), guard(weight), guard(bias), **options), right, size, terms)
    last = [guard(t.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2) for t in (x, weight)]
    out = conv2d(*last, guard(bias, 1), **options)
    close(out, right, size, terms)
    assert out.is_contiguous(memory_format=torch.channels_last) or last[0].is_contiguous()
    close(
        conv2d(guard(x, 1), guard(weight, 1), **options),
        *(reference(*t, **options) for t in (wide[:2], [t.abs() for t in wide[:2]])),
        terms,
    )


def gradients(x: Tensor, weight: Tensor, bias: Tensor, incoming: Tensor, function, options: dict) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    return list(torch.autograd.grad(function(*given, **options), given, incoming))


@every_dtype
@every_case
def test_gradients(case: tuple, dtype: torch.dtype, device: str) -> None:
    x, weight, bias, options = make(case, dtype, device)
    incoming = numbers(*conv2d(x, weight, bias, **options).shape, dtype=dtype, device=device, seed=4)
    wide = [t.cpu().double() for t in (x, weight, bias, incoming)]
    right = gradients(*wide, reference, options)
    size = gradients(*(t.abs() for t in wide), reference, options)
    terms = [weight[:, 0].numel(), incoming[:, 0].numel(), incoming[:, 0].numel()]
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x, weight)]
    for given in ((x, weight, bias, incoming), (*last, bias, incoming)):
        found = gradients(*given, conv2d, options)
        for actual, *expected, like in zip(found, right, size, terms, given[:3], strict=False):
            close(actual, *expected)
            if like.dim() == 4:
                last_only = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
                assert actual.is_contiguous(memory_format=torch.channels_last if last_only else torch.contiguous_format)


def test_any_layout(device: str) -> None:
    x, weight = (numbers(*s, dtype=torch.float16, device=device) for s in ((4, 16, 6, 8), (8, 16, 3, 3)))
    plain = conv2d(x, weight, padding=1)
    for view in layouts(x).values():
        assert torch.equal(conv2d(view, weight, padding=1), plain)
    assert torch.equal(
        conv2d(x, weight.transpose(2, 3), padding=1), conv2d(x, weight.transpose(2, 3).contiguous(), padding=1)
    )
    assert torch.equal(conv2d(x.flip(0)[1:], weight, padding=1), plain.flip(0)[1:])


def test_empty(device: str) -> None:
    for shape, outputs in (((0, 8, 5, 5), 8), ((2, 8, 5, 5), 0), ((2, 0, 5, 5), 4)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        weight = torch.zeros(outputs, shape[1], 3, 3, device=device, requires_grad=True)
        bias = torch.ones(outputs, device=device, requires_grad=True)
        out = conv2d(x, weight, bias, padding=1)
        assert out.shape == (shape[0], outputs, 5, 5)
        assert (out == 1).all()
        out.sum().backward()
        assert (weight.grad == 0).all()
        assert (x.grad == 0).all()
        assert (bias.grad == shape[0] * 25).all()


def test_what_pytorch_needs(device: str) -> None:
    x, weight, bias, options = make(((1, 4, 5, 4), 4, (3, 2), (2, 1), 1, (1, 2), 2), torch.float64, device)
    for t in (x, weight, bias):
        t.requires_grad_()
    flat = (*options["stride"], *options["padding"], *options["dilation"], options["groups"])
    for image in (x, x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()):
        torch.library.opcheck(ops.conv2d.default, (image, weight, bias, *flat))
    torch.library.opcheck(ops.conv2d.default, (x, weight, None, *flat))
    gradient = torch.ones_like(conv2d(x, weight, bias, **options)).requires_grad_()
    torch.library.opcheck(ops.conv2d_input_gradient.default, (gradient, weight, 5, 4, *flat, True))
    torch.library.opcheck(ops.conv2d_weight_gradient.default, (gradient, x, 3, 2, *flat, False))

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return conv2d(x, weight, bias, **options)

    assert torch.autograd.gradcheck(call, (x, weight, bias))
    assert torch.autograd.gradgradcheck(call, (x, weight, bias))
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for count, rows in ((2, 5), (3, 8)):
        y = numbers(count, 4, rows, 4, dtype=torch.float64, device=device)
        assert torch.equal(compiled(y, weight, bias), call(y, weight, bias))


def test_names_what_is_wrong(device: str) -> None:
    x, weight = torch.ones(1, 4, 5, 5, device=device), torch.ones(6, 4, 3, 3, device=device)
    wrong = [
        ((x[0], weight), {}, "x has shape"),
        ((x, weight[:, :3]), {}, "x has 4 channels; weight takes 3"),
        ((x, weight), {"groups": 4}, "groups is 4"),
        ((x, weight.half()), {}, "weight is float16"),
        ((x, weight, torch.ones(5, device=device)), {}, r"bias has shape \[5\]"),
        ((x, weight), {"stride": 0}, "stride is 0"),
        ((x, weight), {"padding": -1}, "padding is -1"),
        ((x, weight), {"dilation": (1, 3)}, "weight has a kernel larger"),
        ((x.int(), weight), {}, "x is int32"),
    ]
    for arguments, options, text in wrong:
        with pytest.raises(RuntimeError, match=f"cog_rwkv::conv2d: {text}"):
            conv2d(*arguments, **options)
    with pytest.raises(RuntimeError, match="cog_rwkv::conv2d_input_gradient: gradient has shape"):
        ops.conv2d_input_gradient(x[:, :3], weight, 5, 5, 1, 1, 1, 1, 1, 1, 1, False)


def test_as_large_as_a_network_needs(device: str) -> None:
    """Sums of many thousand terms, and more tiles than a GPU has multiprocessors."""
    x, weight = (numbers(*s, dtype=torch.float16, device=device) for s in ((8, 128, 28, 28), (128, 128, 3, 3)))
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    bias = torch.zeros(128, dtype=torch.float16, device=device)
    incoming = numbers(8, 128, 28, 28, dtype=torch.float16, device=device, seed=5)
    found = [conv2d(x, weight, bias, **options), *gradients(x, weight, bias, incoming, conv2d, options)]
    wide = [t.float() for t in (x, weight, bias, incoming)]
    right = [reference(*wide[:3], **options), *gradients(*wide, reference, options)]
    for actual, expected in zip(found, right, strict=True):
        assert (actual.float() - expected).norm() <= 4e-4 * expected.norm()


@pytest.mark.gpu
def test_results_are_the_same_every_time(cuda: str) -> None:
    x, weight, bias, options = make(((8, 64, 30, 30), 64, (3, 3), 1, 1, 1, 1), torch.bfloat16, cuda)
    incoming = numbers(8, 64, 30, 30, dtype=torch.bfloat16, device=cuda, seed=4)
    first = gradients(x, weight, bias, incoming, conv2d, options)
    for _ in range(3):
        assert all(
            torch.equal(a, b) for a, b in zip(first, gradients(x, weight, bias, incoming, conv2d, options), strict=True)
        )


# Rows and tokens, as in wide_plan.h; one that is not for a pass leaves it its own choice.
TILES = [(64, 128), (64, 256), (64, 384), (256, 96)]
TILES += [(128, tokens) for tokens in (48, 64, 96, 112, 128, 160, 192, 208, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile(tile: tuple[int, int], parts: int, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, the last ones not full; with strides, several grids of places in one launch."""
    monkeypatch.setenv("COG_RWKV_WIDE_CONV", f"{tile[0]},{tile[1]},{parts}")
    for shape, outputs, kernel, stride, padding, groups in (
        ((3, 136, 15, 14), 264, 1, 1, 0, 1),
        ((3, 72, 15, 14), 264, 3, 1, 1, 1),
        ((2, 264, 13, 16), 72, 3, 2, 1, 1),
        ((2, 264, 13, 16), 136, 1, 2, 0, 1),
        ((2, 128, 9, 8), 384, 3, 1, 1, 2),
    ):
        case = (shape, outputs, (kernel, kernel), stride, padding, 1, groups)
        x, weight, bias, options = make(case, torch.float16, cuda)
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        incoming = numbers(*conv2d(x, weight, bias, **options).shape, dtype=torch.float16, device=cuda, seed=4)
        found = [conv2d(x, weight, bias, **options), *gradients(x, weight, bias, incoming, conv2d, options)]
        wide = [t.cpu().double() for t in (x, weight, bias, incoming)]
        right = [reference(*wide[:3], **options), *gradients(*wide, reference, options)]
        for actual, expected in zip(found, right, strict=True):
            assert (actual.double().cpu() - expected).norm() <= 4e-4 * expected.norm()
