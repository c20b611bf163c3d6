"""The ways to make a step of sampling: one operator, or PyTorch's own one by one; and on CUDA, where nothing waits."""

import math

import pytest
import torch

from model.sampling import Sampler
from tests.model.test_sampling import MIX, sampler


@pytest.mark.parametrize("plain", [False, True])
def test_no_rows_at_all(plain: bool) -> None:
    made = sampler(MIX, 100)
    made._operator = not plain
    ids, finite = made.sample(torch.zeros(0, 100), torch.zeros(0, dtype=torch.int64))
    assert ids.shape == finite.shape == (0,) and ids.dtype == torch.int64 and finite.dtype == torch.bool


@pytest.mark.parametrize("vocab", [17, 1001, 20000])
def test_both_ways_of_a_step_agree(vocab: int) -> None:
    """The operator, and PyTorch's own operators one by one: they differ in the last bit of exp, which these draws do
    not show."""
    allowed = torch.rand(vocab, generator=torch.Generator().manual_seed(9)) < 0.9
    ways = [sampler(MIX * 3, vocab, allowed=allowed) for _ in range(2)]
    rows = torch.arange(len(MIX) * 3)
    ways[1]._operator = False
    for step in range(6):
        logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(step)) * 3
        logits[step, step] = math.inf
        (ids, finite), (plain_ids, plain_finite) = (made.sample(logits, rows) for made in ways)
        assert ids[finite].tolist() == plain_ids[finite].tolist()
        assert finite.tolist() == plain_finite.tolist() == [row != step for row in rows.tolist()]
        assert ways[0]._tables.integers[:, 3].tolist() == ways[1]._tables.integers[:, 3].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [17, 1001, 65536])
def test_the_tuned_way_on_cuda_is_that_of_the_cpu(vocab: int) -> None:
    everything, rows = torch.ones(vocab, dtype=torch.bool), torch.arange(len(MIX))
    ways = [Sampler(vocab, len(MIX), device, everything, tuned=True) for device in ("cpu", "cuda")]
    for made in ways:
        for row, params in enumerate(MIX):
            made.set_row(row, params)
    for step in range(6):
        logits = torch.randn(len(MIX), vocab, generator=torch.Generator().manual_seed(step)) * 3
        ids = [made.sample(logits.to(d), rows.to(d))[0].tolist() for made, d in zip(ways, ("cpu", "cuda"), strict=True)]
        assert ids[0] == ids[1]


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    made, rows = sampler(MIX, 1000, "cuda"), torch.arange(7, device="cuda")
    logits = torch.randn(7, 1000, device="cuda")
    made.sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
