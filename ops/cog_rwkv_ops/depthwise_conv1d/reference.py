"""The definition of `depthwise_conv1d`, in plain PyTorch."""

import torch
from torch import Tensor


def depthwise_conv1d(w: Tensor, k: Tensor, eps: float = 0.0) -> Tensor:
    """eps + the causal convolution of each channel, in the dtype of `k` (give float64 for a reference)."""
    size = w.shape[1]
    if size == 0:
        return k.clone()
    # Row t of the matrix of a channel: w from place T - 1 - t on, zeros behind t.
    lag = torch.arange(size)[:, None] - torch.arange(size)
    matrix = torch.where(lag.to(w.device) >= 0, w[:, (size - 1 - lag).clamp(0, size - 1)], 0.0)
    return eps + torch.einsum("ctu,bcu->bct", matrix, k)
