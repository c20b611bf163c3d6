"""Precision: against float64, with weights rigged to overflow 16 bits, and over thousands of steps."""

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.plain import Plain
from cog_rwkv_ops.wkv7 import reference
from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS = [int(i) for i in torch.randint(0, 500, (48,), generator=torch.Generator().manual_seed(3))]


def load(path, tensors: dict[str, Tensor], device: str, dtype: torch.dtype) -> RWKV7:
    torch.save(tensors, path)
    return RWKV7.load(checkpoint.load(path), device, dtype, progress=False)


def logits_of(model: RWKV7, ids: list[int]) -> Tensor:
    pool = StatePool(model.config, 1, model.device)
    rows, ends = torch.tensor([0], device=model.device), torch.tensor([0, len(ids)], device=model.device)
    return model.forward(torch.tensor(ids, device=model.device), pool, rows, ends, last_only=False).cpu()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_against_float64(tmp_path, device: str, dtype: torch.dtype) -> None:
    """Error at most 1.5x that of a plain forward in the same dtype, and the same token where the margin is clear."""
    tensors = tiny.tensors(tiny.Shape(vocab=512), dtype)
    got = logits_of(load(tmp_path / "model.pth", tensors, device, dtype), IDS)
    exact, plain = Plain(tensors, torch.float64)(IDS)[0], Plain(tensors, dtype)(IDS)[0]
    assert error(got, exact) <= 1.5 * error(plain, exact)
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 2 * (plain.double() - exact).abs().amax()
    assert clear.any()
    assert torch.equal(got.argmax(-1)[clear], exact.argmax(-1)[clear])


def rigged(ranks: tuple[int, int, int, int] = (32, 32, 16, 64)) -> dict[str, Tensor]:
    """Sums past 65,504: projections of 512 ones by 200, a key of 300 squared. Decays of -20, 20, -inf; a zero key."""
    tensors = tiny.tensors(tiny.Shape(width=512, ranks=ranks, vocab=512), torch.float32)
    for layer in range(2):
        block = f"blocks.{layer}."
        for norm in ("ln1", "ln2"):
            tensors[f"{block}{norm}.weight"] *= 0.05
            tensors[f"{block}{norm}.bias"] = torch.ones(512)
        for name in ("receptance", "key", "value", "output"):
            tensors[f"{block}att.{name}.weight"][64:128] = 200.0
        tensors[f"{block}att.key.weight"][:64] = 0.0
        tensors[f"{block}att.w2"][:, :3] = 0.0
        tensors[f"{block}att.w0"][..., :3] = torch.tensor([-20.0, 20.0, -torch.inf])
        tensors[f"{block}att.g2"][:, 128:192] = 4000.0
        tensors[f"{block}ffn.key.weight"][:256] = 300 / 512
    return {name: t.to(torch.bfloat16) for name, t in tensors.items()}


@pytest.mark.acceptance(7)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_rigged_past_the_range_of_float16(tmp_path, device: str, dtype: torch.dtype) -> None:
    tensors = rigged()
    got = logits_of(load(tmp_path / "model.pth", tensors, device, dtype), IDS)
    assert torch.isfinite(got).all()
    exact = Plain(tensors, torch.float64)(IDS)[0]
    plain = Plain(tensors, torch.bfloat16)(IDS)[0]
    assert torch.isfinite(plain).all(), "the yardstick itself overflowed"
    assert error(got, exact) <= 2 * error(plain, exact)
    squares = torch.relu(tensors["blocks.0.ffn.key.weight"].float() @ torch.ones(512)) ** 2
    projection = tensors["blocks.0.att.key.weight"].float() @ torch.ones(512)
    assert squares.max() > 65504 and projection.max() > 65504, "nothing was past the range"


@pytest.mark.acceptance(9)
@pytest.mark.parametrize("device", DEVICES)
def test_error_of_the_state_over_8192_steps(device: str) -> None:
    """Decay near 0.9999: the pool's error against float64 stays within 2x that of a float32 state of plain torch."""
    steps, random = 8192, torch.Generator().manual_seed(5)
    r, k, v, a = (torch.randn(1, steps, 1, 64, generator=random) for _ in range(4))
    w = torch.full_like(r, -8.7)  # exp(-0.6065 * sigmoid(-8.7)) = 0.9999
    kk = torch.nn.functional.normalize(k, dim=-1)
    inputs = (r, w, k, v, -kk, kk * torch.sigmoid(a))
    state = torch.zeros(1, 1, 64, 64)
    exact = reference.wkv7(*(t.double() for t in inputs), state.double())[1]
    float32 = reference.wkv7(*inputs, state)[1]
    pool = torch.zeros(2, 1, 64, 64, device=device)
    flat = [t.reshape(steps, 64).to(device) for t in inputs]
    rows = torch.tensor([1], device=device)
    for low in (0, steps // 2):  # saved and reloaded half way, through a copy
        cut = [t[low : low + steps // 2] for t in flat]
        ops.wkv7_(*cut, pool, rows, torch.tensor([0, steps // 2], device=device))
        pool = pool.clone()
    assert error(pool[1].cpu(), exact[0]) <= 2 * error(float32[0], exact[0])
