"""The pool of recurrent states: one row a sequence, a fixed size whatever the length of the text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import Config


@dataclass(frozen=True)
class SavedState:
    """The state of one sequence, apart from any pool.

    ``wkv`` is [layers, heads, head_size (value), head_size (key)] in the pool's dtype; ``shift`` is float32
    [layers, 2, width]: the last normalised input of time mix (0) and of channel mix (1).
    """

    wkv: Tensor
    shift: Tensor

    def finite(self) -> bool:
        """Whether all of it is. Waits for the device."""
        return bool(torch.isfinite(self.wkv).all() & torch.isfinite(self.shift).all())


def state_bytes(config: Config, dtype: torch.dtype) -> int:
    """What one state takes, with ``wkv`` in ``dtype``."""
    head = config.head_size
    return config.layers * (config.heads * head * head * dtype.itemsize + 2 * config.width * 4)


class StatePool:
    """``rows`` recurrent states on one device, updated in place by the operators.

    ``wkv`` is [layers, rows, heads, head_size (value), head_size (key)], float32 unless the pool was made with a
    16-bit ``dtype``: half the memory and traffic, and an error that grows with the length of the text (README.md has
    the figures). ``shift`` is float32 [layers, 2, rows, width]. A layer's slice of either is contiguous, as the
    operators ask. A new pool is all zeros, which is the state of an empty context.
    """

    def __init__(
        self,
        config: Config,
        rows: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the pool. Raises ValueError where ``rows`` is less than 1."""
        if rows < 1:
            raise ValueError(f"rows: a state pool needs at least 1 row, got {rows}")
        self.rows = rows
        head = config.head_size
        self.wkv = torch.zeros(config.layers, rows, config.heads, head, head, dtype=dtype, device=device)
        self.shift = torch.zeros(config.layers, 2, rows, config.width, dtype=torch.float32, device=device)

    def clear(self, row: int) -> None:
        """Make ``row`` the state of an empty context."""
        self.wkv[:, row].zero_()
        self.shift[:, :, row].zero_()

    def save(self, row: int) -> SavedState:
        """A copy of ``row`` on the pool's device."""
        return SavedState(self.wkv[:, row].clone(), self.shift[:, :, row].clone())

    def load(self, row: int, saved: SavedState) -> None:
        """Overwrite ``row`` with ``saved``; raises RuntimeError where the shapes differ.

        On a GPU ``saved`` is read later, on the current stream: keep it until then. Pinned memory is not waited for.
        """
        self.wkv[:, row].copy_(saved.wkv, non_blocking=True)
        self.shift[:, :, row].copy_(saved.shift, non_blocking=True)
