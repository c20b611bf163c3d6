"""The definition of `wkv6`, token by token, in plain PyTorch; float64 in, float64 out."""

import torch
from torch import Tensor


def wkv6(r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, H, 64] and the state [B, H, value, key] after the last token."""
    decay = torch.exp(-torch.exp(w))
    steps = []
    for t in range(r.shape[1]):
        new = v[:, t, :, :, None] * k[:, t, :, None, :]
        steps.append(((state + u[:, None, :] * new) @ r[:, t, :, :, None])[..., 0])
        state = state * decay[:, t, :, None, :] + new
    return (torch.stack(steps, 1) if steps else r.clone()), state  # no tokens: empty, and differentiable


def wkv6_backward(d_y: Tensor, d_end: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    """The gradients of r, w, k, v, u and state; u has a part for each sequence, [B, H, 64]."""
    with torch.enable_grad():
        given = [t if t.requires_grad else t.detach().requires_grad_() for t in arguments]
        batch = given[0].shape[0]
        shared = (4,)
        spread = [t.expand(batch, *t.shape) if i in shared else t for i, t in enumerate(given)]
        y, end = _each_sequence(*spread)
        return torch.autograd.grad((y, end), spread, (d_y, d_end), create_graph=True, materialize_grads=True)


def _each_sequence(r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """wkv6 where each sequence has a u of its own."""
    rows = [wkv6(r[i : i + 1], w[i : i + 1], k[i : i + 1], v[i : i + 1], u[i], state[i : i + 1]) for i in range(len(r))]
    if not rows:
        return r.clone(), state.clone()
    y, end = zip(*rows, strict=True)
    return torch.cat(y), torch.cat(end)
