"""Engines over stub models."""

from collections.abc import Callable, Iterator

import pytest
import torch

from model.engine import Engine
from model.sampling import Sampler
from tests.stub_model import StubModel, StubPool

StartEngine = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[StartEngine]:
    """``start(model, rows=4, chunk=8, **settings)`` gives a running engine, which ends with the test."""
    engines: list[Engine] = []

    def start(model: StubModel, rows: int = 4, chunk: int = 8, **settings: float) -> Engine:
        mask = torch.ones(model.vocab_size, dtype=torch.bool)
        sampler = Sampler(model.vocab_size, rows, model.device, mask)
        engines.append(Engine(model, sampler, StubPool(rows), chunk, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
