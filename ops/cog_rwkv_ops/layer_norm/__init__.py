"""layer_norm: out[n] = (x[n] - mean(x[n])) / sqrt(variance(x[n]) + eps) * weight + bias.

The mean and the (biased) variance of a row are taken in float32, in two passes, in a fixed order.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.layer_norm import reference

_layer_norm = operator("layer_norm")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last dimension.

    Args:
        x: [N, C]; float32, float16 or bfloat16; CPU or CUDA.
        weight: [C], float32, on the device of `x`.
        bias: [C], float32, on the device of `x`.
        eps: added to the variance.

    Returns:
        [N, C] in the dtype of `x`. Differentiable in every tensor: the gradient is that of the definition in
        reference.py, which backward() computes again in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
    """
    return _layer_norm(x, weight, bias, eps)


@torch.library.register_fake("cog_rwkv::layer_norm")
def _fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return x.new_empty(x.shape)


differentiate_definition("layer_norm", reference.layer_norm)
