"""products of many tokens on Hopper: every kernel, every way to share a tile, both layouts of the weights."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.test_products import F16, Fill, Guarded, assert_right, check_group, every_dtype, group, run

SIZES = [65, 66, 127, 128, 129, 160, 161, 255, 257, 320, 512, 960, 1000, 4097]
TILES = [(128, 64), (128, 128), (128, 160), (128, 192), (128, 208), (128, 240), (128, 256), (256, 128), (256, 160)]
# Rows, tokens and parts of the sums that the blocks of a cluster share among themselves.
TEAMS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (1, 1, 2), (1, 1, 4), (2, 1, 4), (2, 2, 2)]
SEVEN = [(1024, 416), (1024, 416), (544, 416), (64, 416), (96, 416), (32, 416), (160, 416)]


@pytest.fixture
def hopper(cuda: str) -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return cuda


def by_columns(jobs: Sequence[tuple]) -> list[tuple]:
    """The same products, of weights that lie transposed."""
    return [(x, weight.T.contiguous().T, bias, name) for x, weight, bias, name in jobs]


@every_dtype
@pytest.mark.gpu
def test_every_number_of_tokens(dtype: torch.dtype, hopper: str, guard: Guarded) -> None:
    fill = Fill(hopper)
    for n in SIZES:
        for i, sizes in enumerate((SEVEN, [(1024, 1024)], [(256, 4096)], [(64, 2048), (2048, 64), (288, 32)])):
            jobs = group(fill, n, sizes, dtype, guard)
            check_group(jobs, run(guard, jobs, (n + i) % 2 == 0))
            if len(sizes) == 1:
                check_group(jobs, run(guard, by_columns(jobs), False))


@every_dtype
@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kernel(dtype: torch.dtype, tile: tuple[int, int], hopper: str, guard: Guarded, monkeypatch) -> None:
    """Each size of a tile with each team of blocks, over more than one round of all blocks where it is narrow."""
    fill = Fill(hopper)
    for team in TEAMS:
        if tile[1] % (8 * team[0]):
            continue
        monkeypatch.setenv("COG_RWKV_WIDE", ",".join(map(str, (*tile, *team))))
        for n, sizes in ((2 * tile[1] + 3, SEVEN), (tile[1] - 7, [(1056, 1056)]), (700, [(2048, 608), (2080, 352)])):
            jobs = group(fill, n, sizes, dtype, guard)
            plain = [
                (x, weight, None, name)
                for (x, weight, _, _), name in zip(jobs, ("none", "squared_relu") * 4, strict=False)
            ]
            for wanted in (jobs, plain, by_columns(plain)):
                outs = run(guard, wanted, False)
                check_group(wanted, outs)
                again = run(guard, wanted, False)
                assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)), (tile, team, n)


@every_dtype
@pytest.mark.gpu
def test_few_tokens_by_columns(dtype: torch.dtype, hopper: str, guard: Guarded) -> None:
    fill = Fill(hopper)
    for n in (1, 2, 17, 33, 64):
        jobs = by_columns(group(fill, n, [(1024, 4096), (96, 160)], dtype, guard))
        check_group(jobs, run(guard, jobs, n % 2 == 0))


@pytest.mark.gpu
def test_very_many_tokens(hopper: str) -> None:
    """Rows here and there of a long batch, against float64; the whole has more than 2^31 values."""
    fill, n = Fill(hopper), 70_001
    x, weight = fill(n, 64, dtype=F16), fill(32768, 64, dtype=F16, scale=64**-0.5)
    out = cog_rwkv_ops.products([x], [weight])[0]
    for at in (slice(0, 40), slice(n // 2, n // 2 + 40), slice(n - 40, n)):
        assert_right(out[at], x[at], weight, None, "none", at)


@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_a_row_beside_others(dtype: torch.dtype, hopper: str) -> None:
    """What other rows hold changes nothing, not even where it is NaN."""
    fill = Fill(hopper)
    for n in (100, 320, 1000):
        x, weight = fill(n, 1056, dtype=dtype), fill(544, 1056, dtype=dtype)
        whole = cog_rwkv_ops.products([x], [weight], float_out=True)[0]
        odd = x.clone()
        odd[1::2] = float("nan")
        others = cog_rwkv_ops.products([odd], [weight], float_out=True)[0]
        assert torch.equal(others[::2], whole[::2])
        assert others[1::2].isnan().all()


@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_the_same_bits_every_time(dtype: torch.dtype, hopper: str, guard: Guarded) -> None:
    for n in (65, 160, 512, 1000):
        jobs = group(Fill(hopper), n, [(2048, 2048), (64, 2048), (2048, 96)], dtype, guard)
        first = run(guard, jobs, True)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, run(guard, jobs, True), strict=True))


@pytest.mark.parametrize("n", [66, 320])
@pytest.mark.gpu
def test_chains_of_both_layouts_in_a_cuda_graph(n: int, hopper: str) -> None:
    """Each input is the result before, and kernels overlap: nobody may read or write early."""
    fill, c = Fill(hopper), 1024
    keys = [fill(2 * c, c, dtype=F16, scale=c**-0.5) for _ in range(6)]
    values = [fill(2 * c, c, dtype=F16, scale=c**-0.5).T for _ in range(6)]
    x, hidden = fill(n, c, dtype=F16), torch.empty(n, 2 * c, dtype=F16, device=hopper)
    buffers = [torch.empty(n, c, dtype=F16, device=hopper) for _ in range(2)]

    def chain(wait: bool) -> Tensor:
        y = x
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            torch.ops.cog_rwkv.products_([y], [key], [None], [3], [hidden])
            if wait:
                torch.cuda.synchronize()
            torch.ops.cog_rwkv.products_([hidden], [value], [None], [1], [buffers[i % 2]])
            if wait:
                torch.cuda.synchronize()
            y = buffers[i % 2]
        return y.clone()

    torch.utils.deterministic.fill_uninitialized_memory = False  # that would put other kernels between these
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for seed in range(3):
        x.copy_(Fill(hopper, 100 + seed)(n, c, dtype=F16))
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, chain(True)), seed
