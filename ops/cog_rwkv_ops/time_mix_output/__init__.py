"""time_mix_output: what RWKV-7's time mix does between the recurrence and the output projection.

    out = (group_norm(y) * weight + bias + (sum over the head of r * k * r_k) * v) * g

One group is a head of 64. The second term is the bonus: what the current token adds by itself. All arithmetic is
float32.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.time_mix_output import reference

_time_mix_output = operator("time_mix_output")


def time_mix_output(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 64e-5,
) -> Tensor:
    """Group norm, bonus and gate.

    Args:
        y: what `wkv7` gave, [N, C], C a multiple of 64; float32, float16 or bfloat16; CPU or CUDA.
        r: receptance, like `y`.
        k: key, as it went into `wkv7`, like `y`.
        v: value, likewise.
        g: gate, like `y`.
        r_k: [C], float32: the bonus of each channel.
        weight: [C], float32: of the group norm.
        bias: [C], float32: of the group norm.
        eps: added to a head's variance.

    Returns:
        [N, C] in the dtype of `y`. Differentiable in every tensor: the gradient is that of the definition in
        reference.py, which backward() computes again in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        time mixing. Group norm: Wu, He, 2018 (arXiv:1803.08494).
    """
    return _time_mix_output(y, r, k, v, g, r_k, weight, bias, eps)


@torch.library.register_fake("cog_rwkv::time_mix_output")
def _fake(
    y: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 64e-5,
) -> Tensor:
    return y.new_empty(y.shape)


differentiate_definition("time_mix_output", reference.time_mix_output)
