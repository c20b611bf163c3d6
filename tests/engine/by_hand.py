"""An engine that takes its turns when it is told to, on the thread of the test: no waiting, no chance."""

import threading
from typing import Any

import torch

from model.engine import Engine
from model.handle import Handle
from model.sampling import Sampler, SamplingParams
from model.state import SavedState
from tests.stub_model import StubPool

GREEDY = SamplingParams(temperature=0.0)


class ByHand(Engine):
    """``turn()`` is one round of what the engine's thread does for ever. The pool is a stub's, if none is given."""

    def __init__(self, model: Any, rows: int = 4, chunk: int = 8, pool: Any = None, **parameters: Any) -> None:
        self._end_of_test = threading.Event()
        self.model, self.pool = model, pool or StubPool(rows)
        self.sampler = Sampler(model.vocab_size, rows, "cpu", torch.ones(model.vocab_size, dtype=torch.bool))
        super().__init__(model, self.sampler, self.pool, chunk, **parameters)

    def _drive(self) -> None:
        self._end_of_test.wait()

    def close(self) -> None:
        """End the idle thread."""
        self._end_of_test.set()
        super().close()

    def order(self, ids: list[int], max_tokens: int, handle: Handle | None = None) -> Handle:
        """A greedy request."""
        return self.submit(ids, GREEDY, max_tokens, handle)

    def turn(self) -> bool:
        """One turn; False where there was nothing to do."""
        if not (self._held or self._flights):
            return False
        self._collect()
        self._turn()
        return True

    def run(self) -> int:
        """Turns until all is done; returns how many."""
        turns = 0
        while self.turn():
            turns += 1
        return turns

    def clean(self) -> bool:
        """Whether nothing is left of any request."""
        scheduler = self._scheduler
        return (
            not (len(scheduler) or self._flights or self._held or self._inbox)
            and sorted(scheduler._free) == list(range(self.pool.rows))
            and self.sampler._params == [None] * self.pool.rows
        )


class DictStore:
    """States by key, the last ``most`` used ones."""

    def __init__(self, most: int = 1000) -> None:
        self.states: dict[str, SavedState] = {}
        self.most = most

    def __contains__(self, key: str) -> bool:
        """As Store."""
        return key in self.states

    def put(self, key: str, state: SavedState) -> None:
        """As Store."""
        self.states.pop(key, None)
        self.states[key] = state
        while len(self.states) > self.most:
            self.states.pop(next(iter(self.states)))

    def get(self, key: str) -> SavedState | None:
        """As Store."""
        state = self.states.get(key)
        if state is not None:
            self.put(key, state)
        return state
