"""wkv4: the recurrence of RWKV-4, an average of values with weights that decay, channel by channel.

    y_t = (A + e^(u + k_t) v_t) / (B + e^(u + k_t))
    A <- e^-rate A + e^k_t v_t        B <- e^-rate B + e^k_t        rate = exp(w)

A and B are kept as a = A e^-p and b = B e^-p, with p the largest exponent so far, so that nothing overflows. All
arithmetic is float32. On CUDA, where channels are too few to fill the GPU, time is cut into segments, which are summed
side by side.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.wkv4 import reference

_wkv4 = operator("wkv4")
_wkv4_backward = operator("wkv4_backward")


def wkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over B sequences of T tokens.

    Args:
        w: the raw decay, [C], float32: exp(w) is what the weights' exponents lose a token.
        u: the bonus of the token itself, [C], float32.
        k: key, [B, T, C]; float32, float16 or bfloat16; CPU or CUDA.
        v: value, like `k`.
        state: [B, 3, C], float32: a, b and p. Of nothing: 0, 0 and -1e38.

    Returns:
        y, like `k`, and the state after the last token, like `state`. Differentiable twice: the first time by kernels
        in float32, which keep the arguments alone (and while they run three floats for each channel of a token, on
        CUDA of every eighth), the second time in plain PyTorch. Where a token's exponent equals that of the state, p's
        gradient goes to the token.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023 (arXiv:2305.13048), equation 16 and
    appendix D.
    """
    return _wkv4(w, u, k, v, state)


@torch.library.register_fake("cog_rwkv::wkv4")
def _fake(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), state.new_empty(state.shape)


@torch.library.register_fake("cog_rwkv::wkv4_backward")
def _fake_backward(
    d_y: Tensor, d_end: Tensor, w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    parts = (state.new_empty(k.shape[0], k.shape[2]) for _ in range(2))
    return (*parts, k.new_empty(k.shape), k.new_empty(k.shape), state.new_empty(state.shape))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor, ...]:
    d_w, d_u, d_k, d_v, d_state = _wkv4_backward(d_y, d_end, *ctx.saved_tensors)
    return d_w.sum(0), d_u.sum(0), d_k, d_v, d_state


torch.library.register_autograd("cog_rwkv::wkv4", _backward, setup_context=_keep)
differentiate_definition("wkv4_backward", reference.wkv4_backward)
