"""sample_: a step of sampling, from the logits of a batch of sequences to an id of each.

    value[i]  = logit[i] - presence (count[i] > 0) - frequency count[i]
    weight[i] = floor(2^44 exp((value[i] - max value) / temperature))
    id        = the first one whose cumulated weight, over the ids that stay, is more than u sum(weight)

Of the ids that are allowed those stay whose value is among the top_k largest, and of these those whose weight is among
the fewest of the largest that reach top_p of the sum; whoever ties with the last one stays. u is number `draws` of the
stream of SplitMix64 that begins with `key`. Afterwards count *= decay, count[id] += 1, draws += 1.

Weights are integers, whose sums are exact in any order, and each operation on floats is rounded once, in one order: a
row's id depends on its logits and its parameters alone, not on its neighbours, and the CPU and a GPU give the same.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_sample_ = operator("sample_")


def sample_(
    logits: Tensor, rows: Tensor, allowed: Tensor, numbers: Tensor, integers: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """One id for each sequence. One launch on CUDA, and nothing is waited for.

    Args:
        logits: [B, V], V at most 2^18; float32, float16 or bfloat16; CPU or CUDA. Not changed.
        rows: [B], int64: sequence i has the row rows[i] of the three tables. Each another row.
        allowed: [V], bool: the ids that may be drawn.
        numbers: [R, 5], float32: temperature (above 0), presence and frequency penalty, decay, top_p. A top_p of 1 or
            more keeps all.
        integers: [R, 4], int64, each row contiguous: whether the likeliest id is taken (the lowest of those that tie),
            top_k (V or more, or less than 1, keeps all), key, draws. **draws is updated in place.**
        counts: [R, V], float32, each row contiguous. **Updated in place** in rows that have a penalty; not read in
            others.

    Returns:
        ids, int64 [B], and bool [B]: false where a logit is NaN or infinite, allowed or not, or where no id is allowed.
        The id of such a row means nothing: it is one that is allowed, or 0 where none is. It counts as drawn.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; on the CPU also, a row is out of range or repeated. The message
            names the argument. On CUDA, where the host cannot look, a sequence whose row is out of range gets id 0 and
            false, and changes nothing.
        NotImplementedError: an argument requires a gradient: this operator is for inference.

    Source: the penalties of the chat program of github.com/BlinkDL/RWKV-LM; Holtzman et al., "The Curious Case of
        Neural Text Degeneration", 2019 (arXiv:1904.09751): top_p; Steele, Lea and Flood, "Fast Splittable Pseudorandom
        Number Generators", 2014: SplitMix64.
    """
    refuse_gradient("sample_", logits, numbers, counts)
    ids, finite = _sample_(logits, rows, allowed, numbers, integers, counts)
    return ids, finite


@torch.library.register_fake("cog_rwkv::sample_")
def _fake(
    logits: Tensor, rows: Tensor, allowed: Tensor, numbers: Tensor, integers: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), allowed.new_empty(rows.shape)
