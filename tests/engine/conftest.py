"""Engines over stub models."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from model.engine import Engine
from model.sampling import Sampler
from tests.stub_model import StubModel, StubPool

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors here are tiny, and threads that wait for each other take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[0, 1], ids=["in-step", "ahead"])
def start(request: pytest.FixtureRequest) -> Iterator[StartEngine]:
    """``start(model, rows=4, chunk=8, **settings)`` gives a running engine, which ends with the test.

    Both as on the CPU and as on a GPU, where the next step is launched before the ids of the last one are known.
    """
    engines: list[Engine] = []

    def start(model: StubModel, rows: int = 4, chunk: int = 8, **settings: Any) -> Engine:
        mask = torch.ones(model.vocab_size, dtype=torch.bool)
        sampler = Sampler(model.vocab_size, rows, model.device, mask)
        engines.append(Engine(model, sampler, StubPool(rows), chunk, ahead=request.param, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
