"""The definition of `squared_relu` and `squared_relu_linear`, in plain PyTorch."""

from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, elementwise."""
    return x.relu().square()


def squared_relu_linear(k: Tensor, weight_t: Tensor) -> Tensor:
    """relu(k)^2 weight_t, in the dtype of `k` (give float64 for a reference)."""
    return squared_relu(k) @ weight_t.to(k.dtype)
