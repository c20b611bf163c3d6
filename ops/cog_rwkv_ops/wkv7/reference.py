"""The definition of `wkv7` and `wkv7_`, token by token, in plain PyTorch; float64 in, float64 out."""

import math

import torch
from torch import Tensor


def decay(w: Tensor) -> Tensor:
    """From the raw `w` to the factor that a state keeps of each key: between 0.5452 (w = inf) and 1 (w = -inf)."""
    return torch.exp(-math.exp(-0.5) * torch.sigmoid(w))


def wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, H, 64] and the state [B, H, value, key] after the last token."""
    steps = []
    for t in range(r.shape[1]):
        removed = state @ a[:, t, :, :, None]
        state = (
            state * decay(w[:, t])[:, :, None, :]
            + removed * b[:, t, :, None, :]
            + v[:, t, :, :, None] * k[:, t, :, None, :]
        )
        steps.append((state @ r[:, t, :, :, None])[..., 0])
    return (torch.stack(steps, 1) if steps else r.clone()), state  # no tokens: empty, and differentiable


def wkv7_backward(d_y: Tensor, d_end: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    """The gradients of r, w, k, v, a, b and state, given those of y and of the state after the last token."""
    with torch.enable_grad():
        given = [t if t.requires_grad else t.detach().requires_grad_() for t in arguments]
        y, end = wkv7(*given)
        return torch.autograd.grad((y, end), given, (d_y, d_end), create_graph=True, materialize_grads=True)


def wkv7_(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """y [N, C] over packed sequences; `pool` [R, H, 64, 64] is updated in place."""
    y = torch.empty_like(r)
    heads = pool.shape[1]
    for row, begin, end in zip(rows.tolist(), cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        r1, w1, k1, v1, a1, b1 = (t[begin:end].view(1, end - begin, heads, 64) for t in (r, w, k, v, a, b))
        out, state = wkv7(r1, w1, k1, v1, a1, b1, pool[row : row + 1].to(r.dtype))
        y[begin:end] = out.reshape(end - begin, heads * 64)
        pool[row] = state[0].to(pool.dtype)
    return y
