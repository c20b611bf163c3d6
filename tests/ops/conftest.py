"""Fixtures of the operators' tests: each device, memory full of NaN, guard bands around tensors."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.ops.common import Guard


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The test runs once on the CPU and once on CUDA, where there is a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def cuda() -> str:
    """For tests of what only CUDA has: streams, graphs."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN, so that an element which a kernel forgot to write cannot look right by chance."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # what makes torch fill new memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def guard() -> Iterator[Callable[..., Tensor]]:
    """guard(tensor, shift=0): a copy inside a larger buffer; what lies around it must be untouched at the end.

    The surroundings are NaN for floating-point tensors, so a read out of bounds shows in the result too. `shift`
    elements move the copy off the 16-byte boundary on which allocations begin.
    """
    guards: list[Guard] = []

    def add(tensor: Tensor, shift: int = 0) -> Tensor:
        guards.append(Guard(tensor, shift))
        return guards[-1].tensor

    yield add
    for each in guards:
        each.check()
