"""add, swish and binary_activation: numbers, layouts, errors, gradients, compiling, streams and graphs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.add import reference as add_reference
from cog_rwkv_ops.binary_activation import reference as binary_activation_reference
from cog_rwkv_ops.swish import reference as swish_reference
from tests.ops.common import FLOATING, ODD_SIZES, assert_close, layouts, numbers
from tests.ops.model_cases import BOUND, error


class Case(NamedTuple):
    """An operator, its definition, how many tensors of one shape it takes, and which results are small."""

    name: str
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: int
    size: float = 1e-3

    def check(self, result: Tensor, given: list[Tensor]) -> None:
        assert_close(result, self.reference(*given), ulps=4, size=self.size)


COMPILED = torch.ops.cog_rwkv
CASES = [
    Case("add", cog_rwkv_ops.add, add_reference.add, 2),
    Case("swish", cog_rwkv_ops.swish, swish_reference.swish, 1),
    Case("swish_backward", COMPILED.swish_backward, swish_reference.swish_backward, 2, size=1.0),
    Case("binary_activation", cog_rwkv_ops.binary_activation, binary_activation_reference.binary_activation, 1),
    Case(
        "binary_activation_backward",
        COMPILED.binary_activation_backward,
        binary_activation_reference.binary_activation_backward,
        2,
    ),
]
PUBLIC = [case for case in CASES if not case.name.endswith("_backward")]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 1e-7, -1e-7, 88.0, -88.0, 104.0, -104.0, float("inf"), float("nan")]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_public = pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))


def arguments(case: Case, *shape: int, dtype: torch.dtype, device: str, scale: float = 2.0) -> list[Tensor]:
    return [numbers(*shape, dtype=dtype, device=device, seed=i, scale=scale) for i in range(case.inputs)]


@every_case
@every_dtype
def test_equals_the_definition_at_every_size(case: Case, dtype: torch.dtype, device: str, guard) -> None:
    for size in ODD_SIZES:
        for shift in (0, 1):  # on the 16-byte boundary, and off it
            given = [guard(t, shift) for t in arguments(case, size, dtype=dtype, device=device)]
            case.check(case.call(*given), given)


@every_case
@every_dtype
def test_special_values(case: Case, dtype: torch.dtype, device: str) -> None:
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    pairs = [special.repeat_interleave(len(special)), special.repeat(len(special))]
    given = [t.to(dtype).to(device) for t in pairs[: case.inputs]]
    case.check(case.call(*given), given)


@every_case
@pytest.mark.acceptance(10)
def test_every_layout(case: Case, device: str) -> None:
    given = arguments(case, 6, 34, dtype=torch.float32, device=device)
    every = [layouts(t) for t in given]
    for name in every[0]:
        result = case.call(*(each[name] for each in every))
        case.check(result, given)
        assert result.is_contiguous(), name
    mixed = [every[0]["transposed"], *(each["offset rows"] for each in every[1:])]
    case.check(case.call(*mixed), given)


@every_case
def test_shapes(case: Case, device: str) -> None:
    for shape in [(), (1,), (0,), (3, 0, 5), (1, 1, 1), (2, 3, 4, 5)]:
        given = arguments(case, *shape, dtype=torch.float32, device=device)
        assert case.call(*given).shape == shape


@every_case
@pytest.mark.acceptance(10)
def test_a_wrong_dtype_names_the_argument(case: Case, device: str) -> None:
    given = arguments(case, 4, dtype=torch.float32, device=device)
    wrong = [t.to(torch.int32) for t in given]
    with pytest.raises(RuntimeError, match=rf"cog_rwkv::{case.name}: (x|a) is int32; it must be float32"):
        case.call(*wrong)
    if case.inputs == 2:
        with pytest.raises(RuntimeError, match=rf"cog_rwkv::{case.name}: \w+ is float(64|32); it must have the dtype"):
            case.call(given[0], given[1].double())


@pytest.mark.parametrize("name", ["add", "swish_backward", "binary_activation_backward"])
@pytest.mark.acceptance(10)
def test_a_wrong_shape_names_the_argument(name: str, device: str) -> None:
    call = getattr(COMPILED, name)
    first, second = ("b", "a") if name == "add" else ("gradient", "x")
    message = rf"cog_rwkv::{name}: {first} has shape \[.*\]; it must have the shape of {second}"
    for shapes in [((2, 3), (3, 2)), ((3,), (1, 3)), ((4,), ())]:
        with pytest.raises(RuntimeError, match=message):
            call(*(torch.ones(shape, device=device) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.acceptance(10)
def test_two_devices_name_the_argument(cuda: str) -> None:
    with pytest.raises(RuntimeError, match="cog_rwkv::add: b is on cpu; it must be on the device of a, cuda:0"):
        cog_rwkv_ops.add(torch.ones(3, device=cuda), torch.ones(3))


@every_case
@every_dtype
def test_opcheck(case: Case, dtype: torch.dtype, device: str) -> None:
    operator = getattr(COMPILED, case.name).default
    for shape in [(3, 5), (0,), ()]:
        given = arguments(case, *shape, dtype=dtype, device=device)
        torch.library.opcheck(operator, [t.requires_grad_() for t in given])
    views = [t.t() for t in arguments(case, 4, 6, dtype=dtype, device=device)]
    torch.library.opcheck(operator, views)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=lambda case: case.name)
def test_gradients_in_float64(case: Case, device: str) -> None:
    given = [t.requires_grad_() for t in arguments(case, 3, 4, dtype=torch.float64, device=device)]
    assert torch.autograd.gradcheck(case.call, given)
    assert torch.autograd.gradgradcheck(case.call, given)


@every_dtype
def test_swish_gradient(dtype: torch.dtype, device: str) -> None:
    x = numbers(4099, dtype=dtype, device=device, scale=3.0).requires_grad_()
    incoming = numbers(4099, dtype=dtype, device=device, seed=1)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = cog_rwkv_ops.swish(x)
    y.backward(incoming)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()], "the backward keeps x and nothing else"
    assert_close(x.grad, swish_reference.swish_backward(incoming, x.detach()), ulps=4, size=1.0)


@every_dtype
def test_swish_second_derivative(dtype: torch.dtype, device: str) -> None:
    given = [numbers(4099, dtype=dtype, device=device, seed=i, scale=3.0).requires_grad_() for i in range(2)]
    outer = numbers(4099, dtype=dtype, device=device, seed=2)
    _, curved = torch.autograd.grad(COMPILED.swish_backward(*given), given, outer)
    wide = [t.detach().double().requires_grad_() for t in given]
    _, right = torch.autograd.grad(swish_reference.swish_backward(*wide), wide, outer.double())
    assert curved.dtype == dtype
    assert error(curved, right.cpu()) <= (BOUND | {torch.float64: 1e-14})[dtype]  # rounded once


@every_dtype
def test_binary_activation_gradient_is_straight_through(dtype: torch.dtype, device: str) -> None:
    just_above = 1 + torch.finfo(dtype).eps
    values = [-2.0, -just_above, -1.0, -0.5, 0.0, 0.5, 1.0, just_above, 2.0, float("nan"), float("inf")]
    x = torch.tensor(values, dtype=dtype, device=device, requires_grad=True)
    cog_rwkv_ops.binary_activation(x).backward(torch.full_like(x, 3.0))
    assert x.grad.tolist() == [0, 0, 3, 3, 3, 3, 3, 0, 0, 0, 0]
    assert cog_rwkv_ops.binary_activation(x.detach()[:5]).tolist() == [-1, -1, -1, -1, 0]


@every_public
def test_compiles_whole_with_changing_sizes(case: Case, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: case.call(*t) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (5, 1, 0, 64, 1000):
        given = [t.requires_grad_() for t in arguments(case, size, 3, dtype=torch.float32, device=device)]
        result = compiled(*given)
        result.sum().backward()
        assert_close(result.detach(), case.reference(*given).detach() * 2, ulps=4)
        assert given[0].grad is not None


@every_public
def test_number_of_threads_changes_nothing(case: Case) -> None:
    given = arguments(case, 200_003, dtype=torch.float32, device="cpu")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(case.call(*given))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_every_instruction_set_gives_the_same_bits() -> None:
    code = """
import hashlib, torch, cog_rwkv_ops
bits = hashlib.sha256()
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    x, y = (torch.randn(50_021, generator=torch.Generator().manual_seed(i)).to(dtype) * 5 for i in range(2))
    for result in (cog_rwkv_ops.add(x, y), cog_rwkv_ops.swish(x), torch.ops.cog_rwkv.swish_backward(y, x)):
        bits.update(result.view(torch.uint8).numpy().tobytes())
print(bits.hexdigest())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(cog_rwkv_ops.__file__).parents[1])}
    printed = {
        subprocess.check_output([sys.executable, "-c", code], env={**environment, "COG_RWKV_CPU": variant})
        for variant in ("baseline", "avx2", "avx512")  # a machine without one of them takes the next lower
    }
    assert len(printed) == 1


@every_public
@pytest.mark.gpu
def test_runs_on_the_current_stream(case: Case, cuda: str) -> None:
    stream = torch.cuda.Stream()
    given = arguments(case, 1 << 20, dtype=torch.float32, device=cuda)
    late = [torch.zeros_like(t) for t in given]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a kernel on any other stream would read the zeros
        for to, values in zip(late, given, strict=True):
            to.copy_(values)
        result = case.call(*late)
    stream.synchronize()
    case.check(result, given)


@every_public
@pytest.mark.gpu
def test_runs_in_a_cuda_graph(case: Case, cuda: str) -> None:
    given = arguments(case, 10_001, dtype=torch.float32, device=cuda)
    case.call(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.call(*given)
    for seed in (5, 6):
        for t in given:
            t.copy_(numbers(10_001, dtype=torch.float32, device=cuda, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        case.check(result, given)


@every_public
@pytest.mark.gpu
def test_runs_on_a_device_that_is_not_current(case: Case, cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    given = arguments(case, 1000, dtype=torch.float32, device="cuda:1")
    with torch.cuda.device(0):
        result = case.call(*given)
        assert torch.cuda.current_device() == 0
    assert result.device == torch.device("cuda:1")
    case.check(result, given)


@every_public
@pytest.mark.slow
def test_beyond_two_to_the_31_elements(case: Case, device: str) -> None:
    size = 2**31 + 11
    needed = (case.inputs + 2) * 2 * size  # bytes, in half precision
    available = torch.cuda.mem_get_info()[0] if device == "cuda" else _memory_available()
    if available < 1.2 * needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB")
    torch.use_deterministic_algorithms(False)  # no need to fill that much memory twice
    given = [torch.full((size,), 1.0, dtype=torch.float16, device=device) for _ in range(case.inputs)]
    for t in given:
        t[-9:] = -0.5
    result = case.call(*given)
    for part in (slice(0, 9), slice(2**31 - 9, 2**31 + 2), slice(size - 12, size)):
        case.check(result[part], [t[part] for t in given])
    first = result[:1].item()
    assert (result[: size - 9] == first).all()


def _memory_available() -> int:
    with Path("/proc/meminfo").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
