"""conv2d: two-dimensional convolution, and its gradients as operators of their own.

    out[n, k, p, q] = bias[k] + sum over c, r, s of x[n, c, y, z] * weight[k, c, r, s]

at y = p * stride + r * dilation - padding and z likewise from q and s, where c runs over the channels of k's group; x
is 0 outside.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_conv2d = operator("conv2d")
_input_gradient = operator("conv2d_input_gradient")
_weight_gradient = operator("conv2d_weight_gradient")

Pair = int | tuple[int, int]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Two-dimensional convolution (cross-correlation), as torch.nn.functional.conv2d.

    Args:
        x: [N, C, H, W], any strides; float32, float16, bfloat16 or float64; CPU or CUDA.
        weight: [K, C / groups, R, S], any strides, dtype and device of `x`.
        bias: [K], likewise, or none.
        stride, padding, dilation: for rows and columns, or one number for both; at least 1, 0 and 1.
        groups: divides C and K.

    Returns:
        [N, K, P, Q] in the dtype of `x`, P = (H + 2 padding - dilation (R - 1) - 1) // stride + 1 and Q alike;
        channels_last where `x` is, else contiguous. Sums are in float32 for the half precisions, rounded once; in the
        dtype itself for the others, never in TF32. On CUDA the half precisions use tensor cores where the channels of
        a group, in and out, are multiples of 8; `x` and `weight` in channels_last are then read without a copy.
        Differentiable any number of times in every tensor; the gradients keep the memory format of what they belong to.

    Raises:
        RuntimeError: a dtype, shape, device or number is wrong; the message names it.

    Source: Dumoulin, Visin, "A guide to convolution arithmetic for deep learning", 2016 (arXiv:1603.07285).
    """
    return _conv2d(x, weight, bias, *_pair(stride), *_pair(padding), *_pair(dilation), groups)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int | torch.SymInt) else (value[0], value[1])


def _channels_last(t: Tensor) -> bool:
    return not t.is_contiguous() and t.permute(0, 2, 3, 1).is_contiguous()


def _like(t: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=t.dtype, device=t.device, memory_format=layout)


@torch.library.register_fake("cog_rwkv::conv2d")
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *options: int) -> Tensor:
    kernel = weight.shape[2:]
    torch._check(x.dim() == 4 and weight.dim() == 4, lambda: "cog_rwkv::conv2d: x and weight must have four dimensions")
    stride, padding, dilation = options[0:2], options[2:4], options[4:6]
    size = [(x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    return _like(x, (x.shape[0], weight.shape[0], *size), _channels_last(x))


@torch.library.register_fake("cog_rwkv::conv2d_input_gradient")
def _input_fake(gradient: Tensor, weight: Tensor, height: int, width: int, *options: int) -> Tensor:
    return _like(gradient, (gradient.shape[0], weight.shape[1] * options[6], height, width), bool(options[7]))


@torch.library.register_fake("cog_rwkv::conv2d_weight_gradient")
def _weight_fake(gradient: Tensor, x: Tensor, kernel_h: int, kernel_w: int, *options: int) -> Tensor:
    return _like(x, (gradient.shape[1], x.shape[1] // options[6], kernel_h, kernel_w), bool(options[7]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight)


def _to_input(gradient: Tensor, weight: Tensor, like: Tensor, options: list[int]) -> Tensor:
    return _input_gradient(gradient, weight, *like.shape[2:], *options, _channels_last(like))


def _to_weight(gradient: Tensor, x: Tensor, like: Tensor, options: list[int]) -> Tensor:
    return _weight_gradient(gradient, x, *like.shape[2:], *options, _channels_last(like))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (
        _to_input(gradient, weight, x, ctx.options) if need_x else None,
        _to_weight(gradient, x, weight, ctx.options) if need_weight else None,
        gradient.sum((0, 2, 3), dtype=wide).to(gradient.dtype) if need_bias else None,
        *[None] * 7,
    )


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, _, _, *options = inputs
    ctx.options = options[:7]
    ctx.save_for_backward(first, second)


def _backward_of_input(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
    """conv2d_input_gradient is linear in both: `outer` takes the place of x in conv2d."""
    gradient, weight = ctx.saved_tensors
    need_gradient, need_weight = ctx.needs_input_grad[:2]
    return (
        _conv2d(outer, weight, None, *ctx.options) if need_gradient else None,
        _to_weight(gradient, outer, weight, ctx.options) if need_weight else None,
        *[None] * 10,
    )


def _backward_of_weight(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
    """conv2d_weight_gradient is linear in both: `outer` takes the place of the weight in conv2d."""
    gradient, x = ctx.saved_tensors
    need_gradient, need_x = ctx.needs_input_grad[:2]
    return (
        _conv2d(x, outer, None, *ctx.options) if need_gradient else None,
        _to_input(gradient, outer, x, ctx.options) if need_x else None,
        *[None] * 10,
    )


torch.library.register_autograd("cog_rwkv::conv2d", _backward, setup_context=_keep)
torch.library.register_autograd("cog_rwkv::conv2d_input_gradient", _backward_of_input, setup_context=_keep_gradient)
torch.library.register_autograd("cog_rwkv::conv2d_weight_gradient", _backward_of_weight, setup_context=_keep_gradient)
