"""A step of sampling in PyTorch's own operators, about fifty launches of them: what `cog_rwkv_ops.sample_` does in one.

For CUDA, where `COG_RWKV_KERNELS` is plain. The same definition (its docstring), the same tables; exp
is PyTorch's and differs in its last bit, so where a draw falls within 1e-7 of a boundary it may take the neighbour.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model.sampling import SamplingParams


@dataclass(frozen=True)
class Tables:
    """What `cog_rwkv_ops.sample_` takes beside logits and rows; on one device, ``rows`` of each."""

    allowed: Tensor  # bool [V]
    numbers: Tensor  # float32 [rows, 5]
    integers: Tensor  # int64 [rows, 4]
    counts: Tensor  # float32 [rows, V]
    first: int  # an id that is allowed


@dataclass(frozen=True)
class Uses:
    """What any row asks for. It spares time and changes no result: each step is exact where a row does not ask."""

    drawn: bool
    penalised: bool
    top_k: bool
    top_p: bool

    @staticmethod
    def of(params: Iterable["SamplingParams | None"]) -> "Uses":
        """Of the rows that are in use."""
        there = [one for one in params if one is not None]
        return Uses(
            drawn=not all(one.greedy for one in there),
            penalised=any(one.penalised for one in there),
            top_k=any(one.top_k > 1 for one in there),
            top_p=any(one.top_p < 1 for one in there),
        )


def sample(logits: Tensor, rows: Tensor, tables: Tables, uses: Uses) -> tuple[Tensor, Tensor]:
    """``Sampler.sample``; writes ``tables.integers`` and ``tables.counts``."""
    if not len(rows):
        return rows.clone(), rows.bool()
    parts = zip(logits.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True)
    ids, finite = zip(*(_sample(*part, tables, uses) for part in parts), strict=True)
    return torch.cat(ids), torch.cat(finite)


def _sample(logits: Tensor, rows: Tensor, tables: Tables, uses: Uses) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    finite = logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()
    logits = torch.where(tables.allowed, logits, -torch.inf)
    row = _Row(tables.numbers[rows], tables.integers[rows])
    counts = tables.counts[rows] if uses.penalised else None
    if counts is not None:
        logits -= row.presence * counts.sign() + row.frequency * counts
    top, ids = logits.max(dim=1)  # of several largest ones the first
    if uses.drawn:
        ids = torch.where(row.greedy, ids, _draw(logits.sub_(top[:, None]), row, uses))
    ids = torch.where(finite, ids, tables.first)
    if counts is not None:
        tables.counts[rows] = counts.mul_(row.decay).scatter_add_(1, ids[:, None], torch.ones_like(row.decay))
    tables.integers[rows, 3] = row.draws + 1
    return ids, finite


def _draw(below: Tensor, row: "_Row", uses: Uses) -> Tensor:
    """Ids int64 [B] by the inverse of the cumulated weights. ``below`` [B, V]: logits less the row's largest; it
    is written over. A row that is not finite gets some id from 0 to V - 1."""
    # Floats of one sign are ordered as their bits are: a key is the larger, the likelier its id is.
    keys = below.abs().view(torch.int32).neg_().add_(_INFINITY).clamp_(min=0)
    weights = below.div_(row.temperature).exp_().mul_(SCALE).nan_to_num_(nan=0.0).to(torch.int64)
    if uses.top_k:
        weights &= _at_least(keys, _threshold(keys, weights.new_ones(1, 1).expand_as(weights), row.top_k))
    if uses.top_p:
        total = weights.sum(dim=1)
        share = torch.ceil(row.top_p * total).to(torch.int64).clamp_(min=1)
        weights &= _at_least(keys, _threshold(keys, weights, torch.minimum(share, total)))
    sums = weights.cumsum(dim=1)
    total = sums[:, -1]
    at = (uniform(row.key, row.draws) * total.double()).to(torch.int64)
    return torch.searchsorted(sums, torch.minimum(at, total - 1)[:, None], right=True)[:, 0]


ROWS_AT_ONCE = 128  # bounds the memory for intermediate results; rows are independent, so it shows nowhere else
SCALE = 2.0**44  # the weight of the most likely id; 2^17 of them still add up below 2^63
_INFINITY = 0x7F800000  # the bits of float32 infinity
_GOLDEN, _MIX_1, _MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # signed


class _Row:
    """The parameters of the batch's rows, taken apart: [B] beside sums, float32 [B, 1] beside logits."""

    def __init__(self, numbers: Tensor, integers: Tensor) -> None:
        self.temperature, self.presence, self.frequency, self.decay, top_p = numbers.split(1, dim=1)
        self.top_p = top_p[:, 0].double()
        greedy, self.top_k, self.key, self.draws = integers.unbind(1)
        self.greedy = greedy.bool()


def _threshold(keys: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    """The largest key at and above which the amounts add up to ``wanted``, as int32 [B, 1].

    keys int32 [B, V], 0 to 0x7F800000; amounts int64 [B, V]; wanted int64 [B], 1 to the sum of all. By a histogram of
    each digit from the highest.
    """
    spare = (amounts.sum(dim=1) - wanted)[:, None]  # what may lie below
    found = torch.zeros_like(spare, dtype=torch.int32)
    for shift, size in ((20, 2048), (10, 1024), (0, 1024)):
        digits = keys >> shift
        sums = _histogram(digits & (size - 1), amounts, size)
        digit = torch.searchsorted(sums, spare, right=True)
        spare = spare - torch.where(digit > 0, sums.gather(1, (digit - 1).clamp_(min=0)), 0)
        found = found * size + digit.to(torch.int32)
        # Of the others' amounts nothing is left. Bits are many times faster here than a mask of bool.
        amounts = amounts & digits.bitwise_xor_(found).sub_(1).bitwise_right_shift_(31).long()
    return found


def _at_least(keys: Tensor, threshold: Tensor) -> Tensor:
    """int64 [B, V]: all ones where the key is the threshold or more, else zero."""
    return (threshold - 1 - keys).bitwise_right_shift_(31).long()


def _histogram(bins: Tensor, amounts: Tensor, size: int) -> Tensor:
    """Cumulated sums of the amounts by bin, int64 [B, size]."""
    sums = torch.zeros(len(bins), size, dtype=torch.int64, device=bins.device)
    return sums.scatter_add_(1, bins.long(), amounts).cumsum_(dim=1)


def uniform(key: Tensor, draws: Tensor) -> Tensor:
    """Number ``draws`` of the stream that ``key`` begins: float64, uniform in [0, 1), 53 bits. Both int64.

    SplitMix64 (Steele, Lea and Flood, 2014), begun at a mixed seed so that neighbouring seeds share nothing.
    """
    return _shifted(_mix(key + (draws + 1) * _GOLDEN), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right without copies of the sign, which torch has for signed integers only."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
