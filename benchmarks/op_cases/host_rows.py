"""host_gather and host_scatter_ beside the two plain ways: through the host's index_select, and the bus's best copy."""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, numbers

OPERATORS = ("host_gather", "host_scatter_")
TABLE = 1 << 30  # bytes, far more than any cache
# Bytes of a row, rows of a call.
SIZES = [
    *((64, 1024), (64, 8192), (64, 65536), (64, 1 << 20), (256, 65536), (512, 65536), (1024, 32768)),
    *((8192, 1), (8192, 32), (8192, 320), (8192, 16384)),
]


def on_host(table: Tensor, ids: Tensor) -> Callable[[], Tensor]:
    """index_select on the host into pinned memory, and a copy of what it gives; the ids are there already."""
    here = ids.cpu()
    staging = torch.empty(len(ids), table.shape[1], dtype=table.dtype).pin_memory()

    def call() -> Tensor:
        torch.index_select(table, 0, here, out=staging)
        out = staging.to("cuda", non_blocking=True)
        torch.cuda.current_stream().synchronize()  # the next call writes the staging buffer
        return out

    return call


def back_on_host(table: Tensor, ids: Tensor, values: Tensor) -> Callable[[], None]:
    """A copy to the host, and index_copy_ there."""
    here = ids.cpu()
    staging = torch.empty(values.shape, dtype=values.dtype).pin_memory()

    def call() -> None:
        staging.copy_(values)
        table.index_copy_(0, here, staging)

    return call


def gathered(table: Tensor, ids: Tensor) -> float:
    """0 where every row is right."""
    return float(not torch.equal(ops.host_gather(table, ids).cpu(), table[ids.cpu()]))


def scattered(table: Tensor, ids: Tensor, values: Tensor) -> float:
    """0 where every row has arrived."""
    ops.host_scatter_(table, ids, values)
    torch.cuda.synchronize()
    return float(not torch.equal(table[ids.cpu()], values.cpu()))


@cache
def whole_table() -> Tensor:
    """Random float16 numbers in pinned memory, made once for both operators."""
    return torch.randn(TABLE // 2, generator=torch.Generator().manual_seed(0)).to(torch.float16).pin_memory()


def cases(op: str) -> Iterator[Case]:
    """Random rows, each another, of a table of 1 GiB. The host takes part in the peers, so its clock tells the time."""
    random = torch.Generator("cuda").manual_seed(1)
    for row, count in SIZES:
        table = whole_table().view(-1, row // 2)
        sets = [torch.randperm(len(table), generator=random, device="cuda")[:count].clone() for _ in range(4)]
        values = numbers(count, row // 2, dtype=torch.float16, seed=1)
        block, on_device = table[:count], torch.empty_like(values)
        size = partial(
            Case,
            op=op,
            backward=False,
            dtype=torch.float16,
            shape=f"row={row}B N={count}",
            bound=0.0,
            bus_bytes=row * count,
            graph=False,
        )
        if op == "host_gather":
            yield size(
                ours=[partial(ops.host_gather, table, ids) for ids in sets],
                peers={
                    "index_select on the host + copy": [on_host(table, ids) for ids in sets],
                    "contiguous pinned copy": [partial(on_device.copy_, block, non_blocking=True)],
                },
                error=partial(gathered, table, sets[0]),
            )
        else:
            yield size(
                ours=[partial(ops.host_scatter_, table, ids, values) for ids in sets],
                peers={
                    "copy + index_copy_ on the host": [back_on_host(table, ids, values) for ids in sets],
                    "contiguous pinned copy": [partial(block.copy_, values, non_blocking=True)],
                },
                error=partial(scattered, table, sets[0], values),
            )
