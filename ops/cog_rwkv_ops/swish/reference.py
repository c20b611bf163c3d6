"""The definition of `swish` and of its derivative, in plain PyTorch."""

import torch
from torch import Tensor


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in float32 for the half precisions and rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def swish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient * d swish(x) / dx, computed in float32 for the half precisions and rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    s = torch.sigmoid(wide)
    return (gradient.to(wide.dtype) * (s * (1 + wide * (1 - s)))).to(x.dtype)
