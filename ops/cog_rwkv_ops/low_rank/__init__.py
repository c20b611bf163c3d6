"""low_rank: two thin matrix products with a function between them.

    out = f(x down^T) up^T + bias        f: none, tanh or sigmoid

The small multi-layer perceptrons of RWKV-7 that make decay, in-context learning rate, value mix and gate from the
token. Numbers as in `linear`; what lies between the two products stays in float32.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.low_rank import reference

_low_rank = operator("low_rank")


def low_rank(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x down^T) up^T + bias.

    Args:
        x: [N, C]; float32, float16 or bfloat16; CPU or CUDA.
        down: [D, C] on the device of `x`; float32, float16 or bfloat16, not necessarily the dtype of `x`.
        up: [M, D] in the dtype of `down`.
        bias: [M], float32, or None.
        activation: "none", "tanh" or "sigmoid".

    Returns:
        [N, M] in the dtype of `x`, rounded once. Differentiable in every tensor: the gradient is that of the definition
        in reference.py, which backward() computes again in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape, device or `activation` is wrong; the message names the argument.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4:
        loramlp.
    """
    return _low_rank(x, down, up, bias, activation)


@torch.library.register_fake("cog_rwkv::low_rank")
def _fake(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    torch._check(x.shape[1] == down.shape[1], lambda: f"cog_rwkv::low_rank: down has shape {down.shape}")
    torch._check(down.shape[0] == up.shape[1], lambda: f"cog_rwkv::low_rank: up has shape {up.shape}")
    return x.new_empty(x.shape[0], up.shape[0])


differentiate_definition("low_rank", reference.low_rank)
