"""products and active_rows: every size of the step's products, against float64, with guards around what is written."""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.products import ACTIVATIONS, reference
from tests.ops.common import EPSILON

HALVES = [torch.float16, torch.bfloat16]
F16, F32 = torch.float16, torch.float32
every_dtype = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130]
COLUMNS = [32, 64, 96, 480, 2048, 4096 + 32]
# What float32 sums of k products may be off, in units of the sum of their magnitudes, up to LONG products. One product
# that is missing of 4128 is 100 times as much. Tensor cores round sums toward zero after every 16 products, so errors
# add up as k does, times sums that grow as its root.
SUM_ERROR = 2e-6
LONG = 4128

Guarded = Callable[..., Tensor]


class Fill:
    """Normal random numbers, drawn on the device itself: the sizes here take the host seconds."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return (drawn * scale).to(dtype)


def tolerance(right: Tensor, most: Tensor, k: int, activation: str, out: torch.dtype) -> Tensor:
    """What each value of a result may be off; `most`: the sums of k magnitudes, before the activation."""
    error = SUM_ERROR * max(1.0, (k / LONG) ** 0.5) * most
    if activation == "squared_relu":
        error = error * 2 * right.sqrt() + error**2
    if out != F32:
        error = error + EPSILON[out] / 2 * 1.01 * right.abs() + 2.0**-25
    return error + 1e-6 * right.abs() + 1e-7


def library_slack(x: Tensor, right: Tensor, out: torch.dtype) -> Tensor | float:
    """Beyond 8 rows cuBLAS computes without Hopper, and a result of 16 bits may be a sum of parts of 16 bits."""
    if x.is_cpu or x.shape[0] <= 8 or out == F32:
        return 0.0
    hopper = torch.cuda.get_device_capability(x.device) == (9, 0) and os.environ.get("COG_RWKV_GPU") != "plain"
    return 0.0 if hopper else 2 * EPSILON[out] * right.abs().max()


def assert_right(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, what: object) -> None:
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    right = reference.products([wide[0]], [wide[1]], [wide[2]], [activation])[0]
    sizes = [None if t is None else t.abs() for t in wide]
    most = reference.products([sizes[0]], [sizes[1]], [sizes[2]], ["none"])[0]
    allowed = tolerance(right, most, x.shape[1], activation, got.dtype) + library_slack(x, right, got.dtype)
    over = (got.double() - right).abs() > allowed
    # What a half cannot hold is infinite on both sides.
    over &= ~((got.double() == right.to(got.dtype).double()) & got.isinf())
    assert got.isfinite().all() or right.to(got.dtype).isinf().any(), what
    assert not over.any(), f"{what}: {int(over.sum())} of {over.numel()} are wrong"


def run(guard: Guarded, jobs: Sequence[tuple[Tensor, Tensor, Tensor | None, str]], float_out: bool) -> list[Tensor]:
    """The operator itself, into results full of NaN with guards around them."""
    outs = []
    for x, weight, _, _ in jobs:
        dtype = F32 if float_out else x.dtype
        empty = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=dtype, device=x.device)
        outs.append(guard(empty))
    x, weights, biases, names = (list(column) for column in zip(*jobs, strict=True))
    torch.ops.cog_rwkv.products_(x, weights, biases, [ACTIVATIONS.index(name) for name in names], outs)
    return outs


def group(fill: Fill, n: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype, guard: Guarded) -> list[tuple]:
    """A product for each (m, k): every activation, with and without a bias."""
    jobs = []
    for i, (m, k) in enumerate(sizes):
        x = guard(fill(n, k, dtype=dtype))
        weight = guard(fill(m, k, dtype=dtype, scale=2 * k**-0.5))
        bias = guard(fill(m)) if i % 2 else None
        jobs.append((x, weight, bias, ACTIVATIONS[(i + i // 4) % 4]))
    return jobs


def check_group(jobs: Sequence[tuple], outs: Sequence[Tensor]) -> None:
    for (x, weight, bias, name), out in zip(jobs, outs, strict=True):
        what = f"n={x.shape[0]} m, k={tuple(weight.shape)} {name} {out.dtype}"
        assert_right(out, x, weight, bias, name, what)


@every_dtype
@pytest.mark.parametrize("float_out", [False, True], ids=["half_out", "float_out"])
def test_every_size(dtype: torch.dtype, float_out: bool, device: str, guard: Guarded) -> None:
    fill = Fill(device)
    for n in ROWS if device == "cuda" else (1, 5, 17):
        for m in (32, 64, 4096) if device == "cuda" else (32, 96):
            for k in COLUMNS:
                jobs = group(fill, n, [(m, k)], dtype, guard)
                check_group(jobs, run(guard, jobs, float_out))


@every_dtype
def test_mixed_groups(dtype: torch.dtype, device: str, guard: Guarded) -> None:
    """What a layer needs at a time, and groups whose products have nothing in common."""
    fill = Fill(device)
    c = 1024 if device == "cuda" else 128
    layer = [(c, c)] * 3 + [(128, c), (128, c), (96, c), (480, c)]
    expand = [(c, 128), (c, 128), (c, 480), (c, 96)]
    mixed = [(32, 32), (c, 64), (96, 4 * c + 32), (64, 480), (c, c), (32, 96), (160, 2048), (64, 32)]
    for n in ROWS if device == "cuda" else (1, 9):
        for sizes in (layer, expand, mixed):
            jobs = group(fill, n, sizes, dtype, guard)
            check_group(jobs, run(guard, jobs, n % 2 == 0))


@every_dtype
@pytest.mark.gpu
def test_where_there_is_no_hopper(dtype: torch.dtype, cuda: str, guard: Guarded, monkeypatch) -> None:
    """The kernel for up to 8 tokens, and cuBLAS beyond and for weights that lie by columns."""
    monkeypatch.setenv("COG_RWKV_GPU", "plain")
    fill = Fill(cuda)
    sizes = [(32, 32), (1024, 64), (96, 4128), (64, 480), (1024, 1024), (32, 96), (160, 2048), (64, 32)]
    for n in (1, 2, 3, 5, 8, 9, 17, 130):
        jobs = group(fill, n, sizes, dtype, guard)
        check_group(jobs, run(guard, jobs, n % 2 == 0))
    for n in (5, 65):
        jobs = [(x, w.T.contiguous().T, bias, name) for x, w, bias, name in group(fill, n, sizes[:4], dtype, guard)]
        check_group(jobs, run(guard, jobs, True))


@every_dtype
@pytest.mark.gpu
def test_a_head_and_wide_columns(dtype: torch.dtype, cuda: str, guard: Guarded) -> None:
    fill = Fill(cuda)
    for n in (1, 8, 9, 32, 64, 65):
        for m, k in ((65536, 1024), (512, 16384)):
            jobs = group(fill, n, [(m, k)], dtype, guard)
            check_group(jobs, run(guard, jobs, True))


@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_a_row_is_the_same_for_up_to_8_where_there_is_no_hopper(dtype: torch.dtype, cuda: str, monkeypatch) -> None:
    """Hopper's own way is in test_products_wide.py."""
    monkeypatch.setenv("COG_RWKV_GPU", "plain")
    fill = Fill(cuda)
    for m, k in ((96, 480), (2048, 4096 + 32)):
        x, weight = fill(8, k, dtype=dtype), fill(m, k, dtype=dtype)
        whole = cog_rwkv_ops.products([x], [weight], float_out=True)[0]
        for n in range(1, 8):
            part = cog_rwkv_ops.products([x[:n].contiguous()], [weight], float_out=True)[0]
            assert torch.equal(part, whole[:n]), n


@every_dtype
@pytest.mark.parametrize("n", [2, 8, 16, 64])
@pytest.mark.parametrize("gpu", ["", "plain"])
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype, n: int, gpu: str, cuda: str, monkeypatch) -> None:
    monkeypatch.setenv("COG_RWKV_GPU", gpu)
    fill = Fill(cuda)
    for m, k in ((96, 480), (2048, 4096 + 32)):
        x, weight = fill(n, k, dtype=dtype), fill(m, k, dtype=dtype)
        whole = cog_rwkv_ops.products([x], [weight], float_out=True)[0]
        odd = x.clone()
        odd[1::2] = float("nan")
        others = cog_rwkv_ops.products([odd], [weight], float_out=True)[0]
        assert torch.equal(others[::2], whole[::2])
        assert others[1::2].isnan().all()


@every_dtype
@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_the_same_bits_every_time(dtype: torch.dtype, cuda: str, guard: Guarded) -> None:
    for n in (1, 8, 16, 33, 64):
        jobs = group(Fill(cuda), n, [(2048, 2048), (64, 2048), (2048, 96)], dtype, guard)
        first = run(guard, jobs, True)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, run(guard, jobs, True), strict=True))


@pytest.mark.parametrize("n", [1, 4, 16, 33, 65])
@pytest.mark.parametrize("gpu", ["", "plain"])
@pytest.mark.gpu
def test_a_chain_of_products_in_a_cuda_graph(n: int, gpu: str, cuda: str, monkeypatch) -> None:
    """Each input is the result before, in two buffers in turn, and kernels overlap: nobody may read or write early."""
    monkeypatch.setenv("COG_RWKV_GPU", gpu)
    fill = Fill(cuda)
    c = 1024
    weights = [fill(c, c, dtype=F16, scale=c**-0.5) for _ in range(12)]
    x, buffers = fill(n, c, dtype=F16), [torch.empty(n, c, dtype=F16, device=cuda) for _ in range(2)]
    sums = [torch.zeros(n, c, device=cuda) for _ in weights]

    def chain(wait: Callable[[], object]) -> list[Tensor]:
        y = x
        for i, weight in enumerate(weights):
            torch.ops.cog_rwkv.products_([y], [weight], [None], [1], [buffers[i % 2]])
            wait()
            y = buffers[i % 2]
            if n <= 16:
                torch.ops.cog_rwkv.active_rows_(y, weight, sums[i])
                wait()
        return [y.clone(), *(one.clone() for one in sums)]

    torch.utils.deterministic.fill_uninitialized_memory = False  # that would put other kernels between these
    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for seed in range(3):
        x.copy_(Fill(cuda, 100 + seed)(n, c, dtype=F16))
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        replayed = [one.clone() for one in got]
        wanted = chain(torch.cuda.synchronize)
        assert all(torch.equal(a, b) for a, b in zip(replayed, wanted, strict=True)), seed


@every_dtype
def test_active_rows(dtype: torch.dtype, device: str, guard: Guarded) -> None:
    fill = Fill(device)
    sizes = [(32, 32), (96, 288), (1056, 544), (4096, 1024), (16384, 4096)]
    for n in range(1, 17) if device == "cuda" else (1, 3, 16):
        for f, c in sizes if device == "cuda" else sizes[:3]:
            for share in (0.12, 0.9, 0.0, 1.0):
                drawn = torch.rand(n, f, generator=fill.generator, device=device)
                act = guard(fill(n, f, dtype=dtype) * (drawn < share))
                value_t = guard(fill(f, c, dtype=dtype))
                out = guard(torch.full((n, c), float("nan"), device=device))
                torch.ops.cog_rwkv.active_rows_(act, value_t, out)
                a, v = act.double(), value_t.double()
                error = (out.double() - reference.active_rows(a, v)).abs()
                assert (error <= SUM_ERROR * (a.abs() @ v.abs())).all(), (n, f, c, share)


@pytest.mark.gpu
@pytest.mark.acceptance(11)
def test_active_rows_beside_any_others(cuda: str) -> None:
    fill = Fill(cuda)
    value_t = fill(4096, 1024, dtype=F16)
    drawn = torch.rand(16, 4096, generator=fill.generator, device=cuda)
    act = fill(16, 4096, dtype=F16) * (drawn < 0.12)
    whole = cog_rwkv_ops.active_rows(act, value_t)
    for n in range(1, 16):
        assert torch.equal(cog_rwkv_ops.active_rows(act[:n].contiguous(), value_t), whole[:n]), n


@pytest.mark.gpu
def test_active_rows_skips_what_only_zeros_meet(cuda: str) -> None:
    """A row that is not read may hold anything."""
    value_t = Fill(cuda)(512, 256, dtype=F16)
    act = torch.zeros(3, 512, dtype=F16, device=cuda)
    act[0, 7], act[2, 300] = 1.0, 2.0
    unread = value_t.clone()
    unread[[i for i in range(512) if i not in (7, 300)]] = float("nan")
    assert torch.equal(cog_rwkv_ops.active_rows(act, unread), cog_rwkv_ops.active_rows(act, value_t))
    wanted = torch.stack([value_t[7].float(), torch.zeros(256, device=cuda), 2 * value_t[300].float()])
    assert torch.equal(cog_rwkv_ops.active_rows(act, value_t), wanted)


@pytest.mark.gpu
@pytest.mark.acceptance(10)
def test_odd_alignment_is_refused(cuda: str, guard: Guarded) -> None:
    fill = Fill(cuda)
    x, weight = fill(2, 64, dtype=F16), fill(32, 64, dtype=F16)
    out = torch.empty(2, 32, dtype=F16, device=cuda)
    for name, odd in (("x", 0), ("the weight", 1), ("out", 2)):
        first, second, third = (guard(t, 1) if i == odd else t for i, t in enumerate((x, weight, out)))
        with pytest.raises(RuntimeError, match=f"products_: product 1: {name} must lie on a 16-byte boundary"):
            torch.ops.cog_rwkv.products_([x, first], [weight, second], [None, None], [0, 0], [out.clone(), third])
    act, value_t = fill(2, 64, dtype=F16), fill(64, 32, dtype=F16)
    for a, v in ((guard(act, 1), value_t), (act, guard(value_t, 1))):
        with pytest.raises(RuntimeError, match="act and value_t must lie on 16-byte boundaries"):
            cog_rwkv_ops.active_rows(a, v)


@pytest.mark.acceptance(10)
def test_wrong_arguments_name_the_product(device: str) -> None:
    fill = Fill(device)
    x, w = fill(2, 64, dtype=F16), fill(32, 64, dtype=F16)

    def refused(message: str, xs: list, ws: list, bs: list | None = None, names: list | None = None) -> None:
        with pytest.raises(RuntimeError, match=message):
            cog_rwkv_ops.products(xs, ws, bs, names)

    refused(r"product 1: weight is bfloat16; it must have the dtype of x, float16", [x, x], [w, w.bfloat16()])
    refused(r"product 0: x is float32; it must be float16, bfloat16", [x.float()], [w.float()])
    refused(r"product 1: x has shape .3, 64.; it must be .N, K. with N as", [x, fill(3, 64, dtype=F16)], [w, w])
    refused(r"product 0: weight has shape .40, 64.; both sizes must be multiples of 32", [x], [fill(40, 64, dtype=F16)])
    refused(r"product 0: weight has shape .32, 32.; it must be .M, K. with K as in x", [x], [w[:, :32].contiguous()])
    odd = fill(32, 128, dtype=F16)[:, ::2]
    refused(r"product 0: weight, or its transpose, must be contiguous", [x], [odd])
    by_columns = fill(64, 32, dtype=F16).T
    refused(r"product 1: weight must lie as the first one does, by rows or by columns", [x, x], [w, by_columns])
    refused(r"product 0: bias is float16; it must be float32", [x], [w], [fill(32, dtype=F16)])
    refused(r"product 0: bias has shape .31.; it must be .M.", [x], [w], [fill(31)])
    refused(r"9 products; 1 to 8 make a group", [x] * 9, [w] * 9)
    refused(r"weights, biases, activations and out must be as many as x, 2", [x, x], [w])
    with pytest.raises(ValueError, match=r'activation "relu"; it must be one of none, tanh'):
        cog_rwkv_ops.products([x], [w], activations=["relu"])
    with pytest.raises(RuntimeError, match=r"act has shape .17, 64.; N must be 1 to 16"):
        cog_rwkv_ops.active_rows(fill(17, 64, dtype=F16), fill(64, 32, dtype=F16))
    with pytest.raises(NotImplementedError, match="products has no backward"):
        cog_rwkv_ops.products([x.requires_grad_()], [w])


@every_dtype
def test_opcheck_and_compile(dtype: torch.dtype, device: str) -> None:
    fill = Fill(device)
    x, w = [fill(3, 64, dtype=dtype)] * 2, [fill(96, 64, dtype=dtype), fill(32, 64, dtype=dtype)]
    outs = [torch.empty(3, 96, dtype=dtype, device=device), torch.empty(3, 32, device=device)]
    torch.library.opcheck(torch.ops.cog_rwkv.products_.default, (x, w, [None, fill(32)], [0, 3], outs))
    act, value_t = fill(3, 96, dtype=dtype), fill(96, 64, dtype=dtype)
    torch.library.opcheck(torch.ops.cog_rwkv.active_rows_.default, (act, value_t, torch.empty(3, 64, device=device)))
    torch._dynamo.reset()
    compiled = torch.compile(cog_rwkv_ops.products, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x, w), cog_rwkv_ops.products(x, w), strict=True):
        assert torch.equal(a, b)


def test_no_tokens(device: str) -> None:
    x, w = torch.empty(0, 64, dtype=F16, device=device), Fill(device)(32, 64, dtype=F16)
    assert cog_rwkv_ops.products([x], [w])[0].shape == (0, 32)
