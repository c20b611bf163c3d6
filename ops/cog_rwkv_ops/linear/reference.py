"""The definition of `linear`, in plain PyTorch."""

import torch
from torch import Tensor

from cog_rwkv_ops.pack_bfloat16 import unpack_bfloat16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, in the widest dtype among the arguments (give float64 for a reference)."""
    matrix = unpack_bfloat16(weight) if weight.dtype == torch.uint8 else weight
    out = x @ matrix.to(x.dtype).T
    return out if bias is None else out + bias
