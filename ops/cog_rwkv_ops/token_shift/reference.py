"""The definition of `token_shift_`, in plain PyTorch."""

import torch
from torch import Tensor


def token_shift_(x: Tensor, mix: Tensor, shift: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[M, N, C]: each token of `x` moved towards the one before it by `mix`; `shift` is updated in place."""
    before = torch.empty_like(x, dtype=shift.dtype)
    for row, begin, end in zip(rows.tolist(), cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if begin == end:
            continue
        before[begin] = shift[row]
        before[begin + 1 : end] = x[begin : end - 1].to(shift.dtype)
        shift[row] = x[end - 1].to(shift.dtype)
    return x + (before - x) * mix[:, None]
