"""token_shift_: cuts, ragged batches, states that are views, indices that are wrong."""

import pytest
import torch
from torch import Tensor

import cog_rwkv_ops
from tests.ops.common import FLOAT_OR_HALF
from tests.ops.model_cases import Fill

WIDTH = 50
every_dtype = pytest.mark.parametrize("dtype", FLOAT_OR_HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))


def run(x: Tensor, mix: Tensor, shift: Tensor, rows: list[int], cu_seqlens: list[int]) -> Tensor:
    indices = (torch.tensor(i, dtype=torch.int64, device=x.device) for i in (rows, cu_seqlens))
    return cog_rwkv_ops.token_shift_(x, mix, shift, *indices)


@every_dtype
@pytest.mark.acceptance(6)
def test_every_cut_of_33_tokens(dtype: torch.dtype, device: str) -> None:
    fill = Fill(device)
    x, mix, shift = fill(33, WIDTH, dtype=dtype), fill(6, WIDTH), fill(2, WIDTH)
    whole = shift.clone()
    out = run(x, mix, whole, [1], [0, 33])
    for cut in range(34):
        parts = shift.clone()
        first, second = run(x[:cut], mix, parts, [1], [0, cut]), run(x[cut:], mix, parts, [1], [0, 33 - cut])
        assert torch.equal(torch.cat([first, second], 1), out), cut
        assert torch.equal(parts, whole), cut
    assert torch.equal(whole[1], x[-1].float())
    assert torch.equal(whole[0], shift[0])


@every_dtype
@pytest.mark.acceptance(8)
def test_ragged_batches_equal_their_single_runs(dtype: torch.dtype, device: str) -> None:
    fill, lengths, rows = Fill(device), [1, 0, 7, 1, 33, 0, 200], [8, 2, 5, 0, 7, 3, 1]
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    x, mix, shift = fill(ends[-1], WIDTH, dtype=dtype), fill(1, WIDTH), fill(9, WIDTH)
    together, apart = shift.clone(), shift.clone()
    out = run(x, mix, together, rows, ends)
    for i, row in enumerate(rows):
        alone = run(x[ends[i] : ends[i + 1]], mix, apart, [row], [0, lengths[i]])
        assert torch.equal(alone, out[:, ends[i] : ends[i + 1]])
    assert torch.equal(together, apart)
    assert torch.equal(together[[2, 3, 4, 6]], shift[[2, 3, 4, 6]]), "a row without tokens was written"


@pytest.mark.acceptance(10)
def test_a_state_that_is_a_view(device: str) -> None:
    fill = Fill(device)
    x, mix = fill(3, WIDTH), fill(1, WIDTH)
    layers = fill(4, 2, 3, WIDTH)
    before = layers.clone()
    run(x, mix, layers[2, 1], [1], [0, 3])
    assert torch.equal(layers[2, 1, 1], x[-1])
    layers[2, 1, 1] = before[2, 1, 1]
    assert torch.equal(layers, before)
    run(x, mix, layers[:, 0, 0], [3], [0, 3])
    assert torch.equal(layers[3, 0, 0], x[-1])
    with pytest.raises(RuntimeError, match="cog_rwkv::token_shift_: shift must have contiguous rows"):
        run(x, mix, fill(WIDTH, 3).t(), [1], [0, 3])


@pytest.mark.parametrize(
    ("rows", "cu_seqlens", "message"),
    [
        ([0, 3], [0, 2, 5], r"rows has 3; the pool has rows 0 to 2"),
        ([1, 1], [0, 2, 5], r"rows has 1 twice"),
        ([0, 1], [1, 2, 5], r"cu_seqlens begins with 1"),
        ([0, 1], [0, 2, 4], r"cu_seqlens ends with 4"),
        ([0, 1], [0, 6, 5], r"cu_seqlens decreases from 6 to 5"),
    ],
)
def test_indices_that_are_wrong_are_named_on_the_cpu(rows: list[int], cu_seqlens: list[int], message: str) -> None:
    fill = Fill("cpu")
    shift = fill(3, WIDTH)
    before = shift.clone()
    with pytest.raises(RuntimeError, match=f"cog_rwkv::token_shift_: {message}"):
        run(fill(5, WIDTH), fill(6, WIDTH), shift, rows, cu_seqlens)
    assert torch.equal(shift, before)


@pytest.mark.gpu
def test_a_row_out_of_range_is_skipped_on_cuda(cuda: str) -> None:
    fill = Fill(cuda)
    x, mix, shift = fill(6, WIDTH), fill(2, WIDTH), fill(3, WIDTH)
    before = shift.clone()
    out = run(x, mix, shift, [7, 1, -1], [0, 2, 4, 6])
    assert out[:, [0, 1, 4, 5]].isnan().all()
    assert out[:, 2:4].isfinite().all()
    assert torch.equal(shift[[0, 2]], before[[0, 2]])
