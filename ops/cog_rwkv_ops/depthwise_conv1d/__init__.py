"""depthwise_conv1d: the causal convolution of RWKV's first versions, TimeX, a filter a channel as long as the text.

    out[b, c, t] = eps + sum over u <= t of w[c, (T - 1) - (t - u)] * k[b, c, u]

On CUDA short texts (T <= 128) are summed as they stand here, longer ones by a Fourier transform of 2T points, two rows
of the batch at once, which never leaves the multiprocessor; above 8192 it is the plain sum again, which is slow. Sums
are float32 in any case.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_depthwise_conv1d = operator("depthwise_conv1d")
_backward_k = operator("depthwise_conv1d_backward_k")
_backward_w = operator("depthwise_conv1d_backward_w")


def depthwise_conv1d(w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
    """The causal depthwise convolution of `k` with `w`, plus `eps`.

    Args:
        w: [C, T], the filter of each channel, its newest weight last; float32, float16 or bfloat16; CPU or CUDA.
        k: [B, C, T], in the dtype and on the device of `w`.
        eps: added to every output.

    Returns:
        [B, C, T] in the dtype of `k`, rounded once. A row of k that is not finite, or a filter, harms what depends on
        it and no more. On CUDA the error, where T > 128, is that of a Fourier transform in float32: about 3e-7 of the
        largest values of the row. Differentiable in `w` and `k`, to any order; on CUDA a value that is not finite makes
        the gradient of its channel's w NaN.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: TimeX of RWKV-CUDA (github.com/BlinkDL/RWKV-CUDA, depthwise_conv1d).
    """
    return _depthwise_conv1d(w, k, eps)


@torch.library.register_fake("cog_rwkv::depthwise_conv1d")
def _fake(w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
    torch._check(w.shape == k.shape[1:], lambda: f"cog_rwkv::depthwise_conv1d: w has shape {w.shape}")
    return k.new_empty(k.shape)


@torch.library.register_fake("cog_rwkv::depthwise_conv1d_backward_k")
def _backward_k_fake(gradient: Tensor, w: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape)


@torch.library.register_fake("cog_rwkv::depthwise_conv1d_backward_w")
def _backward_w_fake(gradient: Tensor, k: Tensor) -> Tensor:
    return k.new_empty(k.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    w, k = ctx.saved_tensors
    needs_w, needs_k = ctx.needs_input_grad[:2]
    return _backward_w(gradient, k) if needs_w else None, _backward_k(gradient, w) if needs_k else None, None


def _backward_of_k(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """<outer, backward_k(g, w)> is <g, conv(w, outer)>."""
    gradient, w = ctx.saved_tensors
    needs_gradient, needs_w = ctx.needs_input_grad
    for_gradient = _depthwise_conv1d(w, outer, 0.0) if needs_gradient else None
    return for_gradient, _backward_w(gradient, outer) if needs_w else None


def _backward_of_w(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """<outer, backward_w(g, k)> is <g, conv(outer, k)>."""
    gradient, k = ctx.saved_tensors
    needs_gradient, needs_k = ctx.needs_input_grad
    for_gradient = _depthwise_conv1d(outer, k, 0.0) if needs_gradient else None
    return for_gradient, _backward_k(gradient, outer) if needs_k else None


torch.library.register_autograd("cog_rwkv::depthwise_conv1d", _backward, setup_context=_keep)
torch.library.register_autograd("cog_rwkv::depthwise_conv1d_backward_k", _backward_of_k, setup_context=_keep)
torch.library.register_autograd("cog_rwkv::depthwise_conv1d_backward_w", _backward_of_w, setup_context=_keep)
