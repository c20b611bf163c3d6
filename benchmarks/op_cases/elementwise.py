"""add, swish and binary_activation beside a device copy of as many bytes, and beside torch.compile.

The backward of add hands its gradient on and moves nothing, so it has no row.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, compiled, numbers, relative_error
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.add.reference import add
from cog_rwkv_ops.binary_activation.reference import binary_activation, binary_activation_backward
from cog_rwkv_ops.swish.reference import swish, swish_backward

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTES = 256 << 20  # of one buffer
SETS = 3
Function = Callable[..., Tensor]

# Of each operator: whether it is a backward, our call, the definition, how many inputs.
PASSES: dict[str, list[tuple[bool, Function, Function, int]]] = {
    "add": [(False, ops.add, add, 2)],
    "swish": [(False, ops.swish, swish, 1), (True, operator("swish_backward"), swish_backward, 2)],
    "binary_activation": [
        (False, ops.binary_activation, binary_activation, 1),
        (True, operator("binary_activation_backward"), binary_activation_backward, 2),
    ],
}
OPERATORS = tuple(PASSES)


def copies(bytes_moved: int) -> list[Callable[[], object]]:
    """Copies that read half of ``bytes_moved`` and write the other half."""
    pairs = [torch.empty(2, bytes_moved // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(SETS)]
    return [partial(to.copy_, source) for to, source in pairs]


def error(call: Function, definition: Function, given: list[Tensor]) -> float:
    """Of the first elements, an odd number."""
    few = [t[:100_003] for t in given]
    return relative_error(call(*few), definition(*few))


def cases(op: str) -> Iterator[Case]:
    """Its passes in every dtype, on buffers of 256 MiB."""
    for dtype in DTYPES:
        size = BYTES // dtype.itemsize
        for backward, call, definition, count in PASSES[op]:
            sets = [[numbers(size, dtype=dtype, seed=8 * s + i) for i in range(count)] for s in range(SETS)]
            peer = compiled(definition)
            moved = (count + 1) * BYTES
            yield Case(
                op=op,
                backward=backward,
                dtype=dtype,
                shape=f"N={size}",
                ours=[partial(call, *given) for given in sets],
                peers={
                    "device copy": copies(moved),
                    "torch.compile": [partial(peer, *given) for given in sets],
                },
                error=partial(error, call, definition, sets[0]),
                bound=2 * torch.finfo(dtype).eps,
                bytes=moved,
            )
