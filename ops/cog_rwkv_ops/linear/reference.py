"""The definition of `linear`, in plain PyTorch."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, in the widest dtype among the arguments (give float64 for a reference)."""
    out = x @ weight.to(x.dtype).T
    return out if bias is None else out + bias
