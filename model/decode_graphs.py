"""Steps of one token each as CUDA graphs: captured at setup for a ladder of batch sizes, replayed by one call each.

A batch runs in the smallest graph that holds it, with padding rows that write nothing. The host's part of a step is a
copy of ids and rows and a launch, whatever the number of layers.
"""

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from model.state import StatePool

if TYPE_CHECKING:
    from model.stepper import Model

PADDING = -1  # the row of what is no sequence


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


class DecodeGraphs:
    """Of ``model`` over the rows of ``pool``, which stay the same memory from then on. Use it in one thread."""

    @torch.inference_mode()
    def __init__(self, model: "Model", pool: StatePool, progress: bool = True) -> None:
        """Captures a graph for each size of the ladder up to the rows of ``pool``, the largest first."""
        self._model, self._pool = model, pool
        self._sizes = ladder(pool.rows)
        self._ids = torch.zeros(pool.rows, dtype=torch.int64, device=model.device)
        self._rows = torch.full_like(self._ids, PADDING)
        self._ends = torch.arange(pool.rows + 1, device=model.device)
        # Graphs keep what they return: so all return it here, and share the memory of everything else.
        self._logits = torch.empty(pool.rows, model.vocab_size, device=model.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()  # one for all: they never run at once
        for size in tqdm(self._sizes[::-1], desc="decode graphs", disable=not progress, file=sys.stderr):
            self._graphs[size] = self._capture(size)

    @torch.inference_mode()
    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Float32 logits [B, vocab] after one token of each of B sequences, which the next call writes over."""
        count = len(ids)
        size = next(one for one in self._sizes if one >= count)
        self._ids[:count].copy_(ids)
        self._rows[:count].copy_(rows)
        if size > count:
            self._rows[count:size].fill_(PADDING)
        self._graphs[size].replay()
        return self._logits[:count]

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        self._step(size)  # what a first call sets up cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(size)
        return graph

    def _step(self, size: int) -> None:
        logits = self._model.forward(self._ids[:size], self._pool, self._rows[:size], self._ends[: size + 1])
        self._logits[:size].copy_(logits)
