"""The definition of `layer_norm`, in plain PyTorch."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row of `x` [N, C] less its mean, divided by its deviation, times `weight` [C] plus `bias` [C]."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias
