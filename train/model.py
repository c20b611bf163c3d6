"""RWKV-7 in plain PyTorch with autograd: the published layout, the time mix in chunked form.

Time mix, a head at a time (state S [value, key], raw w, decay d = exp(-exp(-0.5) sigmoid(w))):

    S <- S diag(d) + (S a) b' + v k',   y = S r,   a = -kk, b = kk * in-context rate     (arXiv:2503.14456)

`chunked` computes the same in chunks of 16 tokens. With g the cumulative log-decay measured from the chunk's middle
(so that no factor leaves e^-4.9 .. e^4.9), every token's effect inside the chunk is a masked product, and a chunk
maps the state by S' -> M S' + N. Only that map is serial; all else is batched over the chunks.

Documents start on chunk boundaries: `keep` is 0 there, which cuts both the state and the token shift.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 16
DECAY_LIMIT = -0.6065306597126334  # -exp(-0.5): the log-decay at sigmoid(w) = 1
HEAD = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the low ranks are free."""

    layers: int = 8
    width: int = 256
    vocab: int = 4096
    decay_rank: int = 32
    a_rank: int = 32
    v_rank: int = 16
    gate_rank: int = 64


@torch.library.custom_op("cog_rwkv_train::scan", mutates_args=())
def scan(m: Tensor, n: Tensor, start: Tensor) -> Tensor:
    """States at chunk boundaries: p[0] = start, p[i+1] = m[i] p[i] + n[i].

    m, n: [T, X, D, D]; start: [X, D, D]; returns [T + 1, X, D, D]. All float32.
    """
    p = torch.empty(m.shape[0] + 1, *start.shape, dtype=start.dtype, device=start.device)
    p[0] = start
    for i in range(m.shape[0]):
        torch.baddbmm(n[i], m[i], p[i], out=p[i + 1])
    return p


@scan.register_fake
def _(m: Tensor, n: Tensor, start: Tensor) -> Tensor:
    return m.new_empty(m.shape[0] + 1, *start.shape)


@torch.library.custom_op("cog_rwkv_train::scan_backward", mutates_args=())
def scan_backward(m: Tensor, p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of m, gradient of n) of `scan`; its start is data, not differentiated."""
    grad_n = torch.empty_like(m)
    grad_n[-1] = grad[-1]
    for i in range(m.shape[0] - 1, 0, -1):
        torch.baddbmm(grad[i], m[i].mT, grad_n[i], out=grad_n[i - 1])
    return grad_n @ p[:-1].mT, grad_n


@scan_backward.register_fake
def _(m: Tensor, p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(m), torch.empty_like(m)


def _scan_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_m, grad_n = scan_backward(*ctx.saved_tensors, grad.contiguous())
    return grad_m, grad_n, None


scan.register_autograd(_scan_grad, setup_context=_scan_setup)


def chunked(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """WKV-7 over [B, T, H, 64] inputs, T a multiple of 16, from `state` [B, H, 64, 64] (value, key).

    keep: [B, T / 16], 0 where a chunk starts from a zero state, else 1. Returns (y [B, T, H, 64], the last state).
    """
    batch, length, heads, size = r.shape
    count = length // CHUNK

    def split(x: Tensor) -> Tensor:  # [B, T, H, D] -> [count, B * H, 16, D]
        x = x.reshape(batch, count, CHUNK, heads, size).permute(1, 0, 3, 2, 4)
        return x.reshape(count, batch * heads, CHUNK, size)

    r, w, k, v, a, b = (split(x) for x in (r, w, k, v, a, b))
    log_decay = DECAY_LIMIT * torch.sigmoid(w)
    total = log_decay.cumsum(-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    inclusive, last = total - middle, total[..., -1:, :]
    fresh = keep.t().repeat_interleave(heads, 1)[..., None, None]  # [count, B * H, 1, 1]
    from_start, to_end = middle.exp() * fresh, (last - middle).exp()
    r_in, a_in = r * inclusive.exp(), a * (inclusive - log_decay).exp()
    k_in, b_in = k * (-inclusive).exp(), b * (-inclusive).exp()

    within = torch.cat([r_in, a_in], -2) @ torch.cat([k_in, b_in], -2).mT  # [.., 32, 32]
    r_k, r_b = within[..., :CHUNK, :CHUNK].tril(), within[..., :CHUNK, CHUNK:].tril()
    a_k, a_b = within[..., CHUNK:, :CHUNK].tril(-1), within[..., CHUNK:, CHUNK:].tril(-1)
    eye = torch.eye(CHUNK, dtype=r.dtype, device=r.device)
    solved = torch.linalg.solve_triangular(
        eye - a_b, torch.cat([a_in * from_start, a_k @ v], -1), upper=False, unitriangular=True
    )
    through = r_b @ solved  # [.., 16, 2 D]: what of the state, and of the values, reaches the output through b
    reads, own = r_in * from_start + through[..., :size], r_k @ v + through[..., size:]
    step = (b_in * to_end).mT @ solved
    transition = step[..., :size] + torch.diag_embed((last.exp() * fresh).squeeze(-2))
    inflow = step[..., size:] + (k_in * to_end).mT @ v

    states = scan(transition, inflow, state.reshape(batch * heads, size, size).mT.contiguous())
    y = reads @ states[:-1] + own
    y = y.reshape(count, batch, heads, CHUNK, size).permute(1, 0, 3, 2, 4)
    return y.reshape(batch, length, heads, size), states[-1].mT.reshape(batch, heads, size, size)


def recurrent(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition of `chunked`, token by token; any T (keep then covers ceil(T / 16) chunks)."""
    decay, outputs = torch.exp(DECAY_LIMIT * torch.sigmoid(w)), []
    for t in range(r.shape[1]):
        if t % CHUNK == 0:
            state = state * keep[:, t // CHUNK, None, None, None]
        removed = (state @ a[:, t].unsqueeze(-1)) * b[:, t].unsqueeze(-2)
        state = state * decay[:, t].unsqueeze(-2) + removed + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ r[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def previous(x: Tensor, carry: Tensor, inside: Tensor) -> Tensor:
    """x [B, T, C] shifted by one token: `carry` [B, C] first, zero at document starts (inside [B, T] is 0 there)."""
    return torch.cat([carry[:, None], x[:, :-1]], 1) * inside[..., None]


class TimeMix(nn.Module):
    """The attention's stand-in. Parameter names and shapes are the published ones."""

    x_r: nn.Parameter
    x_w: nn.Parameter
    x_k: nn.Parameter
    x_v: nn.Parameter
    x_a: nn.Parameter
    x_g: nn.Parameter
    w0: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter
    a0: nn.Parameter
    a1: nn.Parameter
    a2: nn.Parameter
    v0: nn.Parameter
    v1: nn.Parameter
    v2: nn.Parameter
    receptance: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(self, shape: Shape, first: bool) -> None:
        super().__init__()
        width = shape.width
        self.heads = width // HEAD
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, width)))
        ranks = {"w": shape.decay_rank, "a": shape.a_rank, "v": shape.v_rank}
        for name in "wa" if first else "wav":
            self.register_parameter(f"{name}0", nn.Parameter(torch.zeros(1, 1, width)))
            self.register_parameter(f"{name}1", nn.Parameter(torch.zeros(width, ranks[name])))
            self.register_parameter(f"{name}2", nn.Parameter(torch.zeros(ranks[name], width)))
        self.g1 = nn.Parameter(torch.zeros(width, shape.gate_rank))
        self.g2 = nn.Parameter(torch.zeros(shape.gate_rank, width))
        self.k_k, self.k_a = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 1, width))
        self.r_k = nn.Parameter(torch.zeros(self.heads, HEAD))
        for name in ("receptance", "key", "value", "output"):
            self.add_module(name, nn.Linear(width, width, bias=False))
        self.ln_x = nn.GroupNorm(self.heads, width, eps=64e-5)

    def forward(
        self, x: Tensor, shift: Tensor, state: Tensor, v_first: Tensor | None, keep: Tensor, inside: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(output [B, T, C], v_first, new state) of normalised x; shift [B, C] is the token before."""
        batch, length, width = x.shape
        heads = (batch, length, self.heads, HEAD)
        delta = previous(x, shift, inside) - x
        r_in, w_in, k_in, v_in, a_in, g_in = (
            x + delta * p for p in (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)
        )
        r, k, v = (f(one).to(x.dtype) for f, one in ((self.receptance, r_in), (self.key, k_in), (self.value, v_in)))
        w = self.w0 + (torch.tanh(w_in @ self.w1) @ self.w2).to(x.dtype)
        rate = torch.sigmoid(self.a0 + ((a_in @ self.a1) @ self.a2).to(x.dtype)).view(heads)
        gate = torch.sigmoid(g_in @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v0 + ((v_in @ self.v1) @ self.v2).to(x.dtype))
        kk = F.normalize((k * self.k_k).view(heads), dim=-1)
        k = k.view(heads) * (1 + (rate - 1) * self.k_a.view(self.heads, HEAD))
        r, v = r.view(heads), v.view(heads)
        with torch.autocast(x.device.type, enabled=False):
            wkv = chunked if length % CHUNK == 0 else recurrent
            y, state = wkv(r, w.view(heads), k, v, -kk, kk * rate, state, keep)
            y = self.ln_x(y.reshape(batch * length, width)).view(heads) + (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.output(y.reshape(batch, length, width) * gate), v_first, state


class ChannelMix(nn.Module):
    """Squared-ReLU network of four times the width behind a token shift."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.key = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.value = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, shift: Tensor, inside: Tensor) -> Tensor:
        """The network of normalised x [B, T, C]; shift [B, C] is the token before."""
        return self.value(torch.relu(self.key(x + (previous(x, shift, inside) - x) * self.x_k)) ** 2)


class Block(nn.Module):
    """One layer: time mix, then channel mix, each behind a layer norm and added to x [B, T, C]; the first has ln0."""

    def __init__(self, shape: Shape, first: bool) -> None:
        super().__init__()
        if first:
            self.ln0 = nn.LayerNorm(shape.width)
        self.ln1, self.ln2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.att, self.ffn = TimeMix(shape, first), ChannelMix(shape)

    def forward(
        self, x: Tensor, shift: Tensor, state: Tensor, v_first: Tensor | None, keep: Tensor, inside: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """shift: [2, B, C], the last normalised inputs of both mixes. Returns (x, v_first, shift, state)."""
        if v_first is None:
            x = self.ln0(x)
        one = self.ln1(x)
        mixed, v_first, state = self.att(one, shift[0], state, v_first, keep, inside)
        x = x + mixed
        two = self.ln2(x)
        x = x + self.ffn(two, shift[1], inside)
        return x, v_first, torch.stack([one[:, -1], two[:, -1]]), state


class RWKV7(nn.Module):
    """The network; its state_dict is the published checkpoint layout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.emb = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, i == 0) for i in range(shape.layers))
        self.ln_out = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def zero_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """(shift [L, 2, B, C], wkv [L, B, H, 64, 64]), all zero: what a new document starts from."""
        layers, width, like = self.shape.layers, self.shape.width, self.ln_out.weight
        shift = torch.zeros(layers, 2, batch, width, dtype=like.dtype, device=like.device)
        return shift, torch.zeros(layers, batch, width // HEAD, HEAD, HEAD, dtype=like.dtype, device=like.device)

    def forward(
        self, ids: Tensor, state: tuple[Tensor, Tensor], starts: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Hidden states [B, T, C] before the head, and the new state; starts [B, T] marks first tokens of documents."""
        batch, length = ids.shape
        x = self.emb(ids)
        inside = torch.ones(batch, length, dtype=x.dtype, device=x.device) if starts is None else 1 - starts.to(x.dtype)
        keep = inside[:, ::CHUNK].contiguous()
        v_first, shifts, states = None, [], []
        for block, shift, wkv in zip(self.blocks, *state, strict=True):
            x, v_first, new_shift, new_wkv = block(x, shift, wkv, v_first, keep, inside)
            shifts.append(new_shift)
            states.append(new_wkv)
        return self.ln_out(x), (torch.stack(shifts), torch.stack(states))
