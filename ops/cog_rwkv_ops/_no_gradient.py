"""The one way in which operators without a backward refuse to be differentiated."""

import torch
from torch import Tensor


def refuse_gradient(name: str, *arguments: Tensor | None) -> None:
    """Raises NotImplementedError where autograd would record a call with these arguments.

    PyTorch itself only warns, and not before backward(), by which time the gradient has been lost silently.
    """
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in arguments):
        raise NotImplementedError(
            f"cog_rwkv_ops.{name} has no backward: call it under torch.no_grad(), or detach the argument that "
            "requires a gradient"
        )
