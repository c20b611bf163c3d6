"""wkv7 where producers of chunks have multiprocessors of their own: the same bits as where they do not."""

import pytest
import torch

import cog_rwkv_ops
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import Fill, error
from tests.ops.test_wkv7 import inputs, limits, make_many, pool, run, wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:], ids=str)
@pytest.mark.parametrize("heads", [1, 8, 12, 33])
def test_producers_apart_change_no_bit_on_cuda(
    dtype: torch.dtype, heads: int, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers have blocks of their own where long sequences have few heads, and not where they have more."""
    given = make_many(heads, cuda, dtype, 1101)
    y, after = cog_rwkv_ops.wkv7(**given)
    again = cog_rwkv_ops.wkv7(**given)
    monkeypatch.setenv("COG_RWKV_GPU", "plain")
    y_plain, after_plain = cog_rwkv_ops.wkv7(**given)
    assert torch.equal(y, y_plain)
    assert torch.equal(after, after_plain)
    assert torch.equal(y, again[0])
    assert torch.equal(after, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_OR_HALF[1:], ids=str)
@pytest.mark.parametrize("lengths", [[4000], [300, 5, 0, 64, 77, 1000, 16], [1063, 255], [64] * 16])
def test_producers_apart_of_ragged_batches_on_cuda(
    dtype: torch.dtype, lengths: list[int], cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows = [(i * 7 + 3) % 17 for i in range(len(lengths))]
    given, states = inputs(ends[-1], cuda, dtype), pool(17, cuda, dtype)
    plain = states.clone()
    y = run(given, states, rows, ends)
    y_wanted, _ = wanted(given, plain, rows, ends)
    monkeypatch.setenv("COG_RWKV_GPU", "plain")
    assert torch.equal(y, run(given, plain, rows, ends))
    assert torch.equal(states, plain)
    assert error(y, y_wanted) <= limits(dtype, cuda, max(lengths))[0]


@pytest.mark.gpu
def test_producers_apart_in_a_cuda_graph(cuda: str) -> None:
    """Every replay clears the flags: none of it reads chunks of the one before."""
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
