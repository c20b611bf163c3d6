"""products on Hopper: every number of tokens, every size of a tile, both layouts of the weights."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.test_products import F16, Fill, Guarded, assert_right, check_group, every_dtype, group, run

SIZES = [1, 2, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64]
SIZES += [65, 66, 127, 128, 129, 160, 161, 255, 257, 320, 512, 960, 1000, 4097]
# As in csrc/wide_plan.h. Where a tile has 64 rows, sums are those of the even steps and of the odd ones.
SHARED_TILES = [(64, 16), (64, 32)]
OTHER_TILES = [(128, 16), (128, 32), (128, 64), (128, 128), (128, 160), (128, 192), (128, 240), (128, 256)]
OTHER_TILES += [(256, 64), (256, 128), (256, 160)]
TILES = SHARED_TILES + OTHER_TILES
SEVEN = [(1024, 416), (1024, 416), (544, 416), (64, 416), (96, 416), (32, 416), (160, 416)]


@pytest.fixture
def hopper(cuda: str) -> str:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return cuda


def use(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of that size from now on, and whole sums."""
    monkeypatch.setenv("COG_RWKV_WIDE", f"{tile[0]},{tile[1]},1")


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
    """Each size of a tile, over more than one round of all blocks where it is narrow; sums of one step, too."""
    fill = Fill(hopper)
    use(tile, monkeypatch)
    short, pair = [(96, 32), (160, 64), (64, 160)], [(2048, 608), (2080, 352)]
    for n, sizes in ((2 * tile[1] + 3, SEVEN), (tile[1] - 7, [(1056, 1056)]), (9, short), (700, pair)):
        jobs = group(fill, n, sizes, dtype, guard)
        names = ("none", "squared_relu") * 4
        plain = [(x, weight, None, name) for (x, weight, _, _), name in zip(jobs, names, strict=False)]
        for wanted, float_out in ((jobs, False), (jobs, True), (plain, False), (by_columns(jobs), n % 2 == 0)):
            outs = run(guard, wanted, float_out)
            check_group(wanted, outs)
            again = run(guard, wanted, float_out)
            assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)), n


@pytest.mark.parametrize("tiles", [SHARED_TILES, OTHER_TILES], ids=["64 rows", "more rows"])
@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_a_row_is_the_same_in_tiles_of_a_kind(
    dtype: torch.dtype, tiles: list[tuple[int, int]], hopper: str, monkeypatch
) -> None:
    """However many rows there are, and however they are cut into tiles."""
    fill = Fill(hopper)
    x, weight = fill(300, 1056, dtype=dtype), fill(544, 1056, dtype=dtype)
    use(tiles[0], monkeypatch)
    whole = cog_rwkv_ops.products([x], [weight], float_out=True)[0]
    for tile in tiles:
        use(tile, monkeypatch)
        for n in (1, 2, 7, 8, 33, 64, 129, 300):
            part = cog_rwkv_ops.products([x[:n].contiguous()], [weight], float_out=True)[0]
            assert torch.equal(part, whole[:n]), (tile, n)


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
    for n in (5, 33, 100, 320, 1000):
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
    for n in (1, 8, 33, 65, 160, 512, 1000):
        jobs = group(Fill(hopper), n, [(2048, 2048), (64, 2048), (2048, 96)], dtype, guard)
        first = run(guard, jobs, True)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, run(guard, jobs, True), strict=True))


@pytest.mark.parametrize("n", [3, 12, 66, 320])
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


@every_dtype
@pytest.mark.gpu
def test_other_matrices_at_the_same_address(dtype: torch.dtype, hopper: str, guard: Guarded, monkeypatch) -> None:
    """What is remembered of a matrix is never taken for another that lies where it lay, nor for one with more rows."""
    memory, inputs = Fill(hopper)(1024 * 1024, dtype=dtype, scale=0.03), Fill(hopper, 1)(300 * 1024, dtype=dtype)
    for tile in ((128, 64), (256, 64), (128, 128)):
        use(tile, monkeypatch)
        for m, k, n in ((1024, 512, 200), (512, 1024, 200), (1024, 1024, 200), (512, 1024, 300), (1024, 512, 200)):
            jobs = [(inputs[: n * k].view(n, k), memory[: m * k].view(m, k), None, "none")]
            check_group(jobs, run(guard, jobs, True))
            jobs = [(inputs[: n * k].view(n, k), memory[: m * k].view(k, m).T, None, "none")]
            check_group(jobs, run(guard, jobs, False))
