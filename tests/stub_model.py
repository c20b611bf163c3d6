"""A model whose next token is the say of a Python function: for text, stops, sampling, streams and faults.

Its "state" is the list of all ids that a row has read. So a row that was mixed up with another, not cleared before it
was used again, or fed a token twice, gives other tokens than it should.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from model.state import SavedState

Script = Callable[[list[int]], int]


@dataclass(frozen=True)
class Step:
    """What one call of ``forward`` was given: rows, and the ids of each."""

    rows: list[int]
    ids: list[list[int]]


class StubPool:
    """What a row has read, in place of a state."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read: list[list[int]] = [[-1] for _ in range(rows)]  # dirty, until cleared

    def clear(self, row: int) -> None:
        """An empty context."""
        self.read[row] = []

    def save(self, row: int) -> list[int]:
        """What it has read, in place of a SavedState."""
        return list(self.read[row])

    def load(self, row: int, saved: list[int]) -> None:
        """As if it had read what is saved."""
        self.read[row] = list(saved)


class StubStatePool(StubPool):
    """The same, with states that can be stored like real ones: ``wkv`` holds the ids that were read, float32 [N]."""

    def save(self, row: int) -> SavedState:  # type: ignore[override]
        """What it has read, as tensors."""
        return SavedState(torch.tensor(self.read[row], dtype=torch.float32), torch.zeros(1))

    def load(self, row: int, saved: SavedState) -> None:  # type: ignore[override]
        """As if it had read what is saved."""
        self.read[row] = ids_in(saved)


def ids_in(saved: SavedState | None) -> list[int]:
    """What a state of StubStatePool has read; nothing for None."""
    return [] if saved is None else [int(one) for one in saved.wkv.tolist()]


class StubModel:
    """``script(ids)`` gives the next id after all that the row has read, or raises, or sleeps; NAN_LOGITS gives NaN."""

    NAN_LOGITS = -1

    def __init__(self, script: Script, vocab_size: int = 64, delay: float = 0.0, recording: bool = True) -> None:
        """``steps`` holds all that were made, unless it is not ``recording``: a server makes more of them for ever."""
        self.script, self.vocab_size, self.delay, self.recording = script, vocab_size, delay, recording
        self.device = torch.device("cpu")
        self.steps: list[Step] = []

    def forward(self, ids: Tensor, pool: StubPool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """As model/rwkv7.py: logits [B, vocab] after the last id of each sequence."""
        assert len(set(rows.tolist())) == len(rows) == len(cu_seqlens) - 1
        ends = cu_seqlens.tolist()
        parts = [ids[begin:end].tolist() for begin, end in pairwise(ends)]
        assert all(parts) and ends[-1] == len(ids)
        if self.recording:
            self.steps.append(Step(rows.tolist(), parts))
        time.sleep(self.delay)
        logits = torch.full((len(parts), self.vocab_size), -20.0)
        for index, (row, part) in enumerate(zip(rows.tolist(), parts, strict=True)):
            pool.read[row].extend(part)
            token = self.script(pool.read[row])
            if token == self.NAN_LOGITS:
                logits[index, 3] = float("nan")
            else:
                logits[index, token] = 20.0
        return logits


def mixed(ids: list[int], vocab_size: int = 64) -> int:
    """A next id that depends on every id before it and is never 0."""
    value = 1
    for one in ids:
        value = (value * 31 + one + 7) % 1000003
    return 1 + value % (vocab_size - 1)


def reply_of(script: Script, prompt: list[int], max_tokens: int) -> list[int]:
    """What an engine has to give for a prompt on its own."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens and (token := script(ids)):
        ids.append(token)
    return ids[len(prompt) :]
