"""The definition of `wkv4`, token by token, in plain PyTorch; float64 in, float64 out."""

import torch
from torch import Tensor


def wkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y [B, T, C] and the state [B, 3, C] after the last token."""
    rate = torch.exp(w)
    a, b, p = state.unbind(1)
    steps = []
    for t in range(k.shape[1]):
        key, value = k[:, t], v[:, t]
        q = torch.maximum(p, u + key)
        before, own = torch.exp(p - q), torch.exp(u + key - q)
        steps.append((before * a + own * value) / (before * b + own))
        q = torch.maximum(p - rate, key)
        before, own = torch.exp(p - rate - q), torch.exp(key - q)
        a, b, p = before * a + own * value, before * b + own, q
    return (torch.stack(steps, 1) if steps else k.clone()), torch.stack([a, b, p], 1)


def wkv4_backward(d_y: Tensor, d_end: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
    """The gradients of w, u, k, v and state; w and u have a part for each sequence, [B, C]."""
    with torch.enable_grad():
        given = [t if t.requires_grad else t.detach().requires_grad_() for t in arguments]
        w, u, k, v, state = given
        spread = [w.expand(len(k), -1), u.expand(len(k), -1), k, v, state]
        y, end = wkv4(*spread)
        return torch.autograd.grad((y, end), spread, (d_y, d_end), create_graph=True, materialize_grads=True)
