"""norm_shift_: what stands before each half of a layer: the residual sum, its layer norm, and the token shift.

    s[t] = x[t] + delta[t]        h[t] = layer_norm(s[t])        out[m, t] = h[t] + (h[t - 1] - h[t]) * mix[m]

The first token of a sequence takes its predecessor from the state; the sequence's last h becomes the state.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_norm_shift_ = operator("norm_shift_")


def norm_shift_(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mix: Tensor,
    shift: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Residual sum, layer norm and the M lerps of a token shift, over packed sequences.

    Args:
        x: [N, C], the tokens of B sequences one after the other; float32, float16 or bfloat16; CPU or CUDA.
        delta: what is added to `x`, like `x`; None adds nothing.
        weight: [C], float32, of the layer norm.
        bias: [C], float32, of the layer norm.
        mix: [M, C], float32: 0 keeps the token, 1 takes the one before. Time mix has M = 6, channel mix M = 1.
        shift: [R, C], float32: a pool of last normalised tokens, each row contiguous. **Updated in place.**
        rows: [B], int64: sequence i has the row rows[i] of `shift`. Each another row.
        cu_seqlens: [B + 1], int64: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]; it begins with 0 and
            ends with N. A sequence without tokens changes nothing.
        eps: added to the variance.

    Returns:
        x + delta, [N, C], and the mixes, [M, N, C], in the dtype of `x`. All arithmetic is float32; the norm is taken
        of the sum before that is rounded.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; on the CPU also, a row is out of range or repeated, or
            `cu_seqlens` is not as said. The message names the argument. On CUDA, where the host cannot look, a
            sequence whose row is out of range leaves the pool alone and gets NaN.
        NotImplementedError: an argument requires a gradient: this operator is for inference.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        token shift.
    """
    refuse_gradient("norm_shift_", x, *(() if delta is None else (delta,)), weight, bias, mix, shift)
    return _norm_shift_(x, delta, weight, bias, mix, shift, rows, cu_seqlens, eps)


@torch.library.register_fake("cog_rwkv::norm_shift_")
def _fake(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mix: Tensor,
    shift: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(mix.shape[0], *x.shape)
