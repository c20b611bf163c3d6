"""add: out[i] = a[i] + b[i]. The smallest complete operator; copy this folder to make another."""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_add = operator("add")


def add(a: Tensor, b: Tensor) -> Tensor:
    """The elementwise sum, without broadcasting.

    Args:
        a: any shape, any strides; float32, float16, bfloat16 or float64; CPU or CUDA.
        b: the shape, dtype and device of `a`.

    Returns:
        a + b in the dtype of `a`, contiguous. The half precisions are summed in float32 and rounded once.
        Differentiable in both arguments, to any order.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: the example operator of PyTorch's guide to custom operators.
    """
    return _add(a, b)


@torch.library.register_fake("cog_rwkv::add")
def _fake(a: Tensor, b: Tensor) -> Tensor:
    torch._check(a.shape == b.shape, lambda: f"cog_rwkv::add: b has shape {b.shape}; it must have that of a, {a.shape}")
    return a.new_empty(a.shape)


def _backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


torch.library.register_autograd("cog_rwkv::add", _backward)
