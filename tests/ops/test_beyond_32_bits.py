"""Tensors of more than 2^31 elements on the GPU: what lies around that edge is right, where a 32-bit index would wrap.

The values are random, so that an element of elsewhere is a wrong one; slices around the edge, the beginning and the end
are compared with the definition in float64. Each takes 10 to 40 GB and a second or two. Of other operators
(elementwise, depthwise_conv1d, binary_linear, host rows) the same test stands with their others.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.conv2d.reference import conv2d
from cog_rwkv_ops.layer_norm.reference import layer_norm
from cog_rwkv_ops.linear.reference import linear
from cog_rwkv_ops.scattering2d.reference import scattering2d
from cog_rwkv_ops.wkv7.reference import wkv7_
from tests.ops.model_cases import BOUND, CHUNKED

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EDGE = 2**31
WIDTH = 4096
HALF = torch.float16
ops = torch.ops.cog_rwkv


@pytest.fixture(autouse=True)
def room(cuda: str) -> Iterator[None]:
    """Skips where the GPU has less than 48 GB free; new memory is not filled, and goes back at the end."""
    free = torch.cuda.mem_get_info()[0]
    if free < 48e9:
        pytest.skip(f"needs 48 GB of GPU memory; {free / 1e9:.0f} are free")
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def values(*shape: int, device: str, dtype: torch.dtype = HALF, scale: float = 1.0) -> Tensor:
    """Normal random numbers, made where they stay."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=scale)


def parts(size: int, edge: int) -> list[slice]:
    """Of rows: the first, those around the edge, the last."""
    assert edge < size
    return [slice(0, 2), slice(edge - 2, min(edge + 2, size)), slice(size - 2, size)]


def same(actual: Tensor, right: Tensor, bound: float = 2 * BOUND[HALF]) -> None:
    """Equal within a relative L2 error; without a NaN."""
    assert actual.shape == right.shape
    assert (actual.double() - right.double()).norm() <= bound * right.double().norm()


def test_layer_norm(cuda: str) -> None:
    x = values(EDGE // WIDTH + 3, WIDTH, device=cuda)
    weight, bias = (values(WIDTH, device=cuda, dtype=torch.float32) for _ in range(2))
    out = cog_rwkv_ops.layer_norm(x, weight, bias)
    for part in parts(len(x), EDGE // WIDTH):
        same(out[part], layer_norm(x[part].double(), weight.double(), bias.double()))


def test_linear_with_a_large_weight_a_large_input_and_a_large_result(cuda: str) -> None:
    large, small = values(EDGE // WIDTH + 3, WIDTH, device=cuda), values(5, WIDTH, device=cuda)
    of_weight = cog_rwkv_ops.linear(small, large)
    of_input = cog_rwkv_ops.linear(large, small)
    for part in parts(len(large), EDGE // WIDTH):
        right = linear(large[part].double(), small.double())
        same(of_input[part], right)
        same(of_weight[:, part], right.t())
    del of_weight, of_input
    thin = large[:, :16].contiguous()
    del large
    out = cog_rwkv_ops.linear(thin, thin[:WIDTH])
    for part in parts(len(thin), EDGE // WIDTH):
        same(out[part], linear(thin[part].double(), thin[:WIDTH].double()))


@pytest.mark.parametrize("lerps", [1, 6])
def test_token_shift_(lerps: int, cuda: str) -> None:
    """With one lerp x passes the edge, with six the result does; the pool does with both."""
    tokens = EDGE // WIDTH // lerps + 5
    x, mix = values(tokens, WIDTH, device=cuda), values(lerps, WIDTH, device=cuda, dtype=torch.float32)
    pool = torch.zeros(EDGE // WIDTH + 2, WIDTH, device=cuda)
    pool[-1], pool[1] = 3.0, -2.0
    rows, bounds = (torch.tensor(t, device=cuda) for t in ([len(pool) - 1, 1], [0, tokens - 3, tokens]))
    before = torch.empty_like(x)
    before[1:] = x[:-1]
    before[0], before[-3] = 3.0, -2.0
    out = cog_rwkv_ops.token_shift_(x, mix, pool, rows, bounds)
    for lerp in range(lerps):
        for part in parts(tokens, tokens - 4):
            now, last = x[part].double(), before[part].double()
            same(out[lerp, part], now + (last - now) * mix[lerp].double())
    assert torch.equal(pool[-1], x[-4].float())
    assert torch.equal(pool[1], x[-1].float())
    assert not pool[2:-1].any()
    assert not pool[0].any()


def test_wkv7_with_a_large_pool(cuda: str) -> None:
    heads, tokens = 64, 6
    pool = torch.zeros(EDGE // (heads * 64 * 64) + 1, heads, 64, 64, dtype=HALF, device=cuda)
    chosen = [len(pool) - 1, 0]
    pool[chosen] = values(2, heads, 64, 64, device=cuda)
    given = [values(tokens, WIDTH, device=cuda, scale=0.3) for _ in range(6)]
    bounds = torch.tensor([0, 4, tokens], device=cuda)
    small = pool[chosen].double()
    right = wkv7_(*(t.double() for t in given), small, torch.arange(2, device=cuda), bounds)
    same(cog_rwkv_ops.wkv7_(*given, pool, torch.tensor(chosen, device=cuda), bounds), right)
    same(pool[chosen], small)
    assert not pool[1:-1].any()


def test_wkv7_with_many_tokens(cuda: str) -> None:
    """A sequence that is computed in chunks lies over the edge, and a short one behind it.

    a and b have a length of about 1, as a model's: then the products in tf32 are off by 4.2e-4, emulated for these
    sizes with four seeds. At a length of 2.4 each token would multiply what is in the state, and its error with it:
    1.3e-3 to 1.9e-3 after 72 tokens in the same emulation, and 1.24e-3 on an H200.
    """
    heads, edge = WIDTH // 64, EDGE // WIDTH
    lengths = [1024] * (edge // 1024 - 1) + [960, 72, 5]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(cuda)
    tokens = sum(lengths)
    given = [values(tokens, WIDTH, device=cuda, scale=scale) for scale in (0.3, 0.3, 0.3, 0.3, 0.125, 0.125)]
    pool = torch.zeros(len(lengths), heads, 64, 64, device=cuda)
    y = cog_rwkv_ops.wkv7_(*given, pool, torch.arange(len(lengths), device=cuda), bounds)
    assert tokens - 77 < edge < tokens - 5
    for first, last in ((0, 5), (tokens - 77, tokens - 5), (tokens - 5, tokens)):
        alone = torch.zeros(1, heads, 64, 64, dtype=torch.float64, device=cuda)
        ends = torch.tensor([0, last - first], device=cuda)
        wide = (t[first:last].double() for t in given)
        same(y[first:last], wkv7_(*wide, alone, torch.zeros_like(ends[:1]), ends), CHUNKED[HALF])


@pytest.mark.parametrize(
    ("dtype", "channels", "layout"),
    [
        (HALF, 64, torch.channels_last),
        (HALF, 64, torch.contiguous_format),
        (torch.float32, 8, torch.contiguous_format),
    ],
    ids=["half_channels_last", "half", "float32"],
)
def test_conv2d_and_its_gradients(dtype: torch.dtype, channels: int, layout: torch.memory_format, cuda: str) -> None:
    side = 64
    edge = EDGE // (channels * side * side)
    x = torch.empty(edge + 1, channels, side, side, dtype=dtype, device=cuda, memory_format=layout).normal_()
    weight = values(channels, channels, 3, 3, device=cuda, dtype=dtype, scale=0.1).to(memory_format=layout)
    options, last, bound = (1, 1, 1, 1, 1, 1, 1), layout == torch.channels_last, 2 * BOUND[dtype]
    out = cog_rwkv_ops.conv2d(x, weight, padding=1)
    for image in (0, edge - 1, edge):
        same(out[image : image + 1], conv2d(x[image : image + 1].double(), weight.double(), padding=(1, 1)), bound)
    del out
    # A 3 x 3 convolution of stride 1 is its own transpose, with the kernel turned and the channels exchanged.
    turned = weight.double().flip(2, 3).transpose(0, 1)
    gradient = ops.conv2d_input_gradient(x, weight, side, side, *options, last)
    for image in (0, edge - 1, edge):
        same(gradient[image : image + 1], conv2d(x[image : image + 1].double(), turned, padding=(1, 1)), bound)
    del gradient
    incoming = torch.zeros_like(x)
    incoming[edge] = x[0]
    of_weight = ops.conv2d_weight_gradient(incoming, x, 3, 3, *options, last)
    leaf = weight.double().requires_grad_()
    conv2d(x[edge:].double(), leaf, padding=(1, 1)).backward(x[:1].double())
    same(of_weight, leaf.grad, bound)


@pytest.mark.parametrize("angles", [1, 8])
def test_scattering2d(angles: int, cuda: str) -> None:
    """With one angle the images pass the edge, with eight the coefficients do."""
    side, channels = 32, 1 + angles
    of_one = side * side if angles == 1 else channels * side * side // 4
    edge = EDGE // of_one
    x = values(edge + 3, side, side, device=cuda)
    out = cog_rwkv_ops.scattering2d(x, 1, angles, 1)
    for part in parts(len(x), edge):
        same(out[part].cpu(), scattering2d(x[part].cpu().double(), 1, angles, 1))
