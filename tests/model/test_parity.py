"""Logits and state equal those of the PyPI ``rwkv`` package (plain torch path, float32, on the CPU)."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.plain import Plain
from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4  # relative L2
SHAPES = {
    "2x128": tiny.Shape(vocab=512),
    "3x192": tiny.Shape(layers=3, width=192, ranks=(48, 16, 32, 96), ffn=640, vocab=300, seed=11),
}


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours = ours.cpu()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.fixture(scope="module")
def peer_class():
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    precise = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    from rwkv.model import RWKV  # turns TF32 on for the whole process, which is no business of ours

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = precise
    return RWKV


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=[*SHAPES, "embedded"])
def path(request, tmp_path_factory) -> Path:
    """A checkpoint in the form that the peer reads."""
    path = tmp_path_factory.mktemp("parity") / "model.pth"
    if request.param == "embedded":
        torch.save(load_file(next((ROOT / "weights").glob("*.safetensors"))), path)
    else:
        tiny.write(SHAPES[request.param], path)
    return path


@pytest.fixture(scope="module")
def pair(path, device, peer_class):
    """Our model and the peer's, with the same weights."""
    ours = RWKV7.load(checkpoint.load(path), device, torch.float32, progress=False)
    return ours, peer_class(str(path.with_suffix("")), "cpu fp32")


def prompt(ours: RWKV7, length: int = 37) -> torch.Tensor:
    return torch.randint(0, ours.vocab_size, (length,), generator=torch.Generator().manual_seed(length))


def run(ours: RWKV7, ids: torch.Tensor, pool: StatePool, row: int = 1) -> torch.Tensor:
    ids, rows, ends = (t.to(ours.device) for t in (ids, torch.tensor([row]), torch.tensor([0, len(ids)])))
    return ours.forward(ids, pool, rows, ends, last_only=False)


def assert_state(pool: StatePool, row: int, theirs: list[torch.Tensor]) -> None:
    for layer in range(pool.wkv.shape[0]):
        assert relative(pool.shift[layer, 0, row], theirs[3 * layer]) < TOLERANCE
        assert relative(pool.wkv[layer, row], theirs[3 * layer + 1]) < TOLERANCE
        assert relative(pool.shift[layer, 1, row], theirs[3 * layer + 2]) < TOLERANCE


def test_prefill(pair) -> None:
    ours, peer = pair
    ids, pool = prompt(ours), StatePool(ours.config, 3, ours.device)
    logits = run(ours, ids, pool)
    want, state = peer.forward(ids.tolist(), None, full_output=True)
    assert relative(logits, want) < TOLERANCE
    assert_state(pool, 1, state)
    assert not pool.wkv[:, [0, 2]].any(), "a neighbour's state was written"


def test_step_by_step(pair) -> None:
    ours, peer = pair
    pool, state = StatePool(ours.config, 3, ours.device), None
    for token in prompt(ours, 20).tolist():
        logits = run(ours, torch.tensor([token]), pool)
        want, state = peer.forward([token], state)
        assert relative(logits[0], want) < TOLERANCE
    assert_state(pool, 1, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(path: Path, device: str, dtype: torch.dtype, peer_class) -> None:
    """The error against the peer's float32 is at most 1.5x that of a plain 16-bit forward."""
    ours = RWKV7.load(checkpoint.load(path), device, dtype, progress=False)
    ids = prompt(ours)
    want, _ = peer_class(str(path.with_suffix("")), "cpu fp32").forward(ids.tolist(), None, full_output=True)
    plain, _ = Plain(torch.load(path), dtype)(ids.tolist())
    assert relative(run(ours, ids, StatePool(ours.config, 3, device)), want) <= 1.5 * relative(plain, want)
