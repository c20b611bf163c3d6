"""The definition of `binary_activation` and of its gradient, in plain PyTorch."""

import torch
from torch import Tensor


def binary_activation(x: Tensor) -> Tensor:
    """sign(x): -1, 0 or 1, and NaN where x is NaN (torch.sign alone gives 0 there)."""
    return torch.where(torch.isnan(x), x, torch.sign(x))


def binary_activation_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The straight-through estimator: `gradient` where |x| <= 1, else 0."""
    return torch.where(x.abs() <= 1, gradient, torch.zeros_like(gradient))
