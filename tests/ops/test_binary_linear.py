"""binary_linear: exact products of signs, the packed form, straight-through gradients."""

import math

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.binary_linear import reference
from tests.ops.common import FLOAT_OR_HALF, layouts, numbers
from tests.ops.model_cases import BOUND, error

COMPILED = torch.ops.cog_rwkv
F32 = torch.float32
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_weight = pytest.mark.parametrize("weight", FLOAT_OR_HALF, ids=lambda dtype: f"{dtype}_weight"[6:])
# Around words of 32, groups of 128 and vectors of 8 signs; rows of x for popcounts, and for more than those.
SIZES = [(1, 1, 1), (1, 8, 3), (2, 31, 5), (1, 32, 17), (3, 33, 4), (9, 127, 33), (1, 128, 64), (8, 129, 65)]
SIZES += [(1, 4096, 130), (5, 1000, 70), (32, 264, 31), (33, 264, 31), (70, 100, 50), (0, 5, 3), (3, 5, 0), (2, 0, 3)]


def given(n: int, k: int, m: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """x and weight, zeros among them."""
    x = numbers(n, k, dtype=dtype, device=device, seed=1)
    matrix = numbers(m, k, dtype=weight, device=device, seed=2)
    x[..., ::7], matrix[..., ::5] = 0.0, -0.0
    return x, matrix


def signs(t: Tensor) -> Tensor:
    return torch.where(t >= 0, 1.0, -1.0).double()


@every_weight
@every_dtype
def test_equals_the_definition(dtype: torch.dtype, weight: torch.dtype, device: str, guard) -> None:
    for n, k, m in SIZES:
        for shift in (0, 1):
            x, matrix = (guard(t, shift) for t in given(n, k, m, dtype, weight, device))
            out = cog_rwkv_ops.binary_linear(x, matrix)
            right = reference.binary_linear(x.cpu().double(), matrix.cpu())
            assert (out.dtype, out.shape) == (dtype, (n, m))
            assert error(out, right) <= max(BOUND[dtype], BOUND[F32]), (n, k, m)


@every_dtype
def test_the_sums_are_exact(dtype: torch.dtype, device: str, guard) -> None:
    """With scales that are powers of two nothing is rounded but by the dtype of the result."""
    for n, k, m in [(1, 2047, 300), (8, 1500, 33), (40, 2040, 65), (1, 100, 9000)]:
        x, matrix = given(n, k, m, dtype, F32, device)
        packed, scale = cog_rwkv_ops.pack_signs(matrix)
        scale = torch.full_like(scale, 0.25)
        scale[::3] = -2.0
        for shift in (0, 1):  # words off the 16-byte boundary too
            out = cog_rwkv_ops.binary_linear_packed(x, guard(packed, shift), guard(scale, shift))
            right = (signs(x) @ signs(matrix).T * scale).to(dtype)
            assert torch.equal(out, right), (n, k, m)


@every_weight
def test_packing_equals_the_definition(weight: torch.dtype, device: str, guard) -> None:
    for k in (0, 1, 8, 31, 32, 33, 127, 128, 129, 1000, 4096):
        for shift in (0, 1):
            matrix = guard(given(1, k, 21, F32, weight, device)[1], shift)
            packed, scale = cog_rwkv_ops.pack_signs(matrix)
            right, means = reference.pack_signs(matrix)
            assert torch.equal(packed, right), k
            torch.testing.assert_close(scale, means, rtol=1e-6, atol=0.0)


def test_the_packed_form_gives_the_same(device: str) -> None:
    for n in (1, 3, 8, 50):
        x, matrix = given(n, 300, 70, F32, F32, device)
        packed = cog_rwkv_ops.pack_signs(matrix)
        assert torch.equal(cog_rwkv_ops.binary_linear_packed(x, *packed), cog_rwkv_ops.binary_linear(x, matrix))


def test_zero_counts_as_one_and_nan_as_minus_one(device: str) -> None:
    x = torch.tensor([[0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45]], device=device)
    assert cog_rwkv_ops.binary_linear(x.T, torch.ones(1, 1, device=device)).flatten().tolist() == [
        *(1, 1, -1, -1, 1, -1, 1, -1)
    ]


def test_every_layout(device: str) -> None:
    x, matrix = given(8, 34, 6, F32, F32, device)
    right = cog_rwkv_ops.binary_linear(x, matrix)
    for name, view in layouts(x).items():
        assert torch.equal(cog_rwkv_ops.binary_linear(view, matrix), right), name
    for name, view in layouts(matrix).items():
        assert torch.equal(cog_rwkv_ops.binary_linear(x, view), right), name
        packed, scale = cog_rwkv_ops.pack_signs(view)
        assert torch.equal(cog_rwkv_ops.binary_linear_packed(x, packed.t().contiguous().t(), scale), right), name


def test_errors_name_the_argument(device: str) -> None:
    x, matrix = given(3, 40, 5, F32, F32, device)
    packed, scale = cog_rwkv_ops.pack_signs(matrix)
    plain, by_words, pack = cog_rwkv_ops.binary_linear, cog_rwkv_ops.binary_linear_packed, cog_rwkv_ops.pack_signs
    for message, call in {
        "binary_linear: x is int32; it must be float32": lambda: plain(x.int(), matrix),
        r"binary_linear: x has shape \[40\]; it must be \[N, K\]": lambda: plain(x[0], matrix),
        "binary_linear: weight is float64; it must be float32": lambda: plain(x, matrix.double()),
        r"binary_linear: weight has shape \[5, 39\]; it must be \[M, K\]": lambda: plain(x, matrix[:, :39]),
        r"pack_signs: weight has shape \[40\]; it must be \[M, K\]": lambda: pack(matrix[0]),
        "binary_linear_packed: signs is int64; it must be int32": lambda: by_words(x, packed.long(), scale),
        r"binary_linear_packed: signs has shape \[5, 3\]": lambda: by_words(x, packed[:, :3], scale),
        "binary_linear_packed: scale is float64; it must be float32": lambda: by_words(x, packed, scale.double()),
        r"binary_linear_packed: scale has shape \[4\]; it must be \[M\]": lambda: by_words(x, packed, scale[:4]),
    }.items():
        with pytest.raises(RuntimeError, match=f"cog_rwkv::{message}"):
            call()
    for name, call in {
        "pack_signs": lambda: pack(matrix),
        "binary_linear_packed": lambda: by_words(x, packed, scale),
    }.items():
        matrix.requires_grad_()
        scale.requires_grad_()
        with pytest.raises(NotImplementedError, match=f"{name} has no backward"):
            call()


@pytest.mark.gpu
def test_a_wrong_device_names_the_argument(cuda: str) -> None:
    x, matrix = given(3, 40, 5, F32, F32, cuda)
    packed, scale = cog_rwkv_ops.pack_signs(matrix)
    for name, call in {
        "weight": lambda: cog_rwkv_ops.binary_linear(x, matrix.cpu()),
        "signs": lambda: cog_rwkv_ops.binary_linear_packed(x, packed.cpu(), scale),
        "scale": lambda: cog_rwkv_ops.binary_linear_packed(x, packed, scale.cpu()),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name} is on cpu; it must be on the device of x, cuda:0"):
            call()


@every_weight
@every_dtype
def test_straight_through_gradients(dtype: torch.dtype, weight: torch.dtype, device: str) -> None:
    for n, k, m in [(1, 5, 3), (17, 70, 33), (4, 0, 3), (0, 5, 3), (5, 9, 0)]:
        x, matrix = (t.requires_grad_() for t in given(n, k, m, dtype, weight, device))
        incoming = numbers(n, m, dtype=dtype, device=device, seed=3)
        cog_rwkv_ops.binary_linear(x, matrix).backward(incoming)
        wide = [t.detach().cpu().double().requires_grad_() for t in (x, matrix)]
        reference.binary_linear(*wide).backward(incoming.cpu().double())
        # On CUDA the gradient is rounded to the dtype of the signs before it is multiplied.
        used = {"x": max(BOUND[dtype], BOUND[F32]), "weight": max(BOUND[weight], BOUND[dtype], BOUND[F32])}
        rounding = 0.0 if device == "cpu" else BOUND[weight] + BOUND[dtype]
        for name, t, right in zip(used, (x, matrix), wide, strict=True):
            assert (t.grad.dtype, t.grad.shape) == (t.dtype, t.shape)
            assert error(t.grad, right.grad) <= used[name] + rounding, (name, n, k, m)
            assert (t.grad[t.detach().abs() > 1] == 0).all() or name == "weight"


def test_gradients_beyond_float16(device: str) -> None:
    """The sum over the batch, and a large gradient times a scale, pass 65,504 on the way and not at the end."""
    x = torch.ones(512, 64, dtype=torch.float16, device=device).requires_grad_()
    matrix = torch.full((32, 64), 1 / 1024, dtype=torch.float16, device=device).requires_grad_()
    cog_rwkv_ops.binary_linear(x, matrix).backward(torch.full((512, 32), 1000.0, dtype=torch.float16, device=device))
    assert torch.equal(x.grad, torch.full_like(x, 1000.0 * 32 / 1024))
    # 512,000 from all places, times (1 / 1024 + 1): the right answer is beyond float16 itself.
    assert matrix.grad.isinf().all()
    matrix = matrix.detach().neg().requires_grad_()
    cog_rwkv_ops.binary_linear(x, matrix).backward(torch.full((512, 32), 0.25, dtype=torch.float16, device=device))
    assert torch.equal(matrix.grad, torch.full_like(matrix, 128 * (1 + 1 / 1024)))


def test_a_second_derivative_is_refused(device: str) -> None:
    x, matrix = (t.requires_grad_() for t in given(3, 40, 5, F32, F32, device))
    with pytest.raises(NotImplementedError, match="binary_linear's backward has no backward"):
        torch.autograd.grad(cog_rwkv_ops.binary_linear(x, matrix).sum(), x, create_graph=True)


def test_only_what_needs_a_gradient_gets_one(device: str) -> None:
    for wanted in (0, 1):
        arguments = list(given(3, 40, 5, F32, F32, device))
        arguments[wanted].requires_grad_()
        cog_rwkv_ops.binary_linear(*arguments).sum().backward()
        assert arguments[wanted].grad is not None
        assert arguments[1 - wanted].grad is None


@every_dtype
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    for n, k, m in [(3, 40, 5), (0, 5, 2), (2, 0, 3), (50, 130, 9)]:
        x, matrix = given(n, k, m, dtype, dtype, device)
        packed = COMPILED.pack_signs(matrix)
        torch.library.opcheck(COMPILED.pack_signs.default, (matrix,))
        torch.library.opcheck(COMPILED.binary_linear_packed.default, (x, *packed))
        gradient = numbers(n, m, dtype=dtype, device=device, seed=3)
        torch.library.opcheck(COMPILED.binary_linear_backward.default, (gradient, x, matrix))
        torch.library.opcheck(COMPILED.binary_linear.default, (x.requires_grad_(), matrix.requires_grad_()))


def test_trains_compiled_whole_with_changing_sizes(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cog_rwkv_ops.binary_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 1, 0, 40):
        found = []
        for call in (compiled, cog_rwkv_ops.binary_linear):
            x, matrix = (t.requires_grad_() for t in given(n, 130, 9, F32, F32, device))
            out = call(x, matrix)
            out.square().sum().backward()
            found.append((out, x.grad, matrix.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_number_of_threads_changes_nothing() -> None:
    x, matrix = given(40, 1000, 300, F32, F32, "cpu")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cog_rwkv_ops.binary_linear(x, matrix))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
def test_runs_in_a_cuda_graph_on_another_stream(cuda: str) -> None:
    for n in (1, 50):
        x, matrix = given(n, 4096, 70, torch.float16, torch.float16, cuda)
        packed = cog_rwkv_ops.pack_signs(matrix)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cog_rwkv_ops.binary_linear_packed(x, *packed)
        x.neg_()
        graph.replay()
        assert error(out, reference.binary_linear(x.cpu().double(), matrix.cpu())) <= BOUND[torch.float16]


@pytest.mark.slow
@pytest.mark.gpu
def test_beyond_two_to_the_31_elements(cuda: str) -> None:
    """A weight of more than 2^31 elements, and a result of as many."""
    torch.use_deterministic_algorithms(False)  # no need to fill that much memory twice
    x = numbers(1, 65536, dtype=torch.float16, device=cuda)
    matrix = torch.ones(32769, 65536, dtype=torch.float16, device=cuda)
    matrix[-1] = -2.0
    out = cog_rwkv_ops.binary_linear(x, matrix)
    total = signs(x).sum()
    assert out[0, -1] == (-2 * total).half()
    assert (out[0, :-1] == total.half()).all()
    wide = cog_rwkv_ops.binary_linear(x.view(-1, 1), matrix[:, :1].contiguous())
    assert wide.numel() > 2**31
    assert torch.equal(wide[-1], signs(x)[0, -1].half() * matrix[:, 0])
