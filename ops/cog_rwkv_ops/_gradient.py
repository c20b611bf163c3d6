"""What backwards written in Python share, and the backward of operators that have no kernel for it yet."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Definition = Callable[..., Tensor | tuple[Tensor, ...]]


def widen(tensor: Tensor) -> Tensor:
    """The same values in the dtype to compute in: float32 for the half precisions. Packed weights stay as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def differentiate_definition(name: str, definition: Definition) -> None:
    """Gives the functional operator cog_rwkv::<name> the gradient of `definition`, its reference.py.

    The call keeps its arguments and nothing else. backward() computes the definition again, in plain PyTorch, in
    float32 for the half precisions, and differentiates it with respect to what needs a gradient; each gradient is
    rounded once, to the dtype of its argument. It can be differentiated again.

    Args:
        name: the operator, in the namespace cog_rwkv.
        definition: takes what the operator takes, in the same order.
    """

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            # Views, so that one tensor given as two arguments gets the gradient of each.
            given = [t if t is None else t.view_as(t) for t in ctx.saved_tensors]
            wide = (option if t is None else widen(t) for t, option in zip(given, ctx.options, strict=True))
            out = definition(*wide)
        outputs = out if isinstance(out, tuple) else (out,)
        reached = [(o, widen(g)) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
        # Shorter than `given` where PyTorch has left out arguments that have their defaults.
        needs = ctx.needs_input_grad
        found = iter(
            torch.autograd.grad(
                [o for o, _ in reached],
                [t for t, needed in zip(given, needs, strict=False) if needed and t is not None],
                [g for _, g in reached],
                create_graph=torch.is_grad_enabled(),
                materialize_grads=True,
            )
        )
        return tuple(next(found) if needed else None for needed in needs)

    torch.library.register_autograd(f"cog_rwkv::{name}", backward, setup_context=_keep)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in inputs))
    ctx.options = [None if isinstance(a, Tensor) else a for a in inputs]
