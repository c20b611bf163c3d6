"""The definition of `binary_linear`, in plain PyTorch, differentiable by its straight-through estimators."""

import torch
from torch import Tensor


def sign(x: Tensor) -> Tensor:
    """1 where x >= 0, else -1; the gradient passes where |x| <= 1."""
    hard = torch.where(x >= 0, 1.0, -1.0).to(x.dtype)
    through = torch.where(x.abs() <= 1, x, x.detach())
    return hard + (through - through.detach())


def binary_linear(x: Tensor, weight: Tensor) -> Tensor:
    """sign(x) (mean |weight| sign(weight))^T, computed in the dtype of `x` (give float64 for a reference)."""
    wide = weight.to(x.dtype)
    scale = wide.abs().mean(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    return sign(x) @ (scale[:, None] * sign(wide)).T


def pack_signs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The signs of each row, 32 a word, and the mean of its magnitudes."""
    rows, k = weight.shape
    bits = torch.zeros(rows, -(-k // 128) * 128, dtype=torch.int64, device=weight.device)
    bits[:, :k] = weight >= 0
    words = (bits.view(rows, -1, 32) << torch.arange(32, device=weight.device)).sum(-1)
    scale = weight.double().abs().sum(1) / max(k, 1)
    return words.to(torch.int32), scale.float()
