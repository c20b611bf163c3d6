"""squared_relu: relu(x)^2; and squared_relu_linear: relu(k)^2 weight_t, the second half of RWKV-7's channel mix.

Of a trained model most neurons are zero for a given token. On the CPU the rows of `weight_t` that belong to neurons
which are zero for all tokens of a pass are not read. The square is taken in float32: it does not overflow before it
is summed, in whatever dtype the model is.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition, widen
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.squared_relu import reference

_squared_relu = operator("squared_relu")
_squared_relu_linear = operator("squared_relu_linear")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, elementwise.

    Args:
        x: any shape, any strides; float32, float16, bfloat16 or float64; CPU or CUDA.

    Returns:
        relu(x)^2 in the dtype of `x`, contiguous; NaN stays NaN. Differentiable; the gradient of a half precision is
        computed in float32 and rounded once.

    Raises:
        RuntimeError: the dtype is wrong.

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021 (arXiv:2109.08668).
    """
    return _squared_relu(x)


def squared_relu_linear(k: Tensor, weight_t: Tensor) -> Tensor:
    """relu(k)^2 weight_t.

    Args:
        k: [N, F]; float32, float16 or bfloat16; CPU or CUDA.
        weight_t: [F, C] on the device of `k`; float32, float16 or bfloat16, not necessarily the dtype of `k`. The
            transpose of a linear layer's weight, so that what belongs to one neuron lies together.

    Returns:
        [N, C] in the dtype of `k`, rounded once. On the CPU a row is the same, bit for bit, beside any other
        rows, while the weights are finite: zero times an infinite weight is NaN where its row of `weight_t` is read.
        Differentiable in every tensor: the gradient is that of the definition in reference.py, which backward()
        computes again in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        channel mixing.
    """
    return _squared_relu_linear(k, weight_t)


@torch.library.register_fake("cog_rwkv::squared_relu")
def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cog_rwkv::squared_relu_linear")
def _fake_linear(k: Tensor, weight_t: Tensor) -> Tensor:
    torch._check(
        k.shape[1] == weight_t.shape[0], lambda: f"cog_rwkv::squared_relu_linear: weight_t has shape {weight_t.shape}"
    )
    return k.new_empty(k.shape[0], weight_t.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return (widen(gradient) * 2 * widen(x).relu()).to(x.dtype)


torch.library.register_autograd("cog_rwkv::squared_relu", _backward, setup_context=_save)
differentiate_definition("squared_relu_linear", reference.squared_relu_linear)
