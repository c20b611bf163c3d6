"""forward_: a step of the whole of RWKV-7 on CUDA, from the tokens' ids to the logits, in one call.

Packed sequences of any length, or one token of each of B sequences. The kernels of a layer are fewer than its
operators (a residual sum, a layer norm, a token shift and its mixes are one; all that happens inside a head is
another), activations are 16 bits wide between them, and no Python runs in between: a thread that calls this leaves the
interpreter to others. What is launched depends on N and B alone, so that a CUDA graph of a step serves other lengths,
too. On Hopper a step of a single token, of a model of up to 2,048 channels, is one kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cog_rwkv_ops._library import has_kernel, operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_forward_ = operator("forward_")
_MOST_CHANNELS = 8192


def can_forward(weights: Sequence[Tensor]) -> bool:
    """Whether `forward_` takes a model of these tensors: on CUDA, 16 bits, sizes of matrices in multiples of 32."""
    head = weights[-1]
    if head.dtype not in (torch.float16, torch.bfloat16) or head.shape[1] > _MOST_CHANNELS:
        return False
    matrices = (one for one in weights if one.dtype == head.dtype)
    return has_kernel("forward_", head.device) and all(n % 32 == 0 for one in matrices for n in one.shape)


def forward_(
    ids: Tensor,
    table: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weights: Sequence[Tensor],
    shift: Tensor,
    wkv: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    last_only: bool = True,
) -> Tensor:
    """One step of N tokens of B sequences.

    Args:
        ids: [N], int64: the tokens; CUDA.
        table: [V, C], float32, float16 or bfloat16: the embedding, each row contiguous and on a boundary of 16 bytes,
            on the device of `ids` or, as in `host_gather`, in pinned host memory. C is at most 8192.
        norm_weight, norm_bias: [C], float32: of the layer norm of the embeddings.
        weights: as `decode_` says, each matrix of the same dtype, float16 or bfloat16; ranks and F are multiples of 32.
        shift: [layers, 2, R, C], float32, contiguous: the last normalised tokens of time mix and channel mix.
            **Updated in place.**
        wkv: [layers, R, C / 64, 64, 64], float32, float16 or bfloat16, contiguous: the states. **Updated in place.**
        rows: [B], int64: sequence i goes on from the states in row rows[i]. Each another row. Without `cu_seqlens` a
            row of -1 is padding: it changes nothing, and its logits mean nothing.
        cu_seqlens: [B + 1], int64: sequence i is tokens cu_seqlens[i] to cu_seqlens[i + 1]. Left out: one token each.
        last_only: whether only the last token of each sequence gets logits.

    Returns:
        The logits, float32 [B, V], or [N, V] where `last_only` is false. As on every CUDA operator of packed
        sequences, values that make no sense (an id outside of the table, a row outside of the pool) give NaN, and
        change nothing else.

    Raises:
        RuntimeError: a dtype, shape or device is wrong, or `weights` has too few or too many tensors; the message names
            the argument.
        NotImplementedError: an argument requires a gradient: this operator is for inference. Or it is not on CUDA.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4.
    """
    refuse_gradient("forward_", table, norm_weight, norm_bias, *weights, shift, wkv)
    return _forward_(ids, table, norm_weight, norm_bias, weights, shift, wkv, rows, cu_seqlens, last_only)


@torch.library.register_fake("cog_rwkv::forward_")
def _fake(
    ids: Tensor,
    table: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weights: Sequence[Tensor],
    shift: Tensor,
    wkv: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor | None = None,
    last_only: bool = True,
) -> Tensor:
    return shift.new_empty(rows.shape[0] if last_only else ids.shape[0], weights[-1].shape[0])
