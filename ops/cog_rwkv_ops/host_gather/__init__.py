"""host_gather: rows of a table in pinned host memory, read by the GPU over the bus.

    out[i] = table[ids[i]]

A table that is too large for the device, or of which a step reads few rows, stays in host memory: no staging buffer,
no copy engine and no wait of the host, so it runs inside a CUDA graph. The plain way is index_select on the host and
a copy of what it gives. The GPU finds about a hundred million places of host memory a second, so many small rows are
read in the order in which they lie there.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_host_gather = operator("host_gather")
_host_gather_backward = operator("host_gather_backward")


def host_gather(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of `table` that `ids` names, on the device of `ids`.

    Args:
        table: [R, ...]; float32, float16, bfloat16 or float64; each row contiguous, the rows anywhere. For `ids` on a
            GPU it is pinned host memory (`Tensor.pin_memory()`), which must stay until the stream has run, or memory
            of that GPU; for `ids` on the CPU it is any CPU memory.
        ids: [N], int64; CPU or CUDA.

    Returns:
        [N, ...], contiguous, in the dtype of `table` and on the device of `ids`. Differentiable in `table`, to any
        order: the gradient lies where the table lies, in pinned memory for a pinned table, dense, and the sums over
        places that read one row are float32, in the order of the places. Its backward waits for the stream where it
        writes host memory, so it cannot be captured in a CUDA graph.

    Raises:
        RuntimeError: a dtype, shape or device is wrong, or `table` is not pinned; on the CPU also, an id is out of
            range. The message names the argument. On CUDA, where the host cannot look, such an id gives a row of NaN.

    Source: the CUDA indexing of pinned tensors in SpeedTorch (github.com/Santosh-Gupta/SpeedTorch).
    """
    return _host_gather(table, ids)


@torch.library.register_fake("cog_rwkv::host_gather")
def _fake(table: Tensor, ids: Tensor) -> Tensor:
    return ids.new_empty((ids.shape[0], *table.shape[1:]), dtype=table.dtype)


@torch.library.register_fake("cog_rwkv::host_gather_backward")
def _backward_fake(gradient: Tensor, sorted: Tensor, order: Tensor, rows: int, on_host: bool) -> Tensor:
    device = torch.device("cpu") if on_host else gradient.device
    return gradient.new_empty((rows, *gradient.shape[1:]), device=device)


def _keep_ids(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    table, ids = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.on_host = table.shape[0], table.device != ids.device


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (ids,) = ctx.saved_tensors
    sorted, order = ids.sort(stable=True)
    return _host_gather_backward(gradient, sorted, order, ctx.rows, ctx.on_host), None


def _keep_order(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, sorted, order, _, _ = inputs
    ctx.save_for_backward(sorted, order)


def _backward_of_backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient is linear: place order[i] gets row sorted[i] of what comes back. Rarely needed: plain PyTorch."""
    sorted, order = ctx.saved_tensors
    there = (sorted >= 0) & (sorted < outer.shape[0])
    table = torch.nn.functional.pad(outer.flatten(1), (0, 0, 0, 1))  # a row of zeros for ids without one
    ids = torch.where(there, sorted, outer.shape[0])[order.argsort()]
    rows = table.index_select(0, ids.to(table.device)).to(ids.device)
    return rows.view(len(ids), *outer.shape[1:]), None, None, None, None


torch.library.register_autograd("cog_rwkv::host_gather", _backward, setup_context=_keep_ids)
torch.library.register_autograd("cog_rwkv::host_gather_backward", _backward_of_backward, setup_context=_keep_order)
