"""Logits to ids on the model's device: a batch of rows, each with parameters and a stream of random numbers of its own.

A row's ids depend on its logits, its parameters and how many ids it has drawn before, and on nothing else: weights are
64-bit integers, whose sums are exact in any order, and the random numbers are a function of seed and count. So row
number, neighbours and batch size never show, bit for bit. There is no loop over rows and no wait for the device.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How the ids of one sequence are drawn; the steps are taken in this order.

    1. Penalties: ``logit[i] -= presence_penalty * (count[i] > 0) + frequency_penalty * count[i]``. ``count`` starts at
       zero; after each draw every count is multiplied by ``penalty_decay``, then that of the drawn id grows by one. The
       prompt is not counted. (As in the chat program of BlinkDL/RWKV-LM, there called alpha_presence, alpha_frequency
       and alpha_decay.)
    2. ``temperature``: logits are divided by it; 0 takes the largest one, the lowest id on a tie.
    3. ``top_k``: only the k most likely ids stay; 0 keeps all, 1 is the same as temperature 0.
    4. ``top_p``: of these, the fewest of the most likely ids whose probabilities, at this temperature and among these,
       reach top_p in sum; 0 is the same as temperature 0.

    In 3 and 4 ids as likely as the last one that stays, stay too. ``seed`` None becomes a random one; 0 is a seed like
    any other. Raises RequestError, naming the field, for a value that is out of bounds or not finite.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_decay: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise RequestError(name, f"found {value}, wanted a finite number from {low:g} to {high:g}")
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(53))

    @property
    def greedy(self) -> bool:
        """Whether the most likely id is always taken."""
        return self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether earlier draws count."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


_BOUNDS = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
    "penalty_decay": (0, 1),
}


class Sampler:
    """The parameters, counts and random streams of ``rows`` sequences on ``device``."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device | str, allowed: Tensor) -> None:
        """``allowed``: bool [vocab_size], the ids that may be drawn (``Tokenizer.allowed``). Raises ValueError where it
        has another shape or allows nothing."""
        if allowed.shape != (vocab_size,) or allowed.dtype != torch.bool or not allowed.any():
            raise ValueError(
                f"allowed: wanted bool [{vocab_size}] with a true value, got {allowed.dtype} {list(allowed.shape)}"
            )
        self._allowed = int(allowed.nonzero()[0])
        self._mask = torch.zeros(vocab_size, device=device).masked_fill_(~allowed.to(device), -math.inf)
        self._numbers = torch.zeros(rows, 5, dtype=torch.float32, device=device)  # as _Row takes them apart
        self._integers = torch.zeros(rows, 4, dtype=torch.int64, device=device)
        self._counts = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        self._one = torch.ones(1, 1, dtype=torch.int64, device=device)
        self._params: list[SamplingParams | None] = [None] * rows
        self._note_uses()

    @torch.inference_mode()
    def set_row(self, row: int, params: SamplingParams, drawn: Sequence[int] = ()) -> None:
        """Begin a sequence in ``row``. ``drawn``: ids that it has drawn already; it goes on as if it had been here."""
        assert params.seed is not None
        numbers = (
            max(params.temperature, _TINY),
            params.presence_penalty,
            params.frequency_penalty,
            params.penalty_decay,
        )
        top_k = min(params.top_k, self._counts.shape[1]) or self._counts.shape[1]
        self._put(self._numbers[row], (*numbers, params.top_p))
        self._put(self._integers[row], (params.greedy, top_k, _key(params.seed), len(drawn)))
        self._params[row] = params
        self._note_uses()
        if params.penalised:
            self._counts[row].zero_()
            if drawn:
                ids, counts = _replayed(drawn, params.penalty_decay)
                self._counts[row, ids.to(self._counts.device)] = counts.to(self._counts.device)

    def _put(self, target: Tensor, values: tuple[float, ...]) -> None:
        """From pinned memory, so that nothing is waited for."""
        source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(source, non_blocking=True)

    def clear_row(self, row: int) -> None:
        """End the sequence in ``row``: its parameters cost the others no more time."""
        self._params[row] = None
        self._note_uses()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One id for each row. ``logits``: float [B, vocab_size], not changed; ``rows``: int64 [B], all different.

        Returns ids int64 [B], and bool [B]: false where a logit of the row is NaN or infinite; its id is an allowed
        one that means nothing. Both are on the device, nothing is waited for.
        """
        parts = zip(logits.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True)
        ids, finite = zip(*(self._sample(*part) for part in parts), strict=True)
        return torch.cat(ids), torch.cat(finite)

    def _sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        finite = logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()
        logits = logits + self._mask
        row = _Row(self._numbers[rows], self._integers[rows])
        counts = self._counts[rows] if self._any_penalised else None
        if counts is not None:
            logits -= row.presence * counts.sign() + row.frequency * counts
        top, ids = logits.max(dim=1)  # of several largest ones the first
        if self._any_drawn:
            ids = torch.where(row.greedy, ids, self._draw(logits.sub_(top[:, None]), row))
        ids = torch.where(finite, ids, self._allowed)
        if counts is not None:
            self._counts[rows] = counts.mul_(row.decay).scatter_add_(1, ids[:, None], torch.ones_like(row.decay))
        self._integers[rows, 3] = row.draws + 1
        return ids, finite

    def _note_uses(self) -> None:
        """What any row asks for. It spares time and changes no result: each step is exact where a row does not ask."""
        params = [one for one in self._params if one is not None]
        self._any_drawn = not all(one.greedy for one in params)
        self._any_penalised = any(one.penalised for one in params)
        self._any_top_k = any(one.top_k > 1 for one in params)
        self._any_top_p = any(one.top_p < 1 for one in params)

    def _draw(self, below: Tensor, row: "_Row") -> Tensor:
        """Ids int64 [B] by the inverse of the cumulated weights. ``below`` [B, V]: logits less the row's largest; it
        is written over. A row that is not finite gets some id from 0 to V - 1."""
        # Floats of one sign are ordered as their bits are: a key is the larger, the likelier its id is.
        keys = below.abs().view(torch.int32).neg_().add_(_INFINITY).clamp_(min=0)
        weights = below.div_(row.temperature).exp_().mul_(SCALE).nan_to_num_(nan=0.0).to(torch.int64)
        if self._any_top_k:
            weights &= _at_least(keys, _threshold(keys, self._one.expand_as(weights), row.top_k))
        if self._any_top_p:
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
_FEW = 512  # ids among which a nucleus nearly always lies
_TINY = 1e-30  # a temperature so low that only ties with the largest logit are left


class _Row:
    """The parameters of the batch's rows, taken apart: [B] beside sums, float32 [B, 1] beside logits."""

    def __init__(self, numbers: Tensor, integers: Tensor) -> None:
        self.temperature, self.presence, self.frequency, self.decay, top_p = numbers.split(1, dim=1)
        self.top_p = top_p[:, 0].double()
        greedy, self.top_k, self.key, self.draws = integers.unbind(1)
        self.greedy = greedy.bool()


def _threshold(keys: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    """The largest key at and above which the amounts add up to ``wanted``, as int32 [B, 1].

    keys int32 [B, V], 0 to 0x7F800000; amounts int64 [B, V]; wanted int64 [B], 1 to the sum of all.
    """
    few = min(keys.shape[1], _FEW)
    if few == keys.shape[1] or keys.device.type == "cpu":  # elsewhere it would mean to wait for the answer
        top, ids = keys.topk(few, dim=1)
        at = torch.searchsorted(amounts.gather(1, ids).cumsum_(dim=1), wanted[:, None].contiguous())
        if bool((at < few).all()):
            return top.gather(1, at)
    return _threshold_by_digits(keys, amounts, wanted)


def _threshold_by_digits(keys: Tensor, amounts: Tensor, wanted: Tensor) -> Tensor:
    """The same for any keys, by a histogram of each digit from the highest; a sort would take far longer on a CPU."""
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
    """Number ``draws`` of the stream that ``_key(seed)`` begins: float64, uniform in [0, 1), 53 bits. Both int64.

    SplitMix64 (Steele, Lea and Flood, 2014), begun at a mixed seed so that neighbouring seeds share nothing.
    """
    return _shifted(_mix(key + (draws + 1) * _GOLDEN), 11).double() * 2.0**-53


def _key(seed: int) -> int:
    return int(_mix(torch.tensor(_signed(seed)) + _GOLDEN))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right without copies of the sign, which torch has for signed integers only."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The signed 64-bit number with the low 64 bits of ``x``."""
    return (x + 2**63) % 2**64 - 2**63


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _replayed(drawn: Sequence[int], decay: float) -> tuple[Tensor, Tensor]:
    """Distinct ids int64 [n] and their counts float32 [n] after these draws, by the steps of ``Sampler.sample``."""
    ids, index = np.unique(np.asarray(drawn, dtype=np.int64), return_inverse=True)
    counts, factor = np.zeros(len(ids), dtype=np.float32), np.float32(decay)
    for at in index:
        counts *= factor
        counts[at] += 1
    return torch.from_numpy(ids), torch.from_numpy(counts)
