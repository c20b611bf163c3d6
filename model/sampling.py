"""Logits to ids on the model's device: a batch of rows, each with parameters and a stream of random numbers of its own.

A row's ids depend on its logits, its parameters and how many ids it has drawn before, and on nothing else: weights are
64-bit integers, whose sums are exact in any order, and the random numbers are a function of seed and count. So row
number, neighbours and batch size never show, bit for bit. The operator `cog_rwkv_ops.sample_` does a whole step.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cog_rwkv_ops import sample_
from model import sampling_plain
from model.errors import RequestError
from model.sampling_plain import Tables, Uses


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

    def __init__(
        self, vocab_size: int, rows: int, device: torch.device | str, allowed: Tensor, tuned: bool = False
    ) -> None:
        """``allowed``: bool [vocab_size], the ids that may be drawn (``Tokenizer.allowed``).

        ``tuned``: on CUDA too a step is the operator `sample_`; else it is that of ``sampling_plain`` there. Raises
        ValueError where ``allowed`` has another shape or allows nothing.
        """
        if allowed.shape != (vocab_size,) or allowed.dtype != torch.bool or not allowed.any():
            raise ValueError(
                f"allowed: wanted bool [{vocab_size}] with a true value, got {allowed.dtype} {list(allowed.shape)}"
            )
        self._tables = Tables(
            allowed.to(device),
            numbers=torch.zeros(rows, 5, dtype=torch.float32, device=device),
            integers=torch.zeros(rows, 4, dtype=torch.int64, device=device),
            counts=torch.zeros(rows, vocab_size, dtype=torch.float32, device=device),
            first=int(allowed.nonzero()[0]),
        )
        self._operator = tuned or self._tables.counts.device.type == "cpu"
        self._params: list[SamplingParams | None] = [None] * rows
        self._known_uses: Uses | None = None  # until a row changes

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
        counts = self._tables.counts[row]
        top_k = min(params.top_k, len(counts)) or len(counts)
        self._put(self._tables.numbers[row], (*numbers, params.top_p))
        self._put(self._tables.integers[row], (params.greedy, top_k, _key(params.seed), len(drawn)))
        self._params[row], self._known_uses = params, None
        if params.penalised:
            counts.zero_()
            if drawn:
                ids, there = _replayed(drawn, params.penalty_decay)
                counts[ids.to(counts.device)] = there.to(counts.device)

    def _put(self, target: Tensor, values: tuple[float, ...]) -> None:
        """From pinned memory, so that nothing is waited for."""
        source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(source, non_blocking=True)

    def clear_row(self, row: int) -> None:
        """End the sequence in ``row``: its parameters cost the others no more time."""
        self._params[row] = self._known_uses = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One id for each row. ``logits``: float [B, vocab_size], not changed; ``rows``: int64 [B], all different.

        Returns ids int64 [B], and bool [B]: false where a logit of the row is NaN or infinite; its id is an allowed
        one that means nothing. Both are on the device, nothing is waited for.
        """
        tables = self._tables
        if not self._operator:
            return sampling_plain.sample(logits, rows, tables, self._uses)
        return sample_(logits.float(), rows, tables.allowed, tables.numbers, tables.integers, tables.counts)

    @property
    def _uses(self) -> Uses:
        if self._known_uses is None:
            self._known_uses = Uses.of(self._params)
        return self._known_uses


_TINY = 1e-30  # a temperature so low that only ties with the largest logit are left


def _key(seed: int) -> int:
    """What the row's stream begins with, int64: mixed, so that neighbouring seeds share nothing."""
    x = (seed + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return ((x ^ x >> 31) + 2**63) % 2**64 - 2**63  # signed


def _replayed(drawn: Sequence[int], decay: float) -> tuple[Tensor, Tensor]:
    """Distinct ids int64 [n] and their counts float32 [n] after these draws, by the steps of ``Sampler.sample``."""
    ids, index = np.unique(np.asarray(drawn, dtype=np.int64), return_inverse=True)
    counts, factor = np.zeros(len(ids), dtype=np.float32), np.float32(decay)
    for at in index:
        counts *= factor
        counts[at] += 1
    return torch.from_numpy(ids), torch.from_numpy(counts)
