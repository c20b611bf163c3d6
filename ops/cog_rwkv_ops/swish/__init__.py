"""swish: x * sigmoid(x), also known as SiLU, and its derivative as an operator of its own."""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import widen
from cog_rwkv_ops._library import operator

_swish = operator("swish")
_swish_backward = operator("swish_backward")


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), elementwise.

        Args:
            x: any shape, any strides;
    float32, float16, bfloat16 or float64;
    CPU or CUDA.

           Returns
        : A contiguous tensor like `x`.The half precisions are computed in float32 and rounded once.NaN stays NaN;
    - inf gives NaN, as the formula does.Differentiable twice;
    the backward keeps `x` and nothing else.

        Raises:
            RuntimeError: the dtype of `x` is another one.

        Source: Ramachandran, Zoph, Le, "Searching for Activation Functions", 2017 (arXiv:1710.05941), with beta = 1.
    """
    return _swish(x)


@torch.library.register_fake("cog_rwkv::swish")
def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cog_rwkv::swish_backward")
def _backward_fake(gradient: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep_x(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _swish_backward(gradient, x)


def _backward_of_backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(x): d/dx of s (1 + x (1 - s)) is s (1 - s) (2 + x (1 - 2 s)). Rarely needed: plain PyTorch."""
    gradient, x = ctx.saved_tensors
    wide = widen(x)
    s = torch.sigmoid(wide)
    curvature = s * (1 - s) * (2 + wide * (1 - 2 * s))
    return _swish_backward(outer, x), (widen(outer) * widen(gradient) * curvature).to(x.dtype)


torch.library.register_autograd("cog_rwkv::swish", _backward, setup_context=_keep_x)
torch.library.register_autograd("cog_rwkv::swish_backward", _backward_of_backward, setup_context=_keep_x)
