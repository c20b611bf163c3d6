"""The definition of `host_scatter_`, in plain PyTorch."""

from torch import Tensor


def host_scatter_(table: Tensor, ids: Tensor, values: Tensor) -> None:
    """Row ids[i] of `table` becomes row i of `values`; ids without a row are left out."""
    there = (ids >= 0) & (ids < table.shape[0])
    table.index_copy_(0, ids[there].to(table.device), values[there].to(table.device))
