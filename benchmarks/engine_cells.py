"""What ``benchmarks/engine.py`` measures: steps of B sequences x T tokens, their goals and their least times.

The goals are data, in ``engine_goals.json``: milliseconds on an H200 by model, cell and dtype of the state.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from model.config import Config

GOALS: dict[str, dict[str, dict[str, float]]] = json.loads(Path(__file__).with_name("engine_goals.json").read_text())

# One H200, measured: bytes a second of bulk copies into shared memory, FLOP a second of an 8192^3 product in float16.
BYTES_PER_SECOND = 4388e9
FLOP_PER_SECOND = 678e12
# The share of channel-mix neurons that a token activates in the generated checkpoints, each independently.
ACTIVE = 0.12
BYTES = {"float16": 2, "float32": 4}  # of a state's element


@dataclass(frozen=True, order=True)
class Cell:
    """One step: ``batch`` sequences of ``tokens`` tokens."""

    batch: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """``8x1`` -> Cell(8, 1). Raises ValueError for anything else."""
        batch, _, tokens = text.partition("x")
        if not (batch.isdecimal() and tokens.isdecimal() and int(batch) and int(tokens)):
            raise ValueError(f"cells: {text!r} is not BxT with B and T from 1, such as 8x1 or 1x512")
        return cls(int(batch), int(tokens))

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"

    @property
    def size(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.tokens


@dataclass(frozen=True)
class Floor:
    """The least milliseconds of a step: the larger of ``bytes_ms`` and ``flop_ms``; ``state_ms`` is a part of the
    first."""

    bytes_ms: float
    flop_ms: float
    state_ms: float

    @property
    def ms(self) -> float:
        """With the state's traffic hidden behind the matrix products."""
        return max(self.bytes_ms, self.flop_ms)

    @property
    def serial_ms(self) -> float:
        """With the state's traffic before or after them."""
        return max(self.bytes_ms - self.state_ms, self.flop_ms) + self.state_ms


def floor(config: Config, cell: Cell, state_dtype: str = "float16") -> Floor:
    """Bytes: 16-bit weights without the embedding, of channel mix's value only the rows of neurons that some token
    activates, and the states, read and written once. FLOP: two a weight and token, the head for the last tokens only.
    """
    width = config.width
    low_ranks = 2 * width * (config.decay_rank + config.a_rank + config.v_rank + config.gate_rank)
    value = width * config.ffn
    blocks = config.layers * (4 * width * width + width * config.ffn + low_ranks) - 2 * width * config.v_rank
    head = config.vocab * width
    touched = 1 - (1 - ACTIVE) ** cell.size
    weights = 2 * (blocks + config.layers * value * touched + head)
    state = 2 * BYTES[state_dtype] * cell.batch * config.layers * (width * config.head_size + 2 * width)
    flop = 2 * cell.size * (blocks + config.layers * value) + 2 * cell.batch * head
    return Floor(
        bytes_ms=(weights + state) / BYTES_PER_SECOND * 1e3,
        flop_ms=flop / FLOP_PER_SECOND * 1e3,
        state_ms=state / BYTES_PER_SECOND * 1e3,
    )


def state_dtypes(cell: Cell) -> tuple[str, ...]:
    """The precisions of the state with which a cell is timed: the peer's, and from 128 sequences up the default too."""
    return ("float16", "float32") if cell.batch >= 128 else ("float16",)


def goal(model: str, cell: Cell, state_dtype: str) -> float | None:
    """Milliseconds, where there is a goal."""
    return GOALS.get(model, {}).get(str(cell), {}).get(state_dtype)


def cells_of(model: str) -> list[Cell]:
    """The cells that have goals, in their order. Raises ValueError for a model without."""
    if model not in GOALS:
        raise ValueError(f"model: {model!r} has no cells, only {', '.join(GOALS)} have; name some with --cells")
    return [Cell.parse(text) for text in GOALS[model]]
