"""binary_activation: sign(x), trained with the straight-through estimator."""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_binary_activation = operator("binary_activation")
_binary_activation_backward = operator("binary_activation_backward")


def binary_activation(x: Tensor) -> Tensor:
    """sign(x), elementwise: -1, 0 or 1. The sign of 0 and of -0 is 0, that of NaN is NaN.

    Args:
        x: any shape, any strides; float32, float16, bfloat16 or float64; CPU or CUDA.

    Returns:
        A contiguous tensor like `x`. Its gradient is not that of sign, which is 0 almost everywhere, but the
        straight-through estimator: the incoming gradient where |x| <= 1, else 0 (also where x is NaN).

    Raises:
        RuntimeError: the dtype of `x` is another one.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv, Bengio, "Binarized Neural Networks", 2016 (arXiv:1602.02830),
    eq. 4; there the sign of 0 is 1.
    """
    return _binary_activation(x)


@torch.library.register_fake("cog_rwkv::binary_activation")
def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cog_rwkv::binary_activation_backward")
def _backward_fake(gradient: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep_x(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[-1])


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return _binary_activation_backward(gradient, x)


def _backward_of_backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
    """The estimator is linear in the gradient and flat in x."""
    (x,) = ctx.saved_tensors
    return _binary_activation_backward(outer, x), None


torch.library.register_autograd("cog_rwkv::binary_activation", _backward, setup_context=_keep_x)
torch.library.register_autograd("cog_rwkv::binary_activation_backward", _backward_of_backward, setup_context=_keep_x)
