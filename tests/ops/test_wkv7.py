"""wkv7 and wkv7_: prefill against step by step, cuts, ragged batches, pools, extremes, indices that are wrong."""

import itertools
import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.wkv7 import reference
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import BOUND, CHUNKED, CHUNKED_FROM, Arguments, Fill, copied, error, recurrence

HEADS = 2
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000]
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))
F32 = torch.float32


def inputs(n: int, device: str, dtype: torch.dtype = F32, seed: int = 0) -> Arguments:
    return recurrence(Fill(device, seed), n, HEADS * 64, dtype=dtype)


def pool(rows: int, device: str, dtype: torch.dtype = F32) -> Tensor:
    return Fill(device, 99)(rows, HEADS, 64, 64, dtype=dtype)


def in_chunks(dtype: torch.dtype, device: str, length: int) -> bool:
    """Whether a sequence of `length` tokens is computed so."""
    if device == "cpu":
        return False
    hopper = torch.cuda.get_device_capability() == (9, 0) and os.environ.get("COG_RWKV_GPU") != "plain"
    return length >= (16 if hopper and dtype != F32 else CHUNKED_FROM)


def limits(dtype: torch.dtype, device: str, length: int) -> tuple[float, float]:
    """What y and a float32 state may be off, after a sequence of `length` tokens. See CHUNKED."""
    if not in_chunks(dtype, device, length):
        return BOUND[dtype], BOUND[F32]
    return CHUNKED[dtype], CHUNKED[F32 if dtype == F32 else torch.float16]


def run(given: Arguments, states: Tensor, rows: list[int], cu_seqlens: list[int]) -> Tensor:
    indices = (torch.tensor(i, dtype=torch.int64, device=states.device) for i in (rows, cu_seqlens))
    return cog_rwkv_ops.wkv7_(**given, pool=states, **dict(zip(("rows", "cu_seqlens"), indices, strict=True)))


def wanted(given: Arguments, states: Tensor, rows: list[int], cu_seqlens: list[int]) -> tuple[Tensor, Tensor]:
    """y and the pool afterwards, in float64."""
    after = states.cpu().double().clone()
    wide = copied(given, lambda t: t.cpu().double())
    return reference.wkv7_(**wide, pool=after, rows=torch.tensor(rows), cu_seqlens=torch.tensor(cu_seqlens)), after


@every_dtype
@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.acceptance(6)
def test_prefill_equals_step_by_step(dtype: torch.dtype, start: str, device: str) -> None:
    for n in LENGTHS:
        given = inputs(n, device, dtype, seed=n)
        states = pool(3, device) if start == "random" else torch.zeros(3, HEADS, 64, 64, device=device)
        y_wanted, after = wanted(given, states, [1], [0, n])
        whole, stepped = states.clone(), states.clone()
        y = run(given, whole, [1], [0, n])
        steps = [run({k: v[t : t + 1] for k, v in given.items()}, stepped, [1], [0, 1]) for t in range(n)]
        y_limit, state_limit = limits(dtype, device, n)
        assert error(y, y_wanted) <= y_limit, n
        assert error(whole, after) <= state_limit, n
        if not in_chunks(dtype, device, n):
            assert torch.equal(y, torch.cat(steps)), n
            assert torch.equal(whole, stepped), n
        else:
            assert error(torch.cat(steps), y_wanted) <= BOUND[dtype], n
            assert error(stepped, after) <= BOUND[F32], n


@pytest.mark.acceptance(6)
def test_every_cut_of_33_tokens(device: str) -> None:
    """Equal for a float32 pool only: one of 16 bits is rounded at the end of every call, so at every cut."""
    given, states = inputs(33, device), pool(2, device)
    whole = states.clone()
    y = run(given, whole, [0], [0, 33])
    for cut in range(34):
        parts = states.clone()
        first = run({k: v[:cut] for k, v in given.items()}, parts, [0], [0, cut])
        second = run({k: v[cut:] for k, v in given.items()}, parts, [0], [0, 33 - cut])
        assert torch.equal(torch.cat([first, second]), y), cut
        assert torch.equal(parts, whole), cut


@every_dtype
@pytest.mark.acceptance(8)
def test_ragged_batches_equal_their_single_runs(dtype: torch.dtype, device: str) -> None:
    lengths = [1, 0, 7, 16, 33, 0, 200]
    for order in (lengths, lengths[::-1], [lengths[i] for i in (3, 0, 6, 2, 5, 1, 4)]):
        ends = [sum(order[:i]) for i in range(len(order) + 1)]
        rows = [8, 2, 5, 0, 7, 3, 1]
        given, states = inputs(ends[-1], device, dtype), pool(9, device)
        together, apart = states.clone(), states.clone()
        y = run(given, together, rows, ends)
        for i, row in enumerate(rows):
            alone = run({k: v[ends[i] : ends[i + 1]] for k, v in given.items()}, apart, [row], [0, order[i]])
            assert torch.equal(alone, y[ends[i] : ends[i + 1]])
        assert torch.equal(together, apart)
        for row in (2, 3, 4, 6) if order is lengths else (4, 6):
            assert torch.equal(together[row], states[row]), "a row without tokens was written"
        assert error(y, wanted(given, states, rows, ends)[0]) <= limits(dtype, device, max(lengths))[0]


@every_dtype
@pytest.mark.parametrize("stored", FLOAT_OR_HALF[1:], ids=str)
@pytest.mark.acceptance(9)
def test_a_pool_of_16_bits_is_rounded_once_a_call(
    dtype: torch.dtype, stored: torch.dtype, device: str, guard: Callable[..., Tensor]
) -> None:
    """y and the state are those of a float32 pool, bit for bit, but for one rounding at the end."""
    for n, shift in itertools.product((1, 2, 33, 70), (0, 1)):  # on a 16-byte boundary, and off it
        given, rows, ends = inputs(2 * n, device, dtype, seed=n), [3, 0, 2], [0, n, n, 2 * n]
        states = guard(pool(4, device, stored), shift)
        before, exact = states.clone(), states.float()
        y_wanted, after = wanted(given, states, rows, ends)
        y, y_float32 = run(given, states, rows, ends), run(given, exact, rows, ends)
        assert error(y, y_wanted) <= limits(dtype, device, n)[0]
        assert error(states, after) <= BOUND[stored] + limits(dtype, device, n)[1]
        assert torch.equal(y, y_float32)
        assert torch.equal(states, exact.to(stored))
        assert torch.equal(states[1], before[1]), "a row that no sequence has was written"


def test_a_16_bit_state_rounds_at_its_limits(device: str) -> None:
    """Infinities, and ties to even, as in a conversion by torch."""
    given = {name: torch.zeros_like(t) for name, t in inputs(1, device).items()}
    given["w"] -= math.inf  # the state stays
    given["k"][:, 0] = 1.0  # but for its first key
    values = torch.tensor([65504.0, 65519.0, 65520.0, -1e6, 2049.0, 2051.0, 1e-8, 6e-8, 257.0, 259.0, math.inf])
    given["v"][0, : len(values)] = values.to(device)
    for stored in FLOAT_OR_HALF[1:]:
        states = torch.zeros(1, HEADS, 64, 64, dtype=stored, device=device)
        run(given, states, [0], [0, 1])
        assert torch.equal(states[0, 0, : len(values), 0].cpu(), values.to(stored))


def test_a_pool_of_another_dtype_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="cog_rwkv::wkv7_: pool is float64; it must be float32, float16, bfloat16"):
        run(inputs(1, device), pool(1, device, torch.float64), [0], [0, 1])


@pytest.mark.acceptance(10)
def test_a_pool_that_is_a_view(device: str, guard) -> None:
    given = inputs(5, device)
    layers = Fill(device)(4, 3, HEADS, 64, 64)
    padded = Fill(device)(3, HEADS + 1, 64, 64)
    views = {"pool[3]": layers[3], "every second": layers.flatten(0, 1)[::2], "rows with gaps": padded[:, :HEADS]}
    for name, states in views.items():
        before = states.clone()
        y = run(given, states, [2], [0, 5])
        y_wanted, after = wanted(given, before, [2], [0, 5])
        assert error(y, y_wanted) <= BOUND[F32], name
        assert error(states, after) <= BOUND[F32], name
    for shift in (0, 1):  # on a 16-byte boundary, and off it
        states = guard(pool(3, device), shift)
        y_wanted, after = wanted(given, states, [1], [0, 5])
        assert error(run(given, states, [1], [0, 5]), y_wanted) <= BOUND[F32]
        assert error(states, after) <= BOUND[F32]


@pytest.mark.acceptance(10)
def test_a_pool_that_cannot_be_written_in_place_is_refused(device: str) -> None:
    given, states = inputs(5, device), pool(3, device)
    with pytest.raises(RuntimeError, match="cog_rwkv::wkv7_: pool must have contiguous rows"):
        run(given, states.transpose(2, 3), [1], [0, 5])
    with pytest.raises(RuntimeError, match="cog_rwkv::wkv7_: pool must not overlap itself"):
        run(given, states[:1].expand(3, -1, -1, -1), [1], [0, 5])


@every_dtype
def test_functional_and_packed_agree(dtype: torch.dtype, device: str) -> None:
    given, states = inputs(34, device, dtype), pool(2, device)
    before = states.clone()
    y, after = cog_rwkv_ops.wkv7(*(t.view(2, 17, HEADS, 64) for t in given.values()), states)
    assert torch.equal(states, before), "the functional operator wrote its argument"
    packed = run(given, states, [0, 1], [0, 17, 34])
    assert torch.equal(packed, y.view(34, -1))
    assert torch.equal(states, after)


@every_dtype
@pytest.mark.parametrize("w", [-20.0, 20.0, -math.inf, math.inf, 0.0])
@pytest.mark.acceptance(7)
def test_extreme_decays_and_zero_keys(dtype: torch.dtype, w: float, device: str) -> None:
    given = inputs(65, device, dtype)
    given["w"] = torch.full_like(given["w"], w)
    for name in ("k", "a", "b"):
        given[name][::3] = 0
    states = pool(2, device)
    y_wanted, after = wanted(given, states, [0], [0, 65])
    y = run(given, states, [0], [0, 65])
    assert y.isfinite().all()
    assert states.isfinite().all()
    y_limit, state_limit = limits(dtype, device, 65)
    assert error(y, y_wanted) <= y_limit
    assert error(states, after) <= state_limit


@every_dtype
def test_keys_that_are_alike(dtype: torch.dtype, device: str) -> None:
    """Cosine .9 between what tokens look up: where inverting a chunk by repeated squaring fails."""
    given, n = inputs(200, device, dtype), 200
    fill = Fill(device, 7)
    unit = torch.nn.functional.normalize(fill(1, HEADS, 64) + 0.33 * fill(n, HEADS, 64), dim=-1).flatten(1)
    given |= {"k": (3 * unit).to(dtype), "a": -unit.to(dtype), "b": (0.95 * unit).to(dtype), "w": given["w"] - 8}
    states = pool(1, device)
    y_wanted, after = wanted(given, states, [0], [0, n])
    y_limit, state_limit = limits(dtype, device, n)
    assert error(run(given, states, [0], [0, n]), y_wanted) <= 2 * y_limit
    assert error(states, after) <= 2 * state_limit


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("heads", [1, 20, 50, 200])
def test_any_share_of_a_head_in_a_block_on_cuda(dtype: torch.dtype, heads: int, cuda: str) -> None:
    """Few heads: several blocks each. Many: one. Beside every number of multiprocessors."""
    given = make_many(heads, cuda, dtype)
    y, after = cog_rwkv_ops.wkv7(**given)
    y_wanted, state_wanted = reference.wkv7(**copied(given, lambda t: t.double()))
    y_limit, state_limit = limits(dtype, cuda, 100)
    assert error(y, y_wanted.cpu()) <= y_limit
    assert error(after, state_wanted.cpu()) <= state_limit


def make_many(heads: int, device: str, dtype: torch.dtype, tokens: int = 100) -> Arguments:
    fill = Fill(device)
    flat = recurrence(fill, 2 * tokens, heads * 64, dtype=dtype)
    return {name: t.view(2, tokens, heads, 64) for name, t in flat.items()} | {"state": fill(2, heads, 64, 64)}


def test_the_decay_lies_in_its_bounds(device: str) -> None:
    for w, decay in [(-math.inf, 1.0), (-200.0, 1.0), (math.inf, math.exp(-math.exp(-0.5))), (20.0, 0.5452392)]:
        given = {name: torch.zeros_like(t) for name, t in inputs(1, device).items()}
        given["w"] += w
        states = torch.ones(1, HEADS, 64, 64, device=device)
        run(given, states, [0], [0, 1])
        assert states.min() == states.max()
        assert states.max().item() == pytest.approx(decay, rel=2e-7)


@pytest.mark.parametrize(
    ("rows", "cu_seqlens", "message"),
    [
        ([0, 3], [0, 2, 5], r"rows has 3; the pool has rows 0 to 2"),
        ([-1, 0], [0, 2, 5], r"rows has -1; the pool has rows 0 to 2"),
        ([1, 1], [0, 2, 5], r"rows has 1 twice"),
        ([0, 1], [1, 2, 5], r"cu_seqlens begins with 1; it must begin with 0"),
        ([0, 1], [0, 2, 4], r"cu_seqlens ends with 4; it must end with the number of tokens, 5"),
        ([0, 1], [0, 6, 5], r"cu_seqlens decreases from 6 to 5"),
        ([0, 1], [0, 5], r"cu_seqlens has shape \[2\]; it must be \[B \+ 1\] with B as in rows = \[3\]"),
        ([], [0], r"cu_seqlens ends with 0; it must end with the number of tokens, 5"),
    ],
)
def test_indices_that_are_wrong_are_named_on_the_cpu(rows: list[int], cu_seqlens: list[int], message: str) -> None:
    states = pool(3, "cpu")
    before = states.clone()
    with pytest.raises(RuntimeError, match=f"cog_rwkv::wkv7_: {message}"):
        run(inputs(5, "cpu"), states, rows, cu_seqlens)
    assert torch.equal(states, before)


@pytest.mark.gpu
def test_a_row_out_of_range_is_skipped_on_cuda(cuda: str) -> None:
    given, states = inputs(6, cuda), pool(3, cuda)
    before = states.clone()
    y = run(given, states, [7, 1, -1], [0, 2, 4, 6])
    assert y[:2].isnan().all()
    assert y[4:].isnan().all()
    assert torch.equal(states[[0, 2]], before[[0, 2]])
    assert error(y[2:4], wanted({k: v[2:4] for k, v in given.items()}, before, [1], [0, 2])[0]) <= BOUND[F32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cu_seqlens", "written"),
    [
        ([1, 3, 5], slice(1, 5)),  # tokens before the first sequence and after the last
        ([0, 2, 9], slice(0, 2)),  # a sequence that ends behind the last token
        ([-1, 2, 4], slice(2, 4)),
        ([5, 2, 2], slice(0, 0)),
        ([0], slice(0, 0)),
    ],
)
def test_tokens_of_no_sequence_are_nan_on_cuda(cu_seqlens: list[int], written: slice, cuda: str) -> None:
    y = run(inputs(6, cuda), pool(3, cuda), [2, 1][: len(cu_seqlens) - 1], cu_seqlens).cpu()
    assert y[written].isfinite().all()
    y[written] = math.nan
    assert y.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("row", "cu_seqlens"), [(1, [0, 100]), (1, [20, 90]), (1, [3, 40]), (1, [0, 200]), (7, [10, 100])], ids=str
)
def test_one_sequence_among_many_tokens_on_cuda(row: int, cu_seqlens: list[int], cuda: str) -> None:
    """It alone is computed in one launch, whatever its length; what is not in it, or has no state, is NaN."""
    given, states = inputs(100, cuda), pool(3, cuda)
    before = states.clone()
    y = run(given, states, [row], cu_seqlens)
    begin, end = cu_seqlens if row < 3 and cu_seqlens[1] <= 100 else (0, 0)
    assert y[:begin].isnan().all() and y[end:].isnan().all()
    assert torch.equal(states[[0, 2]], before[[0, 2]])
    if begin == end:
        assert torch.equal(states, before)
        return
    want, after = wanted({k: v[begin:end] for k, v in given.items()}, before, [1], [0, end - begin])
    off, state_off = limits(F32, cuda, len(y))
    assert error(y[begin:end], want) <= off
    assert error(states[1], after[1]) <= state_off


@pytest.mark.acceptance(9)
@pytest.mark.parametrize(("removal", "sizes"), [(0.0, (1e-4, 2e-2, 2e-1)), (0.5, (5e-6, 4e-3, 3e-2))])
def test_error_of_a_state_in_each_dtype_over_8192_steps(
    removal: float, sizes: tuple[float, float, float], device: str
) -> None:
    """Decay 0.9999, rounded after each step as in decoding: what the operator's documentation says, within 2x or so."""
    n, fill = 8192, Fill("cpu", 5)
    r, k, v = (fill(n, 64) for _ in range(3))
    kk = torch.nn.functional.normalize(k, dim=-1)
    given = {"r": r, "w": torch.full_like(r, -8.7), "k": k, "v": v, "a": -kk, "b": kk * removal}
    steps = copied(given, lambda t: t.view(1, n, 1, 64).double())
    exact = reference.wkv7(**steps, state=torch.zeros(1, 1, 64, 64, dtype=torch.float64))[1]
    on_device = copied(given, lambda t: t.to(device))
    tokens = [{name: t[i : i + 1] for name, t in on_device.items()} for i in range(n)]
    row, ends = torch.tensor([0], device=device), torch.tensor([0, 1], device=device)
    errors = []
    for stored in FLOAT_OR_HALF:
        states = torch.zeros(1, 1, 64, 64, dtype=stored, device=device)
        for token in tokens:
            cog_rwkv_ops.wkv7_(**token, pool=states, rows=row, cu_seqlens=ends)
        errors.append(error(states, exact))
    for found, size in zip(errors, sizes, strict=True):
        assert found <= size
    float32, float16, bfloat16 = errors
    assert 20 * float32 < float16, "a float16 state is not rounded at every step"
    assert 4 * float16 < bfloat16, "a bfloat16 state is not rounded at every step"


@pytest.mark.acceptance(9)
def test_a_long_memory_stays_exact(device: str) -> None:
    """1,000 steps with decay near 0.9999: the error against float64 is that of float32."""
    n = 1000
    given = inputs(n, device)
    given["w"] = torch.full_like(given["w"], -8.7)
    states = torch.zeros(1, HEADS, 64, 64, device=device)
    y_wanted, after = wanted(given, states, [0], [0, n])
    assert error(run(given, states, [0], [0, n]), y_wanted) <= 2e-5
    assert error(states, after) <= 2e-5
