"""forward_ of one token, which is one kernel on Hopper: against float64, the operators, and the kernels of several."""

import os

import pytest
import torch
from torch import Tensor

from benchmarks.engine_step import count_launches
from benchmarks.plain import Plain
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny
from tests.model.test_forward import HALVES, copied, error, filled, models

# A thread has 1 or 2 pieces of a row of 1024 channels each, and not all of them where the width is no power of two.
SHAPES = [
    tiny.Shape(layers=3, width=256, ranks=(32, 64, 32, 96), vocab=544),
    tiny.Shape(layers=2, width=768, ranks=(64, 64, 32, 128), vocab=1024),
    tiny.Shape(layers=3, width=1024, ranks=(64, 64, 32, 128), vocab=4096),
    tiny.Shape(layers=2, width=2048, ranks=(96, 96, 64, 256), vocab=544),
]
WIDTHS = [str(shape.width) for shape in SHAPES]
STATES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def one(row: int) -> Tensor:
    return torch.tensor([row], device="cuda")


def step(model: RWKV7, pool: StatePool, token: int, row: int = 1) -> Tensor:
    return model.forward(one(token), pool, one(row), torch.tensor([0, 1], device="cuda"))


class Graph:
    """A step of one token, replayed: what the engine does."""

    def __init__(self, model: RWKV7, pool: StatePool, row: int = 1) -> None:
        self.pool = pool  # the graph writes to it, whoever else keeps it
        self.ids, self.rows, self.ends = one(0), one(row), torch.tensor([0, 1], device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            model.forward(self.ids, copied(pool, model), self.rows, self.ends)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        before = copied(pool, model)
        with torch.cuda.graph(self.graph):
            self.logits = model.forward(self.ids, pool, self.rows, self.ends)
        self.launches = count_launches(self.graph.raw_cuda_graph())
        self.graph.instantiate()
        pool.wkv.copy_(before.wkv), pool.shift.copy_(before.shift)

    def step(self, token: int) -> Tensor:
        self.ids.fill_(token)
        self.graph.replay()
        return self.logits.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=WIDTHS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_near_the_operators(tmp_path, dtype: torch.dtype, shape: tiny.Shape) -> None:
    """With states of every dtype; those of other rows stay as they are."""
    tuned, plain, _ = models(tmp_path, dtype, shape)
    close = 0.02 if dtype == torch.float16 else 0.1
    for state in STATES:
        before = filled(tuned, 3, state)
        ours, theirs = copied(before, tuned), copied(before, tuned)
        for token in range(3):
            got, want = step(tuned, ours, token), step(plain, theirs, token)
            assert error(got, want) < close, (state, token)
        assert error(ours.wkv, theirs.wkv) < close and error(ours.shift, theirs.shift) < close, state
        assert torch.equal(ours.wkv[:, [0, 2]], before.wkv[:, [0, 2]])
        assert torch.equal(ours.shift[:, :, [0, 2]], before.shift[:, :, [0, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=WIDTHS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_logits_against_float64(tmp_path, dtype: torch.dtype, shape: tiny.Shape) -> None:
    """Error at most that of a plain forward in the same dtype."""
    tuned, _, tensors = models(tmp_path, dtype, shape)
    ids = list(range(3, 27))
    want, plain = Plain(tensors, torch.float64)(ids)[0], Plain(tensors, dtype)(ids)[0]
    pool = StatePool(tuned.config, 2, "cuda")
    got = torch.cat([step(tuned, pool, token) for token in ids]).cpu()
    assert error(got, want) <= error(plain, want)


@pytest.mark.gpu
@pytest.mark.acceptance(11)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=[WIDTHS[0], WIDTHS[2], WIDTHS[3]])
def test_the_same_bytes_in_every_replay(tmp_path, shape: tiny.Shape) -> None:
    """Of hundreds of replays one after the other, without a pause for the barriers' counter between them."""
    tuned, _, _ = models(tmp_path, torch.float16, shape)
    before = filled(tuned, 3)
    pool, eager = copied(before, tuned), copied(before, tuned)
    graph = Graph(tuned, pool)
    steps = [graph.step(token % 500) for token in range(200)]
    assert all(torch.equal(got, step(tuned, eager, i % 500)) for i, got in enumerate(steps))
    assert torch.equal(pool.wkv, eager.wkv) and torch.equal(pool.shift, eager.shift)
    pool.wkv.copy_(before.wkv), pool.shift.copy_(before.shift)
    assert all(torch.equal(got, graph.step(i % 500)) for i, got in enumerate(steps))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=WIDTHS)
def test_it_is_one_launch(tmp_path, shape: tiny.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is the embedding and its layer norm; and the results of many kernels are near."""
    if os.environ.get("COG_RWKV_GPU") == "plain":
        pytest.skip("the plain path has a kernel for each part of a layer")
    tuned, _, _ = models(tmp_path, torch.float16, shape)
    before = filled(tuned, 3)
    graph = Graph(tuned, copied(before, tuned))
    monkeypatch.setenv("COG_RWKV_SINGLE", "0")
    many = Graph(tuned, copied(before, tuned))
    assert graph.launches <= 2 and many.launches > shape.layers * 6
    assert error(graph.step(7), many.step(7)) < 0.02


@pytest.mark.gpu
def test_two_streams_at_once(tmp_path) -> None:
    """Two grids that each want the whole device: one waits for the other."""
    tuned, _, _ = models(tmp_path, torch.float16, SHAPES[2])
    before = filled(tuned, 3)
    pools = [copied(before, tuned) for _ in range(2)]
    graphs = [Graph(tuned, pool) for pool in pools]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(graphs[0].logits, graphs[1].logits) and torch.isfinite(graphs[0].logits).all()
    assert torch.equal(pools[0].wkv, pools[1].wkv)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [-1, 3, 1000])
def test_rows_without_a_state(tmp_path, row: int) -> None:
    """Padding does no harm, all else outside of the pool gives NaN; neither changes anything."""
    tuned, _, _ = models(tmp_path, torch.float16, SHAPES[0])
    before = filled(tuned, 3)
    pool = copied(before, tuned)
    got = step(tuned, pool, 5, row)
    assert torch.isfinite(got).all() if row == -1 else got.isnan().all()
    assert torch.equal(pool.wkv, before.wkv) and torch.equal(pool.shift, before.shift)


@pytest.mark.gpu
def test_what_is_no_number_shows(tmp_path) -> None:
    """A value that leaves the sums' range, or is none, must reach the logits: the engine looks for it there."""
    tuned, _, _ = models(tmp_path, torch.float16, SHAPES[2])
    pool = filled(tuned, 3)
    pool.shift[1, 1, 1, 7] = float("nan")
    assert step(tuned, pool, 5).isnan().any()
    pool = filled(tuned, 3)
    pool.shift[0, 1, 1] = 1e30
    assert not torch.isfinite(step(tuned, pool, 5)).all()
    assert torch.isfinite(step(tuned, filled(tuned, 3), 5)).all()
