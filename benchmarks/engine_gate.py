"""The correctness gate before a time: logits against a float64 forward, beside those of a plain 16-bit torch forward.

The reference is float64 everywhere, also for long prompts: a GPU of a data centre does those products fast enough, and
the recurrence costs it half a second for 4,096 tokens of 4 layers. What is compared are the logits that a step returns,
those of the last token, and then of ``FOLLOWING`` more tokens a sequence, which read the states that the step wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.engine_cells import Cell
from benchmarks.engine_step import Repeated, Step
from benchmarks.plain import Plain, State
from model.checkpoint import Checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool

LAYERS = 4
FOLLOWING = 2
WORSE = 1.5  # times the plain forward's error
SEED = 1


@dataclass
class Gate:
    """Sums over the forwards that were compared; errors are relative, L2 norms over all logits."""

    wrong: int = 0  # tokens that differ where they must not
    compared: int = 0  # tokens that must not differ
    _squares: float = 0.0
    _ours: float = 0.0
    _plain: float = 0.0

    def add(self, got: Tensor, plain: Tensor, exact: Tensor) -> None:
        """Logits [B, vocab] of one forward. Tokens count where the first is ahead by twice plain's largest error."""
        exact, difference = exact.double(), plain.double() - exact
        self._squares += float(exact.square().sum())
        self._plain += float(difference.square().sum())
        self._ours += float((got.double() - exact).square().sum())
        first, second = exact.topk(2).values.unbind(-1)
        clear = first - second > 2 * difference.abs().amax()
        self.compared += int(clear.sum())
        self.wrong += int((got.argmax(-1) != exact.argmax(-1))[clear].sum())

    @property
    def error(self) -> float:
        """Ours against float64; NaN where a logit is not finite."""
        return (self._ours / self._squares) ** 0.5

    @property
    def plain_error(self) -> float:
        """The plain forward's."""
        return (self._plain / self._squares) ** 0.5

    @property
    def ok(self) -> bool:
        """Whether a time may be given."""
        return self.error <= WORSE * self.plain_error and self.wrong == 0

    def __str__(self) -> str:
        tokens = f"{self.compared - self.wrong} of {self.compared} tokens"
        return f"gate {'green' if self.ok else 'RED'}: error {self.error:.1e}, plain {self.plain_error:.1e}, {tokens}"


class Gated:
    """A model and the two forwards that it is held against, all of the same published weights."""

    def __init__(self, checkpoint: Checkpoint, model: RWKV7) -> None:
        """``checkpoint`` is what ``model`` was made of."""
        self.model, self._tensors = model, checkpoint.tensors

    @cached_property
    def _on_device(self) -> Mapping[str, Tensor]:
        return {name: tensor.to(self.model.device) for name, tensor in self._tensors.items()}

    def check(self, cell: Cell, state_dtype: torch.dtype) -> Gate:
        """Run the three on the same tokens and states, ours in the way in which it is timed."""
        device, dtype = self.model.device, self.model.dtype
        step = Step(self.model, cell, state_dtype, SEED)
        repeated = Repeated(step)
        step.begin()
        yardsticks = [Plain(self._on_device, one, device, state_dtype) for one in (dtype, torch.float64)]
        states = [read_state(step.pool, plain) for plain in yardsticks]
        repeated.poison()
        gate, got, ids = Gate(), repeated(), step.ids.view(cell.batch, cell.tokens)
        for _ in range(FOLLOWING):
            self._compare(gate, got, ids, yardsticks, states)
            ids = step.draw(cell.batch).unsqueeze(1)
            got = step.follow(ids[:, 0])
        self._compare(gate, got, ids, yardsticks, states)
        return gate

    @staticmethod
    def _compare(gate: Gate, got: Tensor, ids: Tensor, yardsticks: list[Plain], states: list[State]) -> None:
        plain, exact = (one.forward(ids, state, last_only=True) for one, state in zip(yardsticks, states, strict=True))
        gate.add(got, plain, exact)


def read_state(pool: StatePool, plain: Plain) -> State:
    """The pool's states as ``plain`` takes them."""
    state = plain.zero_state(pool.rows)
    for layer in range(plain.layers):
        state[f"{layer}.wkv"].copy_(pool.wkv[layer])
        for half, part in enumerate(("att", "ffn")):
            state[f"{layer}.{part}"].copy_(pool.shift[layer, half])
    return state


def cut(checkpoint: Checkpoint, layers: int = LAYERS) -> Checkpoint:
    """The same checkpoint with its first ``layers`` layers and the head only."""
    layers = min(layers, checkpoint.config.layers)
    kept = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith("blocks.") or int(name.split(".")[1]) < layers
    }
    return replace(checkpoint, tensors=kept, config=replace(checkpoint.config, layers=layers))
