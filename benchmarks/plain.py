"""RWKV-7 as plain PyTorch: the yardstick for the model in any precision.

Every product and activation is in ``dtype``; the WKV state is float32, or float64 where ``dtype`` is. In float64 it is
the reference; in float16 or bfloat16 it is "a plain 16-bit torch forward", whose error ours is measured against.
Shapes: B sequences of T tokens, C = width = heads * 64. A layer takes all tokens at once, save for the recurrence.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

State = dict[str, Tensor]


class Plain:
    """A forward from published tensors."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``state_dtype`` is what the WKV state is rounded to between calls (never where ``dtype`` is float64)."""
        # Stored as they come and cast where they are used: a float64 copy of a large model would not fit beside it.
        self.z = {name: t.to(device).squeeze() for name, t in tensors.items()}
        self.wkv_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.state_dtype = torch.float64 if dtype == torch.float64 else state_dtype
        self.dtype, self.device = dtype, device
        self.layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        self.heads, self.width = tensors["blocks.0.att.r_k"].shape[0], tensors["emb.weight"].shape[1]

    def __call__(self, ids: Sequence[int], state: State | None = None) -> tuple[Tensor, State]:
        """One sequence: logits [len(ids), vocab] in ``dtype`` and the state after the last id."""
        state = state if state is not None else self.zero_state()
        return self.forward(torch.tensor([ids], device=self.device), state)[0], state

    def zero_state(self, batch: int = 1) -> State:
        """The state of ``batch`` empty contexts: ``N.att`` and ``N.ffn`` [B, C], ``N.wkv`` [B, heads, 64, 64]."""
        state: State = {}
        for i in range(self.layers):
            for part in ("att", "ffn"):
                state[f"{i}.{part}"] = torch.zeros(batch, self.width, dtype=self.dtype, device=self.device)
            shape = (batch, self.heads, 64, 64)
            state[f"{i}.wkv"] = torch.zeros(shape, dtype=self.state_dtype, device=self.device)
        return state

    @torch.no_grad()
    def forward(self, ids: Tensor, state: State, last_only: bool = False) -> Tensor:
        """ids int64 [B, T] -> logits [B, T, vocab], or [B, vocab] of the last tokens; ``state`` is updated."""
        x, v_first = self.norm(self.w("emb.weight", ids), "blocks.0.ln0"), None
        for i in range(self.layers):
            y, v_first = self.time_mix(i, self.norm(x, f"blocks.{i}.ln1"), v_first, state)
            x = x + y
            x = x + self.channel_mix(i, self.norm(x, f"blocks.{i}.ln2"), state)
        return self.norm(x[:, -1] if last_only else x, "ln_out") @ self.w("head.weight").T

    def w(self, name: str, rows: Tensor | None = None) -> Tensor:
        """A tensor, or rows of it, in ``dtype``."""
        return (self.z[name] if rows is None else self.z[name][rows]).to(self.dtype)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The layer norm ``name`` over the last dimension."""
        return functional.layer_norm(x, (self.width,), self.w(f"{name}.weight"), self.w(f"{name}.bias"))

    def channel_mix(self, i: int, x: Tensor, state: State) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        ffn = f"blocks.{i}.ffn."
        xk = torch.lerp(x, _before(x, state, f"{i}.ffn"), self.w(f"{ffn}x_k"))
        return torch.relu(xk @ self.w(f"{ffn}key.weight").T) ** 2 @ self.w(f"{ffn}value.weight").T

    def time_mix(self, i: int, x: Tensor, v_first: Tensor | None, state: State) -> tuple[Tensor, Tensor]:
        """x [B, T, C] -> (output [B, T, C], value of the first layer [B, T, C])."""
        att = f"blocks.{i}.att."
        p = {name.removeprefix(att): self.w(name) for name in self.z if name.startswith(att)}
        before = _before(x, state, f"{i}.att")
        xr, xw, xk, xv, xa, xg = (torch.lerp(x, before, p[f"x_{name}"]) for name in "rwkvag")
        r, k, v = xr @ p["receptance.weight"].T, xk @ p["key.weight"].T, xv @ p["value.weight"].T
        w = p["w0"] + torch.tanh(xw @ p["w1"]) @ p["w2"]
        a = torch.sigmoid(p["a0"] + xa @ p["a1"] @ p["a2"])
        g = torch.sigmoid(xg @ p["g1"]) @ p["g2"]
        kk = functional.normalize(self.by_head(k * p["k_k"]), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * p["k_a"])
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(p["v0"] + xv @ p["v1"] @ p["v2"])
        y = self.recurrence(i, r, w, k, v, kk, kk * self.by_head(a), state)
        groups = y.reshape(-1, self.width)
        y = functional.group_norm(groups, self.heads, p["ln_x.weight"], p["ln_x.bias"], eps=64e-5).view_as(x)
        bonus = self.by_head(r * k * p["r_k"].flatten()).sum(-1, keepdim=True) * self.by_head(v)
        return ((y + bonus.view_as(x)) * g) @ p["output.weight"].T, v_first

    def by_head(self, t: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, heads, 64]."""
        return t.view(*t.shape[:-1], self.heads, 64)

    def recurrence(
        self, i: int, r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, b: Tensor, state: State
    ) -> Tensor:
        """One token after the other; kk and b are [B, T, heads, 64], the others and the result [B, T, C]."""
        decay = torch.exp(-0.6065306597126334 * torch.sigmoid(w.to(self.wkv_dtype)))  # exp(-1/2)
        vectors = (self.by_head(t) if t.dim() == 3 else t for t in (r, decay, k, v, kk, b))
        columns = [t.to(self.wkv_dtype).unsqueeze(-1).unbind(1) for t in vectors]
        s, out = state[f"{i}.wkv"].to(self.wkv_dtype), []
        for r_t, w_t, k_t, v_t, kk_t, b_t in zip(*columns, strict=True):
            s = s * w_t.mT - (s @ kk_t) @ b_t.mT + v_t @ k_t.mT
            out.append((s @ r_t).to(self.dtype).flatten(1))
        state[f"{i}.wkv"] = s.to(self.state_dtype)
        return torch.stack(out, 1)


def _before(x: Tensor, state: State, name: str) -> Tensor:
    """The token before each of x [B, T, C]; the first one's comes from ``state``, where the last is kept."""
    before = torch.cat([state[name].unsqueeze(1), x[:, :-1]], 1)
    state[name] = x[:, -1]
    return before
