"""wkv7 of long sequences on CUDA, in parts where heads are few: as right as in one, and the same bits every time."""

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops.wkv7 import reference
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import Fill, copied, error
from tests.ops.test_wkv7 import inputs, limits, make_many, pool, run, wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:], ids=str)
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1101), (12, 4200), (33, 2047), (64, 1024), (140, 1024)])
def test_long_sequences_on_cuda(dtype: torch.dtype, heads: int, tokens: int, cuda: str) -> None:
    """From one part to eight, the last one short; and the same bits every time."""
    given = make_many(heads, cuda, dtype, tokens)
    y, after = cog_rwkv_ops.wkv7(**given)
    again = cog_rwkv_ops.wkv7(**given)
    assert torch.equal(y, again[0])
    assert torch.equal(after, again[1])
    y_wanted, state_wanted = reference.wkv7(**copied(given, lambda t: t.double()))
    y_limit, state_limit = limits(dtype, cuda, tokens)
    assert error(y, y_wanted.cpu()) <= y_limit
    assert error(after, state_wanted.cpu()) <= state_limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:], ids=str)
@pytest.mark.parametrize("lengths", [[4000], [300, 5, 0, 64, 77, 1000, 16], [1063, 255, 2200, 0, 1024], [64] * 16])
def test_long_sequences_of_ragged_batches_on_cuda(dtype: torch.dtype, lengths: list[int], cuda: str) -> None:
    """Each as alone, bit for bit, whatever its neighbours; with a pool of 16 bits."""
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows = [(i * 7 + 3) % 17 for i in range(len(lengths))]
    given, states = inputs(ends[-1], cuda, dtype), pool(17, cuda, dtype)
    before, alone = states.clone(), states.clone()
    y = run(given, states, rows, ends)
    y_wanted, _ = wanted(given, before, rows, ends)
    assert error(y, y_wanted) <= limits(dtype, cuda, max(lengths))[0]
    for row, begin, end in zip(rows, ends[:-1], ends[1:], strict=True):
        part = run({name: t[begin:end] for name, t in given.items()}, alone, [row], [0, end - begin])
        assert torch.equal(part, y[begin:end])
    assert torch.equal(states, alone)


@pytest.mark.gpu
def test_long_sequences_in_a_cuda_graph(cuda: str) -> None:
    """A replay reads nothing that the one before it left."""
    given = make_many(8, cuda, torch.float16, 1100)
    cog_rwkv_ops.wkv7(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, after = cog_rwkv_ops.wkv7(**given)
    for seed in (1, 2, 3):
        given["v"].copy_(Fill(cuda, seed)(*given["v"].shape, dtype=torch.float16))
        graph.replay()
        y_wanted, after_wanted = cog_rwkv_ops.wkv7(**given)
        assert torch.equal(y, y_wanted)
        assert torch.equal(after, after_wanted)


@pytest.mark.gpu
def test_without_wgmma_it_is_as_right_on_cuda(cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COG_RWKV_GPU", "plain")
    given = make_many(5, cuda, torch.float16, 1100)
    y, after = cog_rwkv_ops.wkv7(**given)
    y_wanted, state_wanted = reference.wkv7(**copied(given, lambda t: t.double()))
    assert error(y, y_wanted.cpu()) <= limits(torch.float16, cuda, 1100)[0]
    assert error(after, state_wanted.cpu()) <= limits(torch.float16, cuda, 1100)[1]
