"""The definition of `time_mix_project`, in plain PyTorch."""

import torch
from torch import Tensor

from cog_rwkv_ops.linear.reference import linear


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
    """[7, N, C], or [6, N, C] without v1, v2 and v0, in the dtype of `x` (give float64 for a reference)."""
    x_r, x_w, x_k, x_v, x_a, x_g = x.unbind(0)
    out = [
        linear(x_r, receptance),
        linear(x_k, key),
        linear(x_v, value),
        linear(linear(x_w, w1).tanh(), w2, w0),
        linear(linear(x_a, a1), a2, a0),
        linear(linear(x_g, g1).sigmoid(), g2),
    ]
    if v1 is not None and v2 is not None:
        out.append(linear(linear(x_v, v1), v2, v0))
    return torch.stack(out)
