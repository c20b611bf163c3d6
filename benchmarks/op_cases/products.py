"""The groups of products of one layer of the 7.2b and the 0.4b model, and the head, beside cuBLAS one by one.

The weights of a call were not read just now. Bytes a second: "of the floor" times the device copy's.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, numbers, relative_error, sets_for

OPERATORS = ("products", "active_rows")
HALF = torch.float16
C, FFN, VOCABULARY = 4096, 16384, 65536
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 320, 960, 4096]
MANY = 65  # from so many tokens on, the small model too; and the value product, whose weights lie by columns
Sizes = list[tuple[int, int]]  # M, K of each product


def groups(c: int, ffn: int, ranks: Sequence[int]) -> dict[str, Sizes]:
    """The products of a layer of `c` channels."""
    return {
        "r, k, v, low ranks in": [(c, c)] * 3 + [(rank, c) for rank in ranks],
        "low ranks out": [(c, rank) for rank in ranks],
        "output": [(c, c)],
        "key": [(ffn, c)],
        "value": [(c, ffn)],
    }


LARGE = groups(C, FFN, (128, 128, 480, 96)) | {"head": [(VOCABULARY, C)]}
SMALL = groups(1024, 4096, (64, 64, 128, 32))
ACTIVE = 0.12  # of the neurons of the channel mix, for a token


def one_by_one(x: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """What PyTorch has for it."""
    return [torch.nn.functional.linear(one, weight) for one, weight in zip(x, weights, strict=True)]


def products_error(x: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """The largest of a group."""
    right = [one.float() @ weight.float().T for one, weight in zip(x, weights, strict=True)]
    return max(relative_error(a, b) for a, b in zip(ops.products(x, weights), right, strict=True))


def weights_of(name: str, sizes: Sizes) -> list[list[Tensor]]:
    """As many sets as it takes that none is in the cache."""
    sets = []
    for s in range(sets_for(sum(2 * m * k for m, k in sizes), most=64)):
        one = [numbers(m, k, dtype=HALF, seed=100 * s + i, scale=k**-0.5) for i, (m, k) in enumerate(sizes)]
        sets.append([weight.T.contiguous().T for weight in one] if name == "value" else one)
    return sets


def product_case(model: str, name: str, sizes: Sizes, sets: list[list[Tensor]], n: int) -> Case:
    """A group at a number of tokens."""
    x = [numbers(n, k, dtype=HALF, seed=1000 + i) for i, (_, k) in enumerate(sizes)]
    return Case(
        op="products",
        backward=False,
        dtype=HALF,
        shape=f"{model} {name} N={n}".strip(),
        ours=[partial(ops.products, x, weights) for weights in sets],
        peers={"cuBLAS, one by one": [partial(one_by_one, x, weights) for weights in sets]},
        error=partial(products_error, x, sets[0]),
        bound=1e-3,
        bytes=sum(2 * (m * k + n * (m + k)) for m, k in sizes),
        flops=sum(2 * n * m * k for m, k in sizes),
        rate="float16",
    )


def product_cases() -> Iterator[Case]:
    """Every group at every number of tokens; of the head, the logits of a batch."""
    for model, of_model in (("", LARGE), ("0.4b", SMALL)):
        for name, sizes in of_model.items():
            sets = weights_of(name, sizes)
            for n in ROWS:
                if (n < MANY and (model or name == "value")) or (n > 512 and name == "head"):
                    continue
                yield product_case(model, name, sizes, sets, n)


def active_error(act: Tensor, value_t: Tensor) -> float:
    """Against float32."""
    return relative_error(ops.active_rows(act, value_t), act.float() @ value_t.float())


def active_cases() -> Iterator[Case]:
    """The value product of the channel mix: the floor is the rows that are active for any token."""
    sets = [numbers(FFN, C, dtype=HALF, seed=i, scale=FFN**-0.5) for i in range(sets_for(FFN * C // 4))]
    for n in (1, 2, 4, 8, 16):
        drawn = torch.rand(n, FFN, generator=torch.Generator("cuda").manual_seed(n), device="cuda")
        act = numbers(n, FFN, dtype=HALF, seed=n) * (drawn < ACTIVE)
        rows = int((act != 0).any(0).sum())
        yield Case(
            op="active_rows",
            backward=False,
            dtype=HALF,
            shape=f"N={n} of 16384 rows {rows}",
            ours=[partial(ops.active_rows, act, value_t) for value_t in sets],
            peers={"cuBLAS, all rows": [partial(torch.matmul, act, value_t) for value_t in sets]},
            error=partial(active_error, act, sets[0]),
            bound=1e-3,
            bytes=2 * rows * C,
        )


def cases(op: str) -> Iterator[Case]:
    """`benchmarks/ops.py --cases products` measures these, in less than a minute."""
    return product_cases() if op == "products" else active_cases()
