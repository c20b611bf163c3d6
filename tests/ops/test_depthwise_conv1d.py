"""depthwise_conv1d: the definition at every length, its gradients, rows that are not finite."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.depthwise_conv1d import reference
from tests.ops.common import FLOAT_OR_HALF, layouts, numbers
from tests.ops.model_cases import BOUND, error

COMPILED = torch.ops.cog_rwkv
F32 = torch.float32
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
# Batch, channels, time: around a tile of 128, and around the lengths at which a transform of another size begins.
SHAPES = [(1, 1, 1), (2, 3, 4), (3, 2, 5), (1, 5, 31), (9, 2, 127), (2, 3, 128), (3, 2, 129), (1, 2, 255), (2, 2, 256)]
SHAPES += [(3, 3, 257), (1, 1, 512), (2, 1, 513), (5, 2, 1000)]
LONG = [(2, 1, 1025), (1, 2, 2048), (3, 1, 2049), (2, 1, 4096), (1, 1, 4097), (1, 1, 4500)]
EMPTY = [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 2, 300)]


def given(b: int, c: int, t: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """w and k."""
    return numbers(c, t, dtype=dtype, device=device, seed=1), numbers(b, c, t, dtype=dtype, device=device, seed=2)


def limit(dtype: torch.dtype, time: int) -> float:
    # A few values may all be rounded by half a unit; of many, most are rounded by less.
    rounding = torch.finfo(dtype).eps / 2 if time < 16 else BOUND[dtype]
    return max(rounding, BOUND[F32] * max(1.0, math.sqrt(time / 256)))


def wide(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().cpu().double() for t in tensors]


@every_dtype
def test_equals_the_definition(dtype: torch.dtype, device: str, guard) -> None:
    for b, c, t in [*SHAPES, *EMPTY, *(LONG if device == "cuda" else [])]:
        for shift in (0, 1):
            w, k = (guard(x, shift) for x in given(b, c, t, dtype, device))
            out = cog_rwkv_ops.depthwise_conv1d(w, k, 0.5)
            assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, (b, c, t), True)
            assert error(out, reference.depthwise_conv1d(*wide(w, k), 0.5)) <= limit(dtype, t), (b, c, t)


@every_dtype
def test_gradients(dtype: torch.dtype, device: str, guard) -> None:
    for b, c, t in [*SHAPES, *EMPTY, *(LONG if device == "cuda" else [])]:
        w, k = (guard(x).requires_grad_() for x in given(b, c, t, dtype, device))
        incoming = guard(numbers(b, c, t, dtype=dtype, device=device, seed=3), 1)
        cog_rwkv_ops.depthwise_conv1d(w, k).backward(incoming)
        right = [x.requires_grad_() for x in wide(w, k)]
        reference.depthwise_conv1d(*right).backward(*wide(incoming))
        for x, r in zip((w, k), right, strict=True):
            assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
            assert error(x.grad, torch.zeros_like(r) if r.grad is None else r.grad) <= limit(dtype, t), (b, c, t)


def test_one_step_is_a_product(device: str) -> None:
    w, k = torch.tensor([[3.0]], device=device), torch.tensor([[[5.0]]], device=device)
    assert cog_rwkv_ops.depthwise_conv1d(w, k, 0.25).item() == 15.25


def test_the_newest_weight_is_the_last(device: str) -> None:
    for time in (4, 300):
        w = torch.zeros(1, time, device=device)
        w[0, -1], w[0, -3] = 1.0, 10.0  # this token, and the one two before it
        k = torch.arange(1.0, time + 1, device=device).view(1, 1, -1)
        out = cog_rwkv_ops.depthwise_conv1d(w, k).flatten()
        assert out[:4].tolist() == pytest.approx([1.0, 2.0, 13.0, 24.0], abs=1e-6 * out.max().item())


def test_every_layout(device: str) -> None:
    for time in (34, 300):
        w, k = given(4, 6, time, F32, device)
        right = reference.depthwise_conv1d(*wide(w, k))
        for name, view in layouts(w).items():
            assert error(cog_rwkv_ops.depthwise_conv1d(view, k), right) <= limit(F32, time), name
        for name, view in layouts(k).items():
            assert error(cog_rwkv_ops.depthwise_conv1d(w, view), right) <= limit(F32, time), name


def test_a_row_keeps_its_precision_beside_a_larger_one(device: str) -> None:
    for time in (64, 300, 1000):
        w, k = given(6, 1, time, F32, device)
        sizes = torch.tensor([1e-30, 1e20, 1.0, 1e-8, 0.0, 3e4], device=device)
        out = cog_rwkv_ops.depthwise_conv1d(w, k * sizes[:, None, None])
        right = reference.depthwise_conv1d(*wide(w, k * sizes[:, None, None]))
        for row, row_right in zip(out, right, strict=True):
            assert error(row, row_right) <= limit(F32, time)


@every_dtype
def test_what_is_not_finite_harms_what_depends_on_it(dtype: torch.dtype, device: str) -> None:
    for time in (60, 200, 600):
        w, k = given(5, 2, time, dtype, device)
        whole = cog_rwkv_ops.depthwise_conv1d(w, k)
        k[1, 0, 50], k[2, 1, 40], k[4, 0, 0] = math.nan, math.inf, -math.inf
        out = cog_rwkv_ops.depthwise_conv1d(w, k)
        for row in [(0, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 1), (4, 1)]:
            assert error(out[row], wide(whole)[0][row]) <= 2 * limit(dtype, time), (time, row)
        assert error(out[1, 0, :50], wide(whole)[0][1, 0, :50]) <= 2 * limit(dtype, time)
        assert error(out[2, 1, :40], wide(whole)[0][2, 1, :40]) <= 2 * limit(dtype, time)
        assert out[1, 0, 50:].isnan().all()
        assert not out[2, 1, 40:].isfinite().any()
        assert not out[4, 0].isfinite().any()
        w[0, -10] = math.inf  # nine tokens back
        out = cog_rwkv_ops.depthwise_conv1d(w, given(5, 2, time, dtype, device)[1])
        assert error(out[:, 0, :9], wide(whole)[0][:, 0, :9]) <= 2 * limit(dtype, time)
        assert not out[:, 0, 9:].isfinite().any()
        assert error(out[:, 1], wide(whole)[0][:, 1]) <= 2 * limit(dtype, time)


def test_gradients_of_gradients(device: str) -> None:
    def penalty(call, w: Tensor, k: Tensor) -> list[Tensor]:
        """The gradient of the squared length of the gradient."""
        first = torch.autograd.grad(call(w, k).square().sum(), [w, k], create_graph=True)
        return list(torch.autograd.grad(sum(t.square().sum() for t in first), [w, k]))

    for time in (20, 200):
        w, k = (0.1 * t for t in given(3, 2, time, F32, device))
        found = penalty(cog_rwkv_ops.depthwise_conv1d, w.requires_grad_(), k.requires_grad_())
        right = penalty(reference.depthwise_conv1d, *(t.requires_grad_() for t in wide(w, k)))
        assert all(error(a, b) <= 1e-5 for a, b in zip(found, right, strict=True))


def test_only_what_needs_a_gradient_gets_one(device: str) -> None:
    for wanted in (0, 1):
        arguments = list(given(3, 2, 40, F32, device))
        arguments[wanted].requires_grad_()
        cog_rwkv_ops.depthwise_conv1d(*arguments).sum().backward()
        assert arguments[wanted].grad is not None
        assert arguments[1 - wanted].grad is None


def test_errors_name_the_argument(device: str) -> None:
    w, k = given(2, 3, 5, F32, device)
    for message, call in {
        "depthwise_conv1d: k is float64; it must be float32": lambda: cog_rwkv_ops.depthwise_conv1d(w, k.double()),
        r"depthwise_conv1d: k has shape \[3, 5\]; it must be \[B, C, T\]": lambda: cog_rwkv_ops.depthwise_conv1d(
            w, k[0]
        ),
        "depthwise_conv1d: w is float16; it must have the dtype of k": lambda: cog_rwkv_ops.depthwise_conv1d(
            w.half(), k
        ),
        r"depthwise_conv1d: w has shape \[3, 4\]; it must be \[C, T\]": lambda: cog_rwkv_ops.depthwise_conv1d(
            w[:, 1:], k
        ),
        "depthwise_conv1d_backward_w: gradient has shape": lambda: COMPILED.depthwise_conv1d_backward_w(k[:1], k),
        "depthwise_conv1d_backward_k: w has shape": lambda: COMPILED.depthwise_conv1d_backward_k(k, w[:2]),
    }.items():
        with pytest.raises(RuntimeError, match=f"cog_rwkv::{message}"):
            call()


@pytest.mark.gpu
def test_a_wrong_device_names_the_argument(cuda: str) -> None:
    w, k = given(2, 3, 5, F32, cuda)
    with pytest.raises(RuntimeError, match="depthwise_conv1d: w is on cpu; it must be on the device of k, cuda:0"):
        cog_rwkv_ops.depthwise_conv1d(w.cpu(), k)


@every_dtype
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    for shape in [(2, 3, 5), (0, 3, 5), (2, 2, 200)]:
        w, k = given(*shape, dtype, device)
        torch.library.opcheck(COMPILED.depthwise_conv1d_backward_k.default, (k.clone().requires_grad_(), w))
        torch.library.opcheck(COMPILED.depthwise_conv1d_backward_w.default, (k.clone().requires_grad_(), k))
        torch.library.opcheck(COMPILED.depthwise_conv1d.default, (w.requires_grad_(), k.requires_grad_(), 0.5))


def test_trains_compiled_whole_with_changing_sizes(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cog_rwkv_ops.depthwise_conv1d, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in [(5, 3, 9), (1, 2, 1), (0, 3, 4), (3, 4, 300)]:
        w, k = (t.requires_grad_() for t in given(*shape, F32, device))
        right = [t.requires_grad_() for t in wide(w, k)]
        for call, arguments in ((compiled, (w, k)), (reference.depthwise_conv1d, right)):
            call(*arguments, 0.5).square().sum().backward()
        for x, r in zip((w, k), right, strict=True):
            assert error(x.grad, r.grad) <= 1e-5


def test_number_of_threads_changes_nothing() -> None:
    w, k = given(5, 40, 70, F32, "cpu")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gradient_w = COMPILED.depthwise_conv1d_backward_w(k, k)
            found.append((cog_rwkv_ops.depthwise_conv1d(w, k), gradient_w))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
def test_the_same_bits_every_time_and_in_a_graph(cuda: str) -> None:
    w, k = given(7, 5, 300, F32, cuda)
    right = cog_rwkv_ops.depthwise_conv1d(w, k), COMPILED.depthwise_conv1d_backward_w(k, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cog_rwkv_ops.depthwise_conv1d(w, k), COMPILED.depthwise_conv1d_backward_w(k, k)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.slow
@pytest.mark.gpu
def test_beyond_two_to_the_31_elements(cuda: str) -> None:
    torch.use_deterministic_algorithms(False)  # no need to fill that much memory twice
    for b, c, t in [(2**25 // 64 + 1, 64, 64), (2**23 // 64 + 1, 64, 256)]:
        w = torch.zeros(c, t, dtype=torch.float16, device=cuda)
        w[:, -1], w[:, -2] = 1.0, 0.5
        k = torch.ones(b, c, t, dtype=torch.float16, device=cuda)
        k[-1] = 2.0
        assert k.numel() > 2**31
        out = cog_rwkv_ops.depthwise_conv1d(w, k)
        torch.testing.assert_close(out[-1, -1, :3].float().cpu(), torch.tensor([2.0, 3.0, 3.0]), rtol=1e-3, atol=0)
        torch.testing.assert_close(out[-2, 0, :3].float().cpu(), torch.tensor([1.0, 1.5, 1.5]), rtol=1e-3, atol=0)
        del out
        gradient = COMPILED.depthwise_conv1d_backward_k(k, w)
        torch.testing.assert_close(
            gradient[-1, -1, -3:].float().cpu(), torch.tensor([3.0, 3.0, 2.0]), rtol=1e-3, atol=0
        )
