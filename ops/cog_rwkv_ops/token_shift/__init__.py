"""token_shift_: each token mixed with the one before it, several mixes at once.

    out[m, t] = x[t] + (x[t - 1] - x[t]) * mix[m]

The first token of a sequence takes its predecessor from the state; the sequence's last token becomes the state.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_token_shift_ = operator("token_shift_")


def token_shift_(x: Tensor, mix: Tensor, shift: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The M lerps of a token shift, over packed sequences.

    Args:
        x: [N, C], the tokens of B sequences one after the other; float32, float16 or bfloat16; CPU or CUDA.
        mix: [M, C], float32: 0 keeps the token, 1 takes the one before. Time mix has M = 6, channel mix M = 1.
        shift: [R, C], float32: a pool of last tokens, each row contiguous. **Updated in place.**
        rows: [B], int64: sequence i has the row rows[i] of `shift`. Each another row.
        cu_seqlens: [B + 1], int64: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]; it begins with 0 and
            ends with N. A sequence without tokens changes nothing.

    Returns:
        [M, N, C] in the dtype of `x`.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; on the CPU also, a row is out of range or repeated, or
            `cu_seqlens` is not as said. The message names the argument. On CUDA, where the host cannot look, a
            sequence whose row is out of range leaves the pool alone and gets NaN.
        NotImplementedError: an argument requires a gradient: this operator is for inference.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        token shift.
    """
    refuse_gradient("token_shift_", x, mix, shift)
    return _token_shift_(x, mix, shift, rows, cu_seqlens)


@torch.library.register_fake("cog_rwkv::token_shift_")
def _fake(x: Tensor, mix: Tensor, shift: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x.new_empty(mix.shape[0], *x.shape)
