"""What holds for every operator of the model: definition, layouts, errors, opcheck, compiling, streams, graphs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.heap import left_by
from tests.ops.common import FLOAT_OR_HALF, layouts
from tests.ops.model_cases import (
    CASES,
    Case,
    assert_right,
    bound,
    copied,
    results,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
F32 = torch.float32
WEIGHTED = [
    pytest.param(case, weight, id=f"{case.name}-{weight}_weight".replace("torch.", ""))
    for case in CASES
    for weight in (FLOAT_OR_HALF if case.weights else [F32])
]
ARGUMENTS = [
    pytest.param(case, name, id=f"{case.name}-{name}")
    for case in CASES
    for name, value in case.make(2, F32, F32, "cpu").items()
    if isinstance(value, Tensor)
]
every_weighted_case = pytest.mark.parametrize(("case", "weight"), WEIGHTED)
every_case_by_row = pytest.mark.parametrize(("case", "weight"), [p for p in WEIGHTED if p.values[0].by_row])
every_argument = pytest.mark.parametrize(("case", "name"), ARGUMENTS)


@every_weighted_case
@every_dtype
def test_equals_the_definition(case: Case, dtype: torch.dtype, weight: torch.dtype, device: str, guard) -> None:
    for n in (0, 1, 2, 3, 5, 16, 17, 33, 70):
        for shift in (0, 1):
            arguments = case.make(n, dtype, weight, device)
            given = copied(arguments, lambda t, shift=shift: guard(t, shift))
            got = results(case, case.call, given)
            assert all(t.dtype in (dtype, F32) for t in got)
            assert_right(case, got, arguments, bound(case, dtype, weight, device), f"n={n} shift={shift}")


@every_case
@pytest.mark.acceptance(10)
def test_every_layout(case: Case, device: str) -> None:
    plain = case.make(8, F32, F32, device)
    for name, value in plain.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name == case.written:
            continue
        for layout, view in layouts(value).items():
            given = copied(plain) | {name: view}
            limit = bound(case, F32, F32, device)
            assert_right(case, results(case, case.call, given), plain, limit, f"{name} {layout}")


@every_case
@pytest.mark.acceptance(10)
def test_vectors_and_indices_with_strides(case: Case, device: str) -> None:
    plain = case.make(8, F32, F32, device)
    spread = {n: v.repeat_interleave(2)[::2] for n, v in plain.items() if isinstance(v, Tensor) and v.dim() == 1}
    assert_right(case, results(case, case.call, copied(plain) | spread), plain, bound(case, F32, F32, device))


@every_argument
@pytest.mark.acceptance(10)
def test_a_wrong_dtype_names_the_argument(case: Case, name: str, device: str) -> None:
    arguments = case.make(4, F32, F32, device)
    wrong = torch.float64 if arguments[name].is_floating_point() else torch.int32
    with pytest.raises(RuntimeError, match=rf"cog_rwkv::{case.name}: {name} is {str(wrong)[6:]}; it must"):
        case.call(**arguments | {name: arguments[name].to(wrong)})


@every_argument
@pytest.mark.acceptance(10)
def test_a_wrong_shape_names_the_argument(case: Case, name: str, device: str) -> None:
    arguments = case.make(4, F32, F32, device)
    with pytest.raises(RuntimeError, match=rf"cog_rwkv::{case.name}: {name} has shape \[1, .*\]; it must"):
        case.call(**arguments | {name: arguments[name][None]})


@every_argument
@pytest.mark.gpu
@pytest.mark.acceptance(10)
def test_a_wrong_device_names_the_argument(case: Case, name: str, cuda: str) -> None:
    arguments = case.make(4, F32, F32, cuda)
    first = next(iter(arguments))
    other = "\\w+" if name == first else name  # where the first is the odd one, the next one is named
    message = rf"cog_rwkv::{case.name}: {other} is on c\w+(:0)?; it must be on the device"
    with pytest.raises(RuntimeError, match=message):
        case.call(**arguments | {name: arguments[name].cpu()})


@every_case
@pytest.mark.acceptance(12)
def test_a_call_leaves_nothing_on_the_heap(case: Case) -> None:
    arguments = case.make(2, F32, F32, "cpu")
    assert left_by(lambda: case.call(**arguments)) < 16


@every_case
@pytest.mark.acceptance(12)
def test_a_call_that_fails_leaves_nothing_on_the_heap(case: Case) -> None:
    arguments = case.make(2, F32, F32, "cpu")
    last = [name for name, value in arguments.items() if isinstance(value, Tensor)][-1]
    arguments[last] = arguments[last][None]

    def fail() -> None:
        with pytest.raises(RuntimeError, match=last):
            case.call(**arguments)

    assert left_by(fail) < 16


@every_case
@every_dtype
def test_opcheck(case: Case, dtype: torch.dtype, device: str) -> None:
    for n in (0, 1, 9) if dtype == F32 else (9,):
        arguments = case.make(n, dtype, dtype, device)
        if case.gradient:
            arguments = copied(arguments, lambda t: t.requires_grad_())
        torch.library.opcheck(case.compiled, (), arguments)


@every_case
def test_compiles_whole_with_changing_sizes(case: Case, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 1, 0, 33):
        arguments = case.make(n, F32, F32, device)
        got = results(case, compiled, copied(arguments))
        assert_right(case, got, arguments, bound(case, F32, F32, device), f"n={n}")


@every_case
@pytest.mark.acceptance(8)
def test_number_of_threads_changes_nothing(case: Case) -> None:
    before = torch.get_num_threads()
    got = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            got.append(results(case, case.call, case.make(700, F32, torch.bfloat16, "cpu")))
    finally:
        torch.set_num_threads(before)
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True))


@every_case_by_row
@pytest.mark.acceptance(8)
def test_a_row_is_the_same_beside_any_others(case: Case, weight: torch.dtype) -> None:
    every = case.make(300, F32, weight, "cpu")
    whole = results(case, case.call, every)

    def rows(begin: int, end: int) -> list[Tensor]:
        cut = {n: v[begin:end] if isinstance(v, Tensor) and v.shape[0] == 300 else v for n, v in every.items()}
        return results(case, case.call, cut)

    for begin, end in [*((0, n) for n in range(1, 34)), *((n, n + 1) for n in range(12)), (255, 258), (299, 300)]:
        for a, b in zip(rows(begin, end), whole, strict=True):
            assert torch.equal(a, b[begin:end]), f"{case.name}: rows {begin} to {end}"


def test_slower_instructions_give_right_results_too() -> None:
    """Both sets at the same time, a thread each."""
    chosen = "(equals_the_definition or beside_any or threads or extreme or products_are_the_same) and not cuda"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/ops", "-k", chosen]

    def run(instructions: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"COG_RWKV_CPU": instructions, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(run, ["avx2", "baseline"]):
            assert done.returncode == 0, done.stdout[-4000:]


@every_case
@pytest.mark.gpu
def test_runs_on_the_current_stream(case: Case, cuda: str) -> None:
    arguments = case.make(33, F32, F32, cuda)
    late = copied(arguments, lambda t: torch.zeros_like(t) if t.is_floating_point() else t)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a kernel on any other stream would read the zeros
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                late[name].copy_(value)
        got = results(case, case.call, late)
    stream.synchronize()
    assert_right(case, got, arguments, bound(case, F32, F32, cuda))


@every_case
@every_dtype
@pytest.mark.gpu
def test_runs_in_a_cuda_graph(case: Case, dtype: torch.dtype, cuda: str) -> None:
    given = case.make(17, F32, dtype, cuda)
    case.call(**copied(given))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(case, case.call, given)
    for scale in (0.5, 2.0):
        fresh = copied(case.make(17, F32, dtype, cuda), lambda t, s=scale: t * s if t.is_floating_point() else t)
        for name, value in fresh.items():
            if isinstance(value, Tensor):
                given[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(case, got, fresh, bound(case, F32, dtype, cuda))


@every_case
@pytest.mark.gpu
def test_runs_on_a_device_that_is_not_current(case: Case, cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    arguments = case.make(9, F32, torch.float16, "cuda:1")
    with torch.cuda.device(0):
        got = results(case, case.call, copied(arguments))
        assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in got)
    assert_right(case, got, arguments, bound(case, F32, torch.float16, "cuda"))


@every_case
@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_the_same_bits_every_time_on_cuda(case: Case, dtype: torch.dtype, cuda: str) -> None:
    first = results(case, case.call, case.make(70, F32, dtype, cuda))
    for _ in range(5):
        again = results(case, case.call, case.make(70, F32, dtype, cuda))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
