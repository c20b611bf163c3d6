"""binary_linear: a matrix product of signs, for what binary activations make of a network.

    y[n, m] = scale[m] * sum over k of sign(x[n, k]) sign(weight[m, k]),    scale[m] = mean over k of |weight[m, k]|

Signs are bits: 32 of them are multiplied and summed by one xor and one count of bits, and a weight takes 1/16 of what
it takes in 16 bits. The sign of 0 is 1 here, that of NaN is -1: a bit holds nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_binary_linear = operator("binary_linear")
_binary_linear_packed = operator("binary_linear_packed")
_binary_linear_backward = operator("binary_linear_backward")
_pack_signs = operator("pack_signs")


def binary_linear(x: Tensor, weight: Tensor) -> Tensor:
    """sign(x) (scale sign(weight))^T, for training.

    Args:
        x: [N, K]; float32, float16 or bfloat16; CPU or CUDA. N, K and M may be anything, 0 too.
        weight: [M, K] on the device of `x`; float32, float16 or bfloat16, not necessarily the dtype of `x`.

    Returns:
        [N, M] in the dtype of `x`: an exact integer times a float32 scale, rounded once. Differentiable once, by
        straight-through estimators: the gradient of sign is 1 where its argument lies within [-1, 1], else 0, and that
        of the scale is the true one.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Rastegari, Ordonez, Redmon, Farhadi, "XNOR-Net", 2016 (arXiv:1603.05279), sections 3.1 and 3.2; the
        estimator of Hubara et al., "Binarized Neural Networks", 2016 (arXiv:1602.02830), eq. 4.
    """
    return _binary_linear(x, weight)


def pack_signs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `binary_linear_packed` needs of a weight, made once.

    Args:
        weight: [M, K]; float32, float16 or bfloat16; CPU or CUDA.

    Returns:
        signs: [M, 4 ceil(K / 128)], int32: bit k % 32 of word k / 32 says whether weight[m, k] >= 0; the rest is 0.
        scale: [M], float32: the mean of |weight[m]|; 0 where K is 0.

    Raises:
        RuntimeError: a dtype or shape is wrong; the message names the argument.
        NotImplementedError: `weight` requires a gradient.
    """
    refuse_gradient("pack_signs", weight)
    return _pack_signs(weight)


def binary_linear_packed(x: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """`binary_linear` with a packed weight, for inference.

    Args:
        x: [N, K]; float32, float16 or bfloat16; CPU or CUDA.
        signs: [M, 4 ceil(K / 128)], int32, as `pack_signs` gives them: bits behind K are 0.
        scale: [M], float32; any numbers will do.

    Returns:
        [N, M] in the dtype of `x`, the same as binary_linear gives.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.
        NotImplementedError: an argument requires a gradient: train with `binary_linear`.
    """
    refuse_gradient("binary_linear_packed", x, scale)
    return _binary_linear_packed(x, signs, scale)


@torch.library.register_fake("cog_rwkv::binary_linear")
def _fake(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1], lambda: f"cog_rwkv::binary_linear: weight has shape {weight.shape}")
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("cog_rwkv::binary_linear_backward")
def _backward_fake(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.register_fake("cog_rwkv::pack_signs")
def _pack_fake(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, k = weight.shape
    signs = weight.new_empty((rows, (k + 127) // 128 * 4), dtype=torch.int32)
    return signs, weight.new_empty((rows,), dtype=torch.float32)


@torch.library.register_fake("cog_rwkv::binary_linear_packed")
def _packed_fake(x: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], signs.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    refuse_gradient("binary_linear's backward", gradient, *ctx.saved_tensors)
    for_x, for_weight = _binary_linear_backward(gradient, *ctx.saved_tensors)
    return for_x, for_weight


torch.library.register_autograd("cog_rwkv::binary_linear", _backward, setup_context=_keep)
