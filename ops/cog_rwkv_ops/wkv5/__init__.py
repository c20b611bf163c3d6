"""wkv5: the recurrence of RWKV-5 (Eagle): a decay for every key, the same for every token.

    y = (S + v (u k)') r        S <- S diag(decay) + v k'        decay = exp(-exp(w))

S is a head's state, [64 values, 64 keys]; r, k, v are a token's vectors of that head, and u is the bonus that its own
key and value have. A token is read before it decays what was there. Arithmetic is float32; on CUDA,
sequences of 64 tokens and more are computed in blocks of 16 on tensor cores: with products split so that they stay
near float32 for inputs in float32 and in every backward, else in tf32 (relative error of y and state up to 5e-4).
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.wkv5 import reference

_wkv5 = operator("wkv5")
_wkv5_backward = operator("wkv5_backward")


def wkv5(r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over B sequences of T tokens.

    Args:
        r: receptance, [B, T, H, 64]; float32, float16 or bfloat16; CPU or CUDA.
        w: the raw decay, [H, 64], float32: decay = exp(-exp(w)).
        k: key, like `r`.
        v: value, like `r`.
        u: the bonus, [H, 64], float32.
        state: [B, H, 64, 64], float32: value, key.

    Returns:
        y, like `r`, and the state after the last token, like `state`. Differentiable twice: the first time by kernels
        in float32, which keep the arguments alone, the second time in plain PyTorch.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024
    (arXiv:2404.05892), the time mixing of Eagle (RWKV-5).
    """
    return _wkv5(r, w, k, v, u, state)


@torch.library.register_fake("cog_rwkv::wkv5")
def _fake(r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return r.new_empty(r.shape), state.new_empty(state.shape)


@torch.library.register_fake("cog_rwkv::wkv5_backward")
def _fake_backward(
    d_y: Tensor, d_end: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    part = state.new_empty(state.shape[:3])
    d_w = torch.empty_like(part)
    return (*(t if t is d_w else r.new_empty(r.shape) for t in (r, d_w, k, v)), part, state.new_empty(state.shape))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor, ...]:
    d_r, d_w, d_k, d_v, d_u, d_state = _wkv5_backward(d_y, d_end, *ctx.saved_tensors)
    return d_r, d_w.sum(0), d_k, d_v, d_u.sum(0), d_state


torch.library.register_autograd("cog_rwkv::wkv5", _backward, setup_context=_keep)
differentiate_definition("wkv5_backward", reference.wkv5_backward)
