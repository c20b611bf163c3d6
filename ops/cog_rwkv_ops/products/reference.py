"""The definitions of `products` and `active_rows`, in plain PyTorch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "squared_relu": lambda y: y.relu().square(),
}


def products(
    x: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> list[Tensor]:
    """activation(x weight^T + bias) of each, in the dtype of the arguments (give float64 for a reference)."""
    sums = [one @ weight.T for one, weight in zip(x, weights, strict=True)]
    whole = [y if bias is None else y + bias for y, bias in zip(sums, biases, strict=True)]
    return [FUNCTIONS[name](y) for name, y in zip(activations, whole, strict=True)]


def active_rows(act: Tensor, value_t: Tensor) -> Tensor:
    """act value_t, in the dtype of the arguments."""
    return act @ value_t
