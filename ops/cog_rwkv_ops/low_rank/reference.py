"""The definition of `low_rank`, in plain PyTorch."""

from torch import Tensor


def low_rank(x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x down^T) up^T + bias, in the dtype of `x` (give float64 for a reference)."""
    hidden = x @ down.to(x.dtype).T
    hidden = {"none": lambda h: h, "tanh": lambda h: h.tanh(), "sigmoid": lambda h: h.sigmoid()}[activation](hidden)
    out = hidden @ up.to(x.dtype).T
    return out if bias is None else out + bias
