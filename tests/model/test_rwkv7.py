"""The model's own promises: any cut, batch, row and order of a text gives the same logits and state."""

import pytest
import torch

from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny
from tests.heap import left_by

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000)
# Relative L2 difference between two ways to run the same text. On the CPU there is none, bit for bit. On CUDA the
# library's matrix product chooses its order of sums by shape, and another sum may be rounded to another 16-bit number.
DIFFERENCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES = [("cpu", None), *(pytest.param(("cuda", dtype), marks=pytest.mark.gpu) for dtype in DIFFERENCE)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request, tmp_path_factory) -> RWKV7:
    device, dtype = request.param
    path = tiny.write(tiny.Shape(vocab=512), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    return RWKV7.load(checkpoint.load(path), device, dtype, progress=False)


def ids_of(model: RWKV7, length: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + length)
    return torch.randint(0, model.vocab_size, (length,), generator=random).to(model.device)


def forward(model: RWKV7, sequences: list[torch.Tensor], pool: StatePool, rows: list[int], last_only: bool = False):
    ends = torch.tensor([0] + [len(s) for s in sequences]).cumsum(0)
    rows_ = torch.tensor(rows, device=model.device)
    return model.forward(torch.cat(sequences), pool, rows_, ends.to(model.device), last_only)


def random_pool(model: RWKV7, rows: int, seed: int = 1) -> StatePool:
    pool = StatePool(model.config, rows, model.device)
    random = torch.Generator().manual_seed(seed)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=random))
    pool.shift.copy_(torch.randn(pool.shift.shape, generator=random))
    return pool


def assert_equal(model: RWKV7, got: torch.Tensor, want: torch.Tensor) -> None:
    if model.device.type == "cpu":
        assert torch.equal(got, want)
    else:
        assert (got - want).norm() <= DIFFERENCE[model.dtype] * want.norm()


@pytest.mark.acceptance(6)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", ["zero", "random"])
def test_prefill_equals_step_by_step(model: RWKV7, length: int, start: str) -> None:
    make = StatePool if start == "zero" else random_pool
    one, other = (make(model.config, 2, model.device) if start == "zero" else make(model, 2) for _ in range(2))
    ids = ids_of(model, length)
    whole = forward(model, [ids], one, [1])
    steps = torch.cat([forward(model, [token], other, [1]) for token in ids.split(1)])
    assert_equal(model, steps, whole)
    assert_equal(model, other.wkv, one.wkv)
    assert_equal(model, other.shift, one.shift)


@pytest.mark.acceptance(6)
def test_every_cut_of_33_tokens(model: RWKV7) -> None:
    ids = ids_of(model, 33)
    want_pool = random_pool(model, 2)
    want = forward(model, [ids], want_pool, [1])
    for cut in range(1, 33):
        pool = random_pool(model, 2)
        got = torch.cat([forward(model, [part], pool, [1]) for part in (ids[:cut], ids[cut:])])
        assert_equal(model, got, want)
        assert_equal(model, pool.wkv, want_pool.wkv)


@pytest.mark.acceptance(8)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 17])
def test_a_batch_equals_single_runs(model: RWKV7, batch: int) -> None:
    lengths = [(1, 7, 16, 33, 200)[i % 5] for i in range(batch)]
    sequences = [ids_of(model, length, seed=i) for i, length in enumerate(lengths)]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(batch)).tolist()
    pool = random_pool(model, batch + 1)
    together = forward(model, [sequences[i] for i in order], pool, order, last_only=True)
    single = random_pool(model, batch + 1)
    for place, i in enumerate(order):
        alone = forward(model, [sequences[i]], single, [i], last_only=True)
        assert_equal(model, together[place : place + 1], alone)
    assert_equal(model, pool.wkv, single.wkv)
    assert_equal(model, pool.shift, single.shift)
    # every second one drops out; the rest go on
    rest = order[::2]
    together = forward(model, [sequences[i][:1] for i in rest], pool, rest, last_only=True)
    for place, i in enumerate(rest):
        alone = forward(model, [sequences[i][:1]], single, [i], last_only=True)
        assert_equal(model, together[place : place + 1], alone)


@pytest.mark.acceptance(9)
def test_saving_and_loading_half_way_changes_nothing(model: RWKV7) -> None:
    ids, pool = ids_of(model, 64), random_pool(model, 3)
    want = forward(model, [ids], random_pool(model, 3), [1])[32:]
    forward(model, [ids[:32]], pool, [1])
    saved = pool.save(1)
    pool.clear(1)
    assert not pool.wkv[:, 1].any() and not pool.shift[:, :, 1].any()
    pool.load(2, saved)
    assert_equal(model, forward(model, [ids[32:]], pool, [2]), want)


@pytest.mark.acceptance(11)
def test_a_row_used_again_starts_clean(model: RWKV7) -> None:
    pool = StatePool(model.config, 1, model.device)
    a, b = ids_of(model, 40), ids_of(model, 33)
    first = forward(model, [a], pool, [0])
    pool.clear(0)
    forward(model, [b], pool, [0])
    pool.clear(0)
    again = forward(model, [a], pool, [0])
    assert torch.equal(first, again)


@pytest.mark.acceptance(12)
@pytest.mark.parametrize("length", [1, 3])
def test_a_step_leaves_nothing_on_the_heap(model: RWKV7, length: int) -> None:
    pool, ids = StatePool(model.config, 2, model.device), ids_of(model, length)
    assert left_by(lambda: forward(model, [ids, ids], pool, [1, 0], last_only=True)) < 16


def test_a_pool_needs_a_row(model: RWKV7) -> None:
    with pytest.raises(ValueError, match="rows"):
        StatePool(model.config, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_embedding_in_host_memory_changes_nothing(tmp_path, device: str) -> None:
    found = checkpoint.load(tiny.write(tiny.Shape(vocab=512), tmp_path / "tiny.safetensors"))
    logits = []
    for on_host in (False, True):
        model = RWKV7.load(found, device, torch.float16, progress=False, host_embedding=on_host)
        assert (model.embedding.device.type, model.embedding.is_pinned()) == (
            ("cpu", device == "cuda") if on_host else (device, False)
        )
        ids = ids_of(model, 33)
        logits.append(forward(model, [ids[:20], ids[20:]], StatePool(model.config, 2, model.device), [0, 1]))
    assert torch.equal(*logits)
