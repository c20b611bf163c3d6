"""time_mix_prepare: what RWKV-7's time mix does with key, value and learning rate before the recurrence.

    a   = sigmoid(a)                                    in-context learning rate
    kk  = normalize(k * k_k) for each head of 64        removal key, L2 norm 1 (eps 1e-12)
    k   = k * (1 + (a - 1) * k_a)                       replacement key
    v   = v + (v_first - v) * sigmoid(v_mix)            value residual, from the second layer on

It gives (k, v, -kk, kk * a): the last two are `a` and `b` of `wkv7`. All arithmetic is float32.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.time_mix_prepare import reference

_time_mix_prepare = operator("time_mix_prepare")


def time_mix_prepare(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    v_first: Tensor | None = None,
    v_mix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Key, value and removal key of a time mix, from its projections.

    Args:
        k: key, [N, C], C a multiple of 64; float32, float16 or bfloat16; CPU or CUDA.
        v: value, like `k`.
        a: the learning rate before its sigmoid, like `k`.
        k_k: [C], float32: from the key to the removal key.
        k_a: [C], float32: how far the learning rate scales the key.
        v_first: the first layer's value, like `k`, or None in the first layer.
        v_mix: how far to go towards it, before its sigmoid, like `k`; given where `v_first` is.

    Returns:
        k, v, minus_kk and kk_a, all like `k`, all new tensors. Differentiable in every tensor: the gradient is that of
        the definition in reference.py, which backward() computes again in float32. Backward kernels of its own are not
        written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong, or only one of `v_first` and `v_mix` is given; the message
            names the argument.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        time mixing.
    """
    return _time_mix_prepare(k, v, a, k_k, k_a, v_first, v_mix)


@torch.library.register_fake("cog_rwkv::time_mix_prepare")
def _fake(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    k_k: Tensor,
    k_a: Tensor,
    v_first: Tensor | None = None,
    v_mix: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return k.new_empty(k.shape), k.new_empty(k.shape), k.new_empty(k.shape), k.new_empty(k.shape)


differentiate_definition("time_mix_prepare", reference.time_mix_prepare)
