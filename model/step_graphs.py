"""Steps as CUDA graphs: captured at setup for a ladder of sizes, replayed by one call each.

A step runs in the smallest graph that holds it. Rows and tokens that it does not use belong to no sequence and write
nothing. The host's part of a step is a copy of ids and rows and a launch, whatever the number of layers: without that
a step of a small model with a prompt in it would take the host several times as long as the device.
"""

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from model.state import StatePool

if TYPE_CHECKING:
    from model.stepper import Model

PADDING = -1  # the row of what is no sequence
MIXED_ROWS = 4, 16, 64, 256  # of steps with parts of prompts: at least one more than their sequences
# Tokens of prompts in such a step. Larger ones take the device longer than the host takes to launch their kernels.
MIXED_TOKENS = 16, 32, 48, 64, 96, 128, 192, 256, 384, 512


class Size(NamedTuple):
    """Of a step: rows of the batch, and tokens."""

    rows: int
    tokens: int


def ladder(most: int) -> list[int]:
    """Batch sizes up to ``most``: all small ones, then steps of about an eighth, so that padding is cheap.

    >>> ladder(40)
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40]
    """
    sizes, size = list(range(1, 9)), 12
    while size < most:
        sizes.append(size)
        size += 4 if size < 16 else 8 if size < 64 else 32 if size < 256 else 64
    return [one for one in sizes if one < most] + [most]


class Sizes:
    """That graphs have: for steps of one token of each of up to ``rows`` sequences, and for steps of 2 to 255 with up
    to ``chunk`` tokens of prompts among them, but 512 at most."""

    def __init__(self, rows: int, chunk: int) -> None:
        self.one_each = [Size(count, count) for count in ladder(rows)]
        # A row more than there are sequences: the tokens that are left over are its own.
        batches = sorted({min(size, rows + 1) for size in MIXED_ROWS})
        self.mixed = [Size(size, size + n) for size in batches if size > 2 for n in MIXED_TOKENS if n <= chunk]

    def holding(self, rows: int, tokens: int) -> Size | None:
        """The one for a step of that size; None: it is launched without a graph."""
        if tokens == rows:
            return next(size for size in self.one_each if size.rows >= rows)
        if rows == 1:  # a prompt alone: its numbers are the same on every idle server, whatever that has graphs for
            return None
        batch = next((size.rows for size in self.mixed if size.rows > rows), None)
        return next((size for size in self.mixed if size.rows == batch and size.tokens >= tokens), None)


class StepGraphs:
    """Of ``model`` over the rows of ``pool``, which stay the same memory from then on. Use it in one thread."""

    @torch.inference_mode()
    def __init__(self, model: "Model", pool: StatePool, chunk: int, progress: bool = True) -> None:
        """Captures a graph for each of ``Sizes(pool.rows, chunk)``, the largest first."""
        self._model, self._pool = model, pool
        self._sizes = Sizes(pool.rows, chunk)
        sizes = sorted([*self._sizes.one_each, *self._sizes.mixed], key=lambda size: -size.tokens)
        rows = max(size.rows for size in sizes)
        self._ids = torch.zeros(sizes[0].tokens, dtype=torch.int64, device=model.device)
        self._rows = torch.full((rows,), PADDING, dtype=torch.int64, device=model.device)
        self._ends = torch.zeros(rows + 1, dtype=torch.int64, device=model.device)
        # Graphs keep what they return: so all return it here, and share the memory of everything else.
        self._logits = torch.empty(rows, model.vocab_size, device=model.device)
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all: they never run at once
        for size in tqdm(sizes, desc="graphs of steps", disable=not progress, file=sys.stderr):
            self._graphs[size] = self._capture(size)

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor | None:
        """ids int64 [N], rows int64 [B], cu_seqlens int64 [B + 1], as the model's -> float32 logits [B, vocab].

        The next call writes over them. None: no graph is for a step of that size.
        """
        if (size := self._sizes.holding(len(rows), len(ids))) is None:
            return None
        self._ids[: len(ids)].copy_(ids)
        _fill(self._rows, rows, size.rows, PADDING)
        if size.tokens > size.rows:
            _fill(self._ends, cu_seqlens, size.rows + 1, size.tokens)
        self._graphs[size].replay()
        return self._logits[: len(rows)]

    def _capture(self, size: Size) -> torch.cuda.CUDAGraph:
        self._ends[: size.rows + 1] = torch.tensor([*range(size.rows), size.tokens])
        self._step(size)  # what a first call sets up cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(size)
        return graph

    def _step(self, size: Size) -> None:
        ids, rows, ends = self._ids[: size.tokens], self._rows[: size.rows], self._ends[: size.rows + 1]
        self._logits[: size.rows].copy_(self._model.forward(ids, self._pool, rows, ends))


def _fill(target: Tensor, source: Tensor, size: int, rest: int) -> None:
    """The first ``size`` of ``target`` are ``source``, and behind it ``rest``."""
    target[: len(source)].copy_(source)
    if size > len(source):
        target[len(source) : size].fill_(rest)
