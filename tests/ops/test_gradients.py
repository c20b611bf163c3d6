"""Gradients of the model's operators: those of their definitions in float64, and the refusal where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.common import FLOAT_OR_HALF, layouts, numbers
from tests.ops.model_cases import BOUND, CASES, Arguments, Case, copied, error

F32 = torch.float32
DIFFERENTIABLE = [case for case in CASES if case.gradient]
BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_weighted_case = pytest.mark.parametrize(
    ("case", "weight"),
    [
        pytest.param(case, weight, id=f"{case.name}-{weight}_weight".replace("torch.", ""))
        for case in DIFFERENTIABLE
        for weight in (FLOAT_OR_HALF if case.weights else [F32])
    ],
)


def every_argument(differentiable: bool) -> pytest.MarkDecorator:
    """Each floating-point argument of the operators that have a gradient, or that have none."""
    arguments = [
        pytest.param(case, name, id=f"{case.name}-{name}")
        for case in CASES
        for name, value in case.make(2, F32, F32, "cpu").items()
        if case.gradient == differentiable and isinstance(value, Tensor) and value.is_floating_point()
    ]
    return pytest.mark.parametrize(("case", "name"), arguments)


def tensors(arguments: Arguments) -> dict[str, Tensor]:
    return {name: a for name, a in arguments.items() if isinstance(a, Tensor)}


def incoming(outputs: list[Tensor]) -> list[Tensor]:
    """A gradient for each output; the same for the operator and for its definition."""
    return [numbers(*t.shape, dtype=t.dtype, device=str(t.device), seed=90 + i) for i, t in enumerate(outputs)]


def gradients(call: Callable[..., Any], arguments: Arguments, given: list[Tensor] | None = None) -> dict[str, Tensor]:
    """The gradient of each tensor among the arguments. `given` comes in, or one made from a seed."""
    leaves = copied(arguments, lambda t: t.detach().requires_grad_())
    out = call(**leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    torch.autograd.backward(outputs, incoming(outputs) if given is None else given)
    return {name: t.grad for name, t in tensors(leaves).items()}


def right_gradients(case: Case, arguments: Arguments) -> dict[str, Tensor]:
    """Autograd through the definition in float64, for the same gradient coming in."""
    out = case.call(**arguments)
    given = [t.cpu().double() for t in incoming(list(out) if isinstance(out, tuple) else [out])]
    found = gradients(case.definition, copied(arguments, lambda t: t.cpu().double()), given)
    return {name: torch.zeros(arguments[name].shape) if g is None else g for name, g in found.items()}


def assert_gradients(case: Case, arguments: Arguments, where: str = "", call: Callable[..., Any] | None = None) -> None:
    found, right = gradients(call or case.call, arguments), right_gradients(case, arguments)
    for name, argument in tensors(arguments).items():
        gradient = found[name]
        assert (gradient.dtype, gradient.shape, gradient.device) == (argument.dtype, argument.shape, argument.device)
        limit = max(1e-5, BOUND[argument.dtype])
        assert error(gradient, right[name]) <= limit, f"{case.name} {where}: gradient of {name}"


@every_weighted_case
@every_dtype
def test_equals_the_gradient_of_the_definition(
    case: Case, dtype: torch.dtype, weight: torch.dtype, device: str
) -> None:
    for n in (0, 1, 2, 3, 17, 33, 70):
        assert_gradients(case, case.make(n, dtype, weight, device), f"n={n}")


@every_case
def test_every_layout(case: Case, device: str) -> None:
    plain = case.make(8, F32, F32, device)
    for name, value in tensors(plain).items():
        if value.dim() == 1:
            assert_gradients(case, plain | {name: value.repeat_interleave(2)[::2]}, name)
            continue
        for layout, view in layouts(value).items():
            assert_gradients(case, plain | {name: view}, f"{name} {layout}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {"bias": None}),
        ("low_rank", {"bias": None, "activation": "none"}),
        ("low_rank", {"activation": "sigmoid"}),
        ("low_rank", {"bias": None, "activation": "tanh"}),
        ("time_mix_prepare", {"v_first": None, "v_mix": None}),
        ("layer_norm", {"eps": 0.5}),
        ("time_mix_output", {"eps": 0.5}),
    ],
)
@every_dtype
def test_with_other_options(name: str, options: Arguments, dtype: torch.dtype, device: str) -> None:
    case = BY_NAME[name]
    arguments = case.make(9, dtype, dtype, device) | options
    assert_gradients(case, arguments, str(options))
    if dtype == F32:
        torch.library.opcheck(case.compiled, (), copied(arguments, lambda t: t.requires_grad_()))


@every_argument(differentiable=True)
def test_only_what_needs_a_gradient_gets_one(case: Case, name: str, device: str) -> None:
    for n in (5, 0):
        arguments = case.make(n, F32, F32, device)
        right = right_gradients(case, arguments)[name]
        arguments[name].requires_grad_()
        out = case.call(**arguments)
        outputs = list(out) if isinstance(out, tuple) else [out]
        torch.autograd.backward(outputs, incoming(outputs))
        assert error(arguments[name].grad, right) <= 1e-5
        assert all(t.grad is None for other, t in tensors(arguments).items() if other != name)


def test_one_tensor_as_several_arguments(device: str) -> None:
    case = BY_NAME["time_mix_output"]
    arguments = case.make(5, F32, F32, device)
    shared = arguments["r"].clone().requires_grad_()
    arguments |= {"r": shared.detach(), "k": shared.detach()}
    right = right_gradients(case, arguments)
    out = case.call(**arguments | {"r": shared, "k": shared})
    out.backward(incoming([out])[0])
    assert error(shared.grad, right["r"] + right["k"]) <= 1e-5


@pytest.mark.parametrize("output", range(4))
def test_one_result_of_several(output: int, device: str) -> None:
    case = BY_NAME["time_mix_prepare"]
    arguments = case.make(5, F32, F32, device)
    leaves = copied(arguments, lambda t: t.requires_grad_())
    case.call(**leaves)[output].sum().backward()
    wide = copied(arguments, lambda t: t.detach().cpu().double().requires_grad_())
    case.definition(**wide)[output].sum().backward()
    for name, leaf in tensors(leaves).items():
        right = torch.zeros_like(wide[name]) if wide[name].grad is None else wide[name].grad
        assert error(leaf.grad, right) <= 1e-5, name


@every_case
def test_can_be_differentiated_twice(case: Case, device: str) -> None:
    def penalty(call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
        """The gradient of the squared length of the gradient."""
        out = call(**arguments)
        total = sum(t.square().sum() for t in (out if isinstance(out, tuple) else (out,)))
        every = list(tensors(arguments).values())
        first = torch.autograd.grad(total, every, create_graph=True)
        return list(torch.autograd.grad(sum(t.square().sum() for t in first), every))

    arguments = case.make(5, F32, F32, device)
    right = penalty(case.definition, copied(arguments, lambda t: t.cpu().double().requires_grad_()))
    found = penalty(case.call, copied(arguments, lambda t: t.requires_grad_()))
    assert all(error(a, b) <= 1e-4 for a, b in zip(found, right, strict=True))


@every_case
def test_trains_compiled_whole_with_changing_sizes(case: Case, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 1, 0, 33):
        assert_gradients(case, case.make(n, F32, F32, device), f"n={n}", compiled)


@every_argument(differentiable=False)
def test_a_gradient_is_refused_where_there_is_none(case: Case, name: str, device: str) -> None:
    arguments = case.make(4, F32, F32, device)
    arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"cog_rwkv_ops.{case.name} has no backward"):
        case.call(**arguments)
    with torch.no_grad():
        case.call(**arguments)
