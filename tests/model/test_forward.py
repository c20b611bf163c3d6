"""ops.forward_: a step of the whole model in one call on CUDA, against float64 and against the operators one by one."""

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.plain import Plain
from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny
from tests.ops.test_products_wide import TILES

HALVES = [torch.float16, torch.bfloat16]
SHAPE = tiny.Shape(layers=3, width=320, ranks=(32, 64, 32, 96), vocab=544)
# Its value products have sums of 8192 terms, in several slices up to 512 tokens.
WIDE = tiny.Shape(layers=2, width=2048, ranks=(96, 96, 64, 256), vocab=1024)


def models(path, dtype: torch.dtype, shape: tiny.Shape = SHAPE) -> tuple[RWKV7, RWKV7, dict[str, Tensor]]:
    tensors = tiny.tensors(shape, dtype)
    torch.save(tensors, path / "model.pth")
    found = checkpoint.load(path / "model.pth")
    tuned = RWKV7.load(found, "cuda", dtype, progress=False, tuned=True)
    return tuned, RWKV7.load(found, "cuda", dtype, progress=False), tensors


def filled(model: RWKV7, rows: int, dtype: torch.dtype = torch.float32) -> StatePool:
    pool, random = StatePool(model.config, rows, "cuda", dtype), torch.Generator().manual_seed(rows)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=random) * 0.3)
    pool.shift.copy_(torch.randn(pool.shift.shape, generator=random))
    return pool


def copied(pool: StatePool, model: RWKV7) -> StatePool:
    other = StatePool(model.config, pool.rows, "cuda", pool.wkv.dtype)
    other.wkv.copy_(pool.wkv)
    other.shift.copy_(pool.shift)
    return other


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def batch(lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 500, (sum(lengths),), generator=random)
    rows = torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ids.cuda(), rows.cuda(), ends.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_against_float64(tmp_path, dtype: torch.dtype) -> None:
    """Prompts and single steps: error at most 1.5x that of a plain forward in the same dtype."""
    tuned, _, tensors = models(tmp_path, dtype)
    ids, _, _ = batch([150])
    want, plain = Plain(tensors, torch.float64)(ids.tolist())[0], Plain(tensors, dtype)(ids.tolist())[0]
    rows, pool = torch.tensor([1], device="cuda"), StatePool(tuned.config, 2, "cuda")
    whole = tuned.forward(ids, pool, rows, torch.tensor([0, 150], device="cuda"), last_only=False)
    assert error(whole.cpu(), want) <= 1.5 * error(plain, want)
    pool = StatePool(tuned.config, 2, "cuda")
    one = torch.tensor([0, 1], device="cuda")
    steps = torch.cat([tuned.forward(ids[i : i + 1], pool, rows, one) for i in range(150)])
    assert error(steps.cpu(), want) <= 1.5 * error(plain, want)


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_token_each_is_near_the_operators(tmp_path, dtype: torch.dtype, state: torch.dtype) -> None:
    """Every kernel that the number of tokens chooses; states of rows that are not in the batch stay as they are."""
    tuned, plain, _ = models(tmp_path, dtype)
    close = 0.02 if dtype == torch.float16 else 0.1
    for n in (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 130):
        ids, rows, ends = batch([1] * n)
        before = filled(tuned, n + 2, state)
        one, other = copied(before, tuned), copied(before, tuned)
        got, want = tuned.forward(ids, one, rows, ends), plain.forward(ids, other, rows, ends)
        assert error(got, want) < close, n
        assert error(one.wkv, other.wkv) < close and error(one.shift, other.shift) < close, n
        idle = [row for row in range(n + 2) if row not in rows.tolist()]
        assert torch.equal(one.wkv[:, idle], before.wkv[:, idle])
        assert torch.equal(one.shift[:, :, idle], before.shift[:, :, idle])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "lengths", [[5], [1, 7, 200, 3, 64, 65], [1, 1, 1, 90], [0, 4, 0, 1], [0, 0, 0, 1], [700, 1, 33]], ids=str
)
def test_packed_sequences_are_near_the_operators(tmp_path, dtype: torch.dtype, lengths: list[int]) -> None:
    tuned, plain, _ = models(tmp_path, dtype)
    close = 0.02 if dtype == torch.float16 else 0.1
    ids, rows, ends = batch(lengths)
    before = filled(tuned, len(lengths) + 2)
    one, other = copied(before, tuned), copied(before, tuned)
    got = tuned.forward(ids, one, rows, ends, last_only=False)
    want = plain.forward(ids, other, rows, ends, last_only=False)
    assert error(got, want) < close
    assert error(one.wkv, other.wkv) < close and error(one.shift, other.shift) < close
    last, some = tuned.forward(ids, copied(before, tuned), rows, ends), torch.tensor(lengths) > 0
    assert error(last[some], want[ends[1:][some] - 1]) < close and last[~some].isnan().all()


@pytest.mark.gpu
def test_wide_layers(tmp_path) -> None:
    """Several blocks a token, and several tokens a block; sums in slices, and whole ones."""
    tuned, plain, _ = models(tmp_path, torch.float16, WIDE)
    for lengths in ([1], *([1] * n for n in (5, 12, 30, 64, 100, 128, 300, 512, 513)), [3000, 1, 500], [600]):
        ids, rows, ends = batch(lengths)
        before = filled(tuned, len(lengths) + 2)
        one, other = copied(before, tuned), copied(before, tuned)
        got, want = tuned.forward(ids, one, rows, ends), plain.forward(ids, other, rows, ends)
        assert all(error(a, b) < 0.02 for a, b in zip(got, want, strict=True)), len(ids)
        assert error(one.wkv, other.wkv) < 0.02 and error(one.shift, other.shift) < 0.02, len(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_slices_of_every_number_in_every_tile(tmp_path, dtype: torch.dtype, monkeypatch) -> None:
    """The output and value products, which alone have slices: of 5 and 20 steps here. Others take whole sums."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    tuned, plain, _ = models(tmp_path, dtype)
    close = 0.02 if dtype == torch.float16 else 0.1
    for n in (5, 70, 270):
        ids, rows, ends = batch([1] * n)
        before = filled(tuned, n + 2)
        want = plain.forward(ids, copied(before, tuned), rows, ends)
        for tile in TILES:
            for parts in (1, 2, 3, 5, 8):
                monkeypatch.setenv("COG_RWKV_WIDE", f"{tile[0]},{tile[1]},{parts}")
                got = [tuned.forward(ids, copied(before, tuned), rows, ends) for _ in range(2)]
                assert all(error(a, b) < close for a, b in zip(got[0], want, strict=True)), (n, tile, parts)
                assert torch.equal(got[0], got[1]), (n, tile, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, n", [(SHAPE, 6), (WIDE, 5), (WIDE, 300)], ids=["6", "wide 5", "wide 300"])
@pytest.mark.acceptance(11)
def test_the_same_bytes_every_time_and_beside_others(tmp_path, shape: tiny.Shape, n: int) -> None:
    tuned, _, _ = models(tmp_path, torch.float16, shape)
    ids, rows, ends = batch([1] * n)
    before = filled(tuned, n + 2)
    first = tuned.forward(ids, copied(before, tuned), rows, ends)
    assert torch.equal(first, tuned.forward(ids, copied(before, tuned), rows, ends))
    turned = tuned.forward(ids.flip(0), copied(before, tuned), rows.flip(0), ends)
    assert torch.equal(first, turned.flip(0))


@pytest.mark.gpu
def test_padding_changes_nothing(tmp_path, monkeypatch) -> None:
    """Where the sums of a product are shared alike for both numbers of tokens."""
    monkeypatch.setenv("COG_RWKV_WIDE", "64,16,2")
    tuned, _, _ = models(tmp_path, torch.float16)
    ids, rows, ends = batch([1] * 5)
    before = filled(tuned, 7)
    alone, padded = copied(before, tuned), copied(before, tuned)
    want = tuned.forward(ids, alone, rows, ends)
    nothing = torch.full((3,), -1, device="cuda")
    got = tuned.forward(torch.cat([ids, ids[:3]]), padded, torch.cat([rows, nothing]), torch.arange(9, device="cuda"))
    assert torch.isfinite(got).all()
    assert torch.equal(got[:5], want)
    assert torch.equal(alone.wkv, padded.wkv) and torch.equal(alone.shift, padded.shift)


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.float16], ids=str)
def test_padding_and_wrong_rows_between_many_tokens(tmp_path, state: torch.dtype) -> None:
    """Blocks that go through several tokens each, some of which have no state."""
    tuned, plain, _ = models(tmp_path, torch.float16)
    ids, rows, ends = batch([1] * 700)
    before = filled(tuned, 702, state)
    one, other = copied(before, tuned), copied(before, tuned)
    some = rows.clone()
    some[::3], some[1::50] = -1, 1000
    kept = some == rows
    got = tuned.forward(ids, one, some, ends)
    want = plain.forward(ids[kept], other, rows[kept], ends[: int(kept.sum()) + 1])
    assert error(got[kept], want) < 0.02
    assert error(one.wkv, other.wkv) < 0.02
    assert torch.isfinite(got[some == -1]).all() and got[some == 1000].isnan().all()
    idle = rows[~kept]
    assert torch.equal(one.wkv[:, idle], before.wkv[:, idle])
    assert torch.equal(one.shift[:, :, idle], before.shift[:, :, idle])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_low_ranks_in_blocks_of_heads(tmp_path, dtype: torch.dtype, shape: tiny.Shape, monkeypatch) -> None:
    """Blocks that finish the low-rank projections of several tokens, as they do by themselves for few alone."""
    tuned, plain, _ = models(tmp_path, dtype, shape)
    close = 0.02 if dtype == torch.float16 else 0.1
    monkeypatch.setenv("COG_RWKV_RANKS", "1000")
    for n in (9, 17, 40, 64, 130, 320, 700):
        ids, rows, ends = batch([1] * n)
        before = filled(tuned, n + 2)
        one, other = copied(before, tuned), copied(before, tuned)
        got, want = tuned.forward(ids, one, rows, ends), plain.forward(ids, other, rows, ends)
        assert all(error(a, b) < close for a, b in zip(got, want, strict=True)), n
        assert error(one.wkv, other.wkv) < close, n
        assert torch.equal(got, tuned.forward(ids, copied(before, tuned), rows, ends)), n


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("width", [64, 192, 320, 1024, 2560, 4096, 8192])
def test_rows_of_the_embedding(width: int, dtype: torch.dtype) -> None:
    """A model without layers: what is left is the embedding, two layer norms, and a head that shows 64 channels."""
    random = torch.Generator().manual_seed(width)
    wide = torch.randn(50, width + 64, generator=random).add(3).to(dtype).cuda()
    table, count = wide[:, :width], len(wide)
    weight, bias, end = (torch.randn(width, generator=random).cuda() for _ in range(3))
    shown = torch.randperm(width, generator=random)[:64]
    head = torch.zeros(64, width)
    head[torch.arange(64), shown] = 1
    weights = [torch.ones_like(end), end, head.half().cuda()]
    functional = torch.nn.functional
    for n in (1, 7, 300, 3000):
        ids = torch.randint(0, count, (n,), generator=random)
        ids[n // 2 + 1 :: 5], ids[n // 2 + 3 :: 7] = -1, count
        shift, wkv = torch.zeros(0, 2, n, width), torch.zeros(0, n, width // 64, 64, 64)
        pool = shift.cuda(), wkv.cuda(), torch.arange(n, device="cuda")
        got = ops.forward_(ids.cuda(), table, weight, bias, weights, *pool).cpu()
        rows = functional.layer_norm(table.double(), (width,), weight.double(), bias.double())
        rows = (functional.layer_norm(rows, (width,)) + end).cpu()[:, shown]
        known = (ids >= 0) & (ids < count)
        torch.testing.assert_close(got[known].double(), rows[ids[known]], rtol=2e-3, atol=2e-3)
        assert got[~known].isnan().all(), n


@pytest.mark.gpu
def test_an_embedding_in_host_memory_gives_the_same_bytes(tmp_path) -> None:
    tuned, _, _ = models(tmp_path, torch.float16)
    found = checkpoint.load(tmp_path / "model.pth")
    other = RWKV7.load(found, "cuda", torch.float16, progress=False, host_embedding=True, tuned=True)
    assert other.embedding.device.type == "cpu"
    for lengths in ([1], [1] * 20, [70, 1, 300]):
        ids, rows, ends = batch(lengths)
        before = filled(tuned, len(lengths) + 2)
        got = [model.forward(ids, copied(before, model), rows, ends) for model in (tuned, other)]
        assert torch.equal(got[0], got[1]), lengths


@pytest.mark.gpu
def test_a_row_outside_of_the_pool_gives_nan_and_harms_nobody(tmp_path) -> None:
    tuned, _, _ = models(tmp_path, torch.float16)
    ids, rows, ends = batch([1] * 3)
    before = filled(tuned, 5)
    good, bad = copied(before, tuned), copied(before, tuned)
    want = tuned.forward(ids, good, rows, ends)
    wrong = rows.clone()
    wrong[1] = 1000
    got = tuned.forward(ids, bad, wrong, ends)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and got[1].isnan().all()
    assert torch.equal(bad.wkv[:, int(rows[1])], before.wkv[:, int(rows[1])])


@pytest.mark.gpu
def test_in_a_cuda_graph(tmp_path) -> None:
    tuned, _, _ = models(tmp_path, torch.float16)
    ids, rows, ends = batch([1] * 4)
    before = filled(tuned, 6)
    eager, replayed = copied(before, tuned), copied(before, tuned)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tuned.forward(ids, copied(before, tuned), rows, ends)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    static, where = ids.clone(), rows.clone()
    with torch.cuda.graph(graph):
        logits = tuned.forward(static, replayed, where, ends)
    replayed.wkv.copy_(before.wkv)
    replayed.shift.copy_(before.shift)
    for step in range(5):
        now = (ids + step) % 500
        static.copy_(now)
        graph.replay()
        assert torch.equal(logits, tuned.forward(now, eager, rows, ends)), step
    assert torch.equal(eager.wkv, replayed.wkv) and torch.equal(eager.shift, replayed.shift)


@pytest.mark.gpu
def test_on_a_device_that_is_not_current(tmp_path) -> None:
    """After the same on the current one, which has the same kernels."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.save(tiny.tensors(SHAPE, torch.float16), tmp_path / "model.pth")
    found = checkpoint.load(tmp_path / "model.pth")
    same = torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
    for lengths in ([1], [1] * 20, [70, 1, 3]):
        logits = []
        with torch.cuda.device(0):
            for device in ("cuda:0", "cuda:1"):
                model = RWKV7.load(found, device, torch.float16, progress=False, tuned=True)
                inputs = [t.to(device) for t in batch(lengths)]
                got = model.forward(inputs[0], StatePool(model.config, len(lengths) + 2, device), *inputs[1:])
                assert got.device == torch.device(device) and torch.cuda.current_device() == 0
                logits.append(got.cpu())
        assert error(logits[1], logits[0]) <= (0 if same else 0.02), lengths


def test_what_it_takes() -> None:
    table, norm, index = torch.zeros(100, 128), torch.zeros(128), torch.zeros(1, dtype=torch.int64)
    assert not ops.can_forward([torch.zeros(32, 128, dtype=torch.float16)]), "there is no CPU kernel"
    with pytest.raises(NotImplementedError):
        ops.forward_(index, table, norm, norm, [], torch.zeros(1, 2, 1, 128), torch.zeros(1, 1, 2, 64, 64), index)


def test_shapes_without_running() -> None:
    with torch.device("meta"):
        ids, head, norm = torch.zeros(6, dtype=torch.int64), torch.zeros(100, 128), torch.zeros(128)
        shift, wkv = torch.zeros(1, 2, 4, 128), torch.zeros(1, 4, 2, 64, 64)
        rows, ends = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        given = ids, head, norm, norm, [head], shift, wkv, rows, ends
        assert ops.forward_(*given).shape == (2, 100) and ops.forward_(*given).dtype == torch.float32
        assert ops.forward_(*given, last_only=False).shape == (6, 100)


@pytest.mark.gpu
def test_wrong_arguments_are_named(tmp_path) -> None:
    tuned, _, _ = models(tmp_path, torch.float16)
    pool, ids = StatePool(tuned.config, 2, "cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    table, norm, weights = tuned.embedding, tuned.ln0, list(tuned._weights)
    rows, begin = ids, (ids, table, *norm)
    with pytest.raises(RuntimeError, match="rows has"):
        ops.forward_(*begin, weights, pool.shift, pool.wkv, rows.expand(2))
    with pytest.raises(RuntimeError, match="cu_seqlens has"):
        ops.forward_(*begin, weights, pool.shift, pool.wkv, rows, rows)
    with pytest.raises(RuntimeError, match="weights ends before"):
        ops.forward_(*begin, weights[:-1], pool.shift, pool.wkv, rows)
    with pytest.raises(RuntimeError, match=r"layers\[0\]\.receptance"):
        ops.forward_(*begin, [w.float() if i == 3 else w for i, w in enumerate(weights)], pool.shift, pool.wkv, rows)
    with pytest.raises(RuntimeError, match="the head has dtype float32"):
        ops.forward_(*begin, [*weights[:-1], weights[-1].float()], pool.shift, pool.wkv, rows)
    moved = torch.zeros(pool.wkv.numel() + 1, device="cuda")[1:].view(pool.wkv.shape)
    with pytest.raises(RuntimeError, match="boundaries of 16 bytes"):
        ops.forward_(*begin, weights, pool.shift, moved, rows)
    with pytest.raises(RuntimeError, match="wkv must be contiguous"):
        ops.forward_(*begin, weights, pool.shift, pool.wkv.transpose(3, 4), rows)
    for wrong, message in [
        ((ids.int(), table, *norm), "ids is int32"),
        ((ids, table[:, :1], *norm), "table has shape"),
        ((ids, table.cpu(), *norm), "pageable"),
        ((ids, table.reshape(-1)[1:-319].view(-1, 320), *norm), "table must begin"),
        ((ids, table, norm[0][:5], norm[1]), "norm_weight has shape"),
        ((ids, table, norm[0], norm[1].cpu()), "norm_bias is on cpu"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.forward_(*wrong, weights, pool.shift, pool.wkv, rows)
