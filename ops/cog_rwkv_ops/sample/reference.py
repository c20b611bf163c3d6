"""The definition of `sample_`, in plain PyTorch and float64: weights are numbers, not integers, and the ids sorted."""

import torch
from torch import Tensor

BITS = 2**64


def sample_(
    logits: Tensor, rows: Tensor, allowed: Tensor, numbers: Tensor, integers: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """ids int64 [B] and whether a row is finite, bool [B]; `integers` and `counts` are updated in place."""
    out = [_row(logits[i], allowed, numbers[row], integers[row], counts[row]) for i, row in enumerate(rows.tolist())]
    ids, finite = zip(*out, strict=True) if out else ((), ())
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(finite, dtype=torch.bool)


def _row(logits: Tensor, allowed: Tensor, numbers: Tensor, integers: Tensor, counts: Tensor) -> tuple[int, bool]:
    finite = bool(logits.isfinite().all() and allowed.any())
    presence, frequency, decay = numbers[1:4].tolist()
    id_ = int(allowed.byte().argmax())
    if finite:
        greedy, _, key, draws = integers.tolist()
        value, probability = distribution(logits, allowed, numbers, integers, counts)
        id_ = int(value.argmax()) if greedy else int((probability.cumsum(0) <= uniform(key, draws)).sum())
    integers[3] += 1
    if presence or frequency:
        counts *= decay
        counts[id_] += 1
    return id_, finite


def distribution(
    logits: Tensor, allowed: Tensor, numbers: Tensor, integers: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The values of a row, and what each id's chance is in a draw; float64 [V] both."""
    temperature, presence, frequency, _, top_p = numbers.double().tolist()
    value = logits.double()
    if presence or frequency:
        value = value - presence * (counts > 0) - frequency * counts.double()
    value = value.masked_fill(~allowed, -torch.inf)
    kept, top_k = value, int(integers[1])
    if 0 < top_k < len(value):
        kept = kept.masked_fill(value < value.sort(descending=True).values[top_k - 1], -torch.inf)
    if top_p < 1:
        ordered = kept.sort(descending=True).values
        reached = (ordered / temperature).softmax(0).cumsum(0) < top_p
        kept = kept.masked_fill(value < ordered[min(int(reached.sum()), len(value) - 1)], -torch.inf)
    return value, (kept / temperature).softmax(0)


def uniform(key: int, draws: int) -> float:
    """Number `draws` of the stream of SplitMix64 that begins with `key`, in [0, 1)."""
    x = (key + (draws + 1) * 0x9E3779B97F4A7C15) % BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % BITS
    return ((x ^ x >> 31) >> 11) / 2**53
