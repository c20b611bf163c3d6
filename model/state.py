"""The pool of recurrent states: one row a sequence, a fixed size whatever the length of the text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import Config


@dataclass(frozen=True)
class SavedState:
    """The state of one sequence, apart from any pool.

    ``wkv`` is float32 [layers, heads, head_size (value), head_size (key)]; ``shift`` is float32 [layers, 2, width]:
    the last normalised input of time mix (0) and of channel mix (1).
    """

    wkv: Tensor
    shift: Tensor


class StatePool:
    """``rows`` recurrent states on one device, updated in place by the operators.

    ``wkv`` is float32 [layers, rows, heads, head_size (value), head_size (key)]; ``shift`` is float32
    [layers, 2, rows, width]. A layer's slice of either is contiguous, as the operators ask. A new pool is all zeros,
    which is the state of an empty context.
    """

    def __init__(self, config: Config, rows: int, device: torch.device | str = "cpu") -> None:
        """Allocate the pool. Raises ValueError where ``rows`` is less than 1."""
        if rows < 1:
            raise ValueError(f"rows: a state pool needs at least 1 row, got {rows}")
        self.rows = rows
        head = config.head_size
        self.wkv = torch.zeros(config.layers, rows, config.heads, head, head, dtype=torch.float32, device=device)
        self.shift = torch.zeros(config.layers, 2, rows, config.width, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_per_row(config: Config) -> int:
        """Bytes of device memory that one sequence takes."""
        return 4 * config.layers * config.width * (config.head_size + 2)

    def clear(self, row: int) -> None:
        """Make ``row`` the state of an empty context."""
        self.wkv[:, row].zero_()
        self.shift[:, :, row].zero_()

    def save(self, row: int) -> SavedState:
        """A copy of ``row`` on the pool's device."""
        return SavedState(self.wkv[:, row].clone(), self.shift[:, :, row].clone())

    def load(self, row: int, saved: SavedState) -> None:
        """Overwrite ``row`` with ``saved``; raises RuntimeError where the shapes differ."""
        self.wkv[:, row].copy_(saved.wkv)
        self.shift[:, :, row].copy_(saved.shift)
