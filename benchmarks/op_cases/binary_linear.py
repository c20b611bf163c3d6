"""binary_linear_packed beside a float16 product, packing x included; and the gradients beside their definition."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, numbers, relative_error
from cog_rwkv_ops.binary_linear import reference

OPERATORS = ("binary_linear",)
HALF = torch.float16
COPIES = 8  # of the weight: what is read was not read just now
SIZES = [(1, 4096), (1, 8192), (8, 8192), (32, 8192), (256, 8192), (1, 2560)]  # N, K = M


def gradients(function: Callable[..., Tensor], x: Tensor, weight: Tensor, incoming: Tensor) -> Callable[[], object]:
    """The backward of one call."""
    inputs = [t.detach().requires_grad_() for t in (x, weight)]
    return partial(torch.autograd.grad, function(*inputs), inputs, incoming, retain_graph=True)


def backward_error(x: Tensor, weight: Tensor, incoming: Tensor) -> float:
    """Of the gradient of the weight, against the definition in float32."""
    right = gradients(reference.binary_linear, x.float(), weight.float(), incoming.float())()[1]  # type: ignore[index]
    return relative_error(gradients(ops.binary_linear, x, weight, incoming)()[1], right)  # type: ignore[index]


def forward_error(x: Tensor, weight: Tensor) -> float:
    """Of the packed form, against the definition in float32."""
    right = reference.binary_linear(x.float(), weight)
    return relative_error(ops.binary_linear_packed(x, *ops.pack_signs(weight)), right)


def cases(op: str) -> Iterator[Case]:
    """Decoding sizes, some batches, and one step of training."""
    for n, k in SIZES:
        weights = [numbers(k, k, dtype=HALF, seed=i) for i in range(COPIES)]
        packed = [ops.pack_signs(weight) for weight in weights]
        x = numbers(n, k, dtype=HALF, seed=99)
        yield Case(
            op=op,
            backward=False,
            dtype=HALF,
            shape=f"N={n} K=M={k}",
            ours=[partial(ops.binary_linear_packed, x, *pair) for pair in packed],
            peers={"float16 matmul": [partial(torch.nn.functional.linear, x, weight) for weight in weights]},
            error=partial(forward_error, x, weights[0]),
            bound=1e-3,
            bytes=k * k // 8 + 4 * k + 2 * 2 * n * k,
        )
    n, k = 1024, 4096
    given = numbers(n, k, dtype=HALF, seed=1), numbers(k, k, dtype=HALF, seed=2), numbers(n, k, dtype=HALF, seed=3)
    yield Case(
        op=op,
        backward=True,
        dtype=HALF,
        shape=f"N={n} K=M={k}",
        ours=[gradients(ops.binary_linear, *given)],
        peers={"the definition in PyTorch": [gradients(reference.binary_linear, *given)]},
        error=partial(backward_error, *given),
        bound=2e-3,
        flops=2 * 2.0 * n * k * k,
        rate="float16",
        graph=False,
    )
