"""host_scatter_: rows of a table in pinned host memory, written by the GPU over the bus.

    table[ids[i]] = values[i]

The way back of `host_gather`: states that leave the device, rows of an embedding that an optimizer has updated.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_host_scatter_ = operator("host_scatter_")


def host_scatter_(table: Tensor, ids: Tensor, values: Tensor) -> None:
    """Writes the rows of `values` to the rows of `table` that `ids` names.

    On a GPU this returns before the rows are written: synchronise the stream before the CPU reads them. Compiled by
    torch.compile's own backend the table is written in place as well; a backend that writes a copy cannot pin it.

    Args:
        table: [R, ...]; float32, float16, bfloat16 or float64; each row contiguous, the rows anywhere. For `ids` on a
            GPU it is pinned host memory (`Tensor.pin_memory()`), which must stay until the stream has run, or memory
            of that GPU; for `ids` on the CPU it is any CPU memory. **Updated in place.**
        ids: [N], int64, each another row; CPU or CUDA.
        values: [N, ...], the rows in the dtype of `table`, on the device of `ids`.

    Raises:
        RuntimeError: a dtype, shape or device is wrong, or `table` is not pinned; on the CPU also, an id is out of
            range or repeated. The message names the argument. On CUDA, where the host cannot look, a row that is not
            there is left out, and one that is named twice gets either of its values, or parts of both.
        NotImplementedError: an argument requires a gradient.

    Source: the CUDA indexing of pinned tensors in SpeedTorch (github.com/Santosh-Gupta/SpeedTorch).
    """
    refuse_gradient("host_scatter_", table, values)
    _host_scatter_(table, ids, values)


@torch.library.register_fake("cog_rwkv::host_scatter_")
def _fake(table: Tensor, ids: Tensor, values: Tensor) -> None:
    return None
