"""time_mix_project: everything that RWKV-7's time mix makes from a token by matrices, in one call.

    r, k, v = W_r x_r, W_k x_k, W_v x_v
    w = w0 + W_w2 tanh(W_w1 x_w)        the raw decay
    a = a0 + W_a2 W_a1 x_a              the in-context learning rate, before its sigmoid
    g = W_g2 sigmoid(W_g1 x_g)          the gate
    m = v0 + W_v2 W_v1 x_v              how much of the first layer's value to mix in, before its sigmoid

Numbers as in `linear`; what lies between the two halves of a low-rank projection stays in float32.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.time_mix_project import reference

_time_mix_project = operator("time_mix_project")


def time_mix_project(
    x: Tensor,
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    w1: Tensor,
    w2: Tensor,
    w0: Tensor,
    a1: Tensor,
    a2: Tensor,
    a0: Tensor,
    g1: Tensor,
    g2: Tensor,
    v1: Tensor | None = None,
    v2: Tensor | None = None,
    v0: Tensor | None = None,
) -> Tensor:
    """The seven projections of a time mix; six without v1, v2 and v0, as in the first layer.

    Args:
        x: [6, N, C], the mixes x_r, x_w, x_k, x_v, x_a, x_g of N tokens; float32, float16 or bfloat16; CPU or CUDA.
        receptance: [C, C]; float32, float16 or bfloat16, not necessarily the dtype of `x`. On the CPU also what
            `pack_bfloat16` makes of a bfloat16 one.
        key: like `receptance`.
        value: like `receptance`.
        w1: [D, C]; float32, float16 or bfloat16. D is the rank, another one for each of the pairs.
        w2: [C, D] in the dtype of `w1`.
        w0: [C], float32.
        a1, a2, a0: likewise.
        g1, g2: likewise.
        v1, v2, v0: likewise, or all three None.

    Returns:
        [7, N, C] in the dtype of `x`, rounded once: r, k, v, w, a, g, m; [6, N, C] without m. Differentiable in every
        tensor but packed ones: the gradient is that of the definition in reference.py, which backward() computes again
        in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4.
    """
    return _time_mix_project(x, receptance, key, value, w1, w2, w0, a1, a2, a0, g1, g2, v1, v2, v0)


@torch.library.register_fake("cog_rwkv::time_mix_project")
def _fake(x: Tensor, *weights: Tensor | None) -> Tensor:
    last = weights[13] if len(weights) > 13 else None
    return x.new_empty(6 if last is None else 7, *x.shape[1:])


differentiate_definition("time_mix_project", reference.time_mix_project)
