"""The definition of `norm_shift_`, in plain PyTorch."""

from torch import Tensor
from torch.nn.functional import layer_norm


def norm_shift_(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mix: Tensor,
    shift: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(x + delta [N, C], [M, N, C]: each normalised token moved towards the one before it by `mix`); `shift` is
    updated in place. Everything in the dtype of `x` (give float64 for a reference)."""
    total = x if delta is None else x + delta
    normed = layer_norm(total, total.shape[1:], weight.to(x.dtype), bias.to(x.dtype), eps)
    before = normed.roll(1, 0)
    for row, begin, end in zip(rows.tolist(), cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if begin < end:
            before[begin] = shift[row].to(x.dtype)
            shift[row] = normed[end - 1].to(shift.dtype)
    return total, normed + (before - normed) * mix.to(x.dtype)[:, None]
