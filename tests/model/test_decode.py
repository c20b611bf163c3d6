"""ops.decode_: a step of the whole model in one call has the bits of the same step by its parts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops as ops
from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Arguments = tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RWKV7:
    path = tiny.write(tiny.Shape(layers=3, vocab=517), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    return RWKV7.load(checkpoint.load(path), "cpu", request.param, progress=False)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pool_of(model: RWKV7, rows: int, dtype: torch.dtype = torch.float32) -> StatePool:
    pool, random = StatePool(model.config, rows, "cpu", dtype), torch.Generator().manual_seed(rows)
    pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=random))
    pool.shift.copy_(torch.randn(pool.shift.shape, generator=random))
    return pool


def step(model: RWKV7, n: int, pool: StatePool) -> Tensor:
    random = torch.Generator().manual_seed(n)
    ids, rows = torch.randint(0, model.vocab_size, (n,), generator=random), torch.randperm(n + 2, generator=random)[:n]
    return model.forward(ids, pool, rows, torch.arange(n + 1))


def arguments(model: RWKV7, n: int = 2) -> Arguments:
    pool = pool_of(model, n + 2)
    return torch.ones(n, model.config.width), list(model._weights), pool.shift, pool.wkv, torch.arange(n)


@pytest.mark.parametrize("state", DTYPES, ids=str)
@pytest.mark.acceptance(8)
def test_equals_the_parts(model: RWKV7, state: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 2, 3, 5, 17, 260):
        whole, parts = pool_of(model, n + 2, state), pool_of(model, n + 2, state)
        got = step(model, n, whole)
        with monkeypatch.context() as by_parts:
            by_parts.setattr(ops, "can_decode", lambda x: False)
            right = step(model, n, parts)
        assert torch.equal(got, right), n
        assert torch.equal(whole.wkv, parts.wkv), n
        assert torch.equal(whole.shift, parts.shift), n


@pytest.mark.acceptance(8)
def test_number_of_threads_changes_nothing(model: RWKV7, threads: None) -> None:
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        pool = pool_of(model, 7)
        results.append((step(model, 5, pool), pool.wkv, pool.shift))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_no_sequence_at_all(model: RWKV7) -> None:
    assert ops.decode_(*arguments(model, 0)).shape == (0, model.vocab_size)


def test_opcheck(model: RWKV7) -> None:
    with torch.no_grad():
        torch.library.opcheck(torch.ops.cog_rwkv.decode_.default, arguments(model))


def test_arguments_that_do_not_fit_are_named(model: RWKV7) -> None:
    x, weights, shift, wkv, rows = arguments(model)
    cases: list[tuple[Arguments, str]] = [
        ((x.double(), weights, shift, wkv, rows), "x is float64; it must be float32"),
        ((x[:, :100], weights, shift, wkv, rows), r"x has shape \[2, 100\]; C must be a multiple of 64"),
        ((x, weights[:-1], shift, wkv, rows), "weights ends before head"),
        ((x, [*weights, x], shift, wkv, rows), r"weights has \d+ tensors; the layers of shift and the head need \d+"),
        (
            (x, [weights[0][:5], *weights[1:]], shift, wkv, rows),
            r"layers\[0\]\.ln1\.weight has shape \[5\]; it must be",
        ),
        ((x, weights, shift[:, :1], wkv, rows), r"shift has shape .*; it must be \[layers, 2, R, C\]"),
        ((x, weights, shift, wkv.double(), rows), "wkv is float64; it must be float32"),
        ((x, weights, shift, wkv.transpose(3, 4), rows), "wkv must be contiguous: it is written in place"),
        ((x, weights, shift, wkv, rows + 3), r"rows has 4; the pool has rows 0 to 3"),
        ((x, weights, shift, wkv, rows * 0), "rows has 0 twice"),
        ((x, weights, shift, wkv, rows[:1]), r"rows has shape \[1\]; it must be \[B\] with B as in x"),
    ]
    for given, message in cases:
        with pytest.raises(RuntimeError, match=f"cog_rwkv::decode_: {message}"):
            ops.decode_(*given)
    with pytest.raises(NotImplementedError, match=r"cog_rwkv_ops\.decode_ has no backward"):
        ops.decode_(x.clone().requires_grad_(), weights, shift, wkv, rows)
