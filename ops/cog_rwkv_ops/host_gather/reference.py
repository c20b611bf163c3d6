"""The definition of `host_gather` and of its gradient, in plain PyTorch."""

import torch
from torch import Tensor


def host_gather(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of `table` by number, on the device of `ids`; NaN where there is no such row."""
    there = (ids >= 0) & (ids < table.shape[0])
    rows = table.index_select(0, ids[there].to(table.device)).to(ids.device)
    out = torch.full((len(ids), *table.shape[1:]), float("nan"), dtype=table.dtype, device=ids.device)
    out[there] = rows
    return out


def host_gather_backward(gradient: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The sum, for each of `rows` rows of the table, of the gradients of the places that read it."""
    there = (ids >= 0) & (ids < rows)
    out = gradient.new_zeros((rows, *gradient.shape[1:]))
    return out.index_add(0, ids[there], gradient[there])
