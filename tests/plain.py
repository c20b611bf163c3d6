"""RWKV-7 as plain PyTorch, one token after the other: the yardstick for the model in any precision.

Every product and activation is in ``dtype``; the WKV state is float32, or float64 where ``dtype`` is. In float64 it is
the reference; in float16 or bfloat16 it is "a plain 16-bit torch forward", whose error ours is measured against.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

State = dict[str, Tensor]


class Plain:
    """A forward over one sequence, from published tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: str = "cpu") -> None:
        self.z = {name: t.to(device, dtype).squeeze() for name, t in tensors.items()}
        self.state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.dtype, self.device = dtype, device
        self.layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
        self.heads, self.width = tensors["blocks.0.att.r_k"].shape[0], tensors["emb.weight"].shape[1]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (self.width,), self.z[f"{name}.weight"], self.z[f"{name}.bias"])

    def zero_state(self) -> State:
        state: State = {}
        for i in range(self.layers):
            for part in ("att", "ffn"):
                state[f"{i}.{part}"] = torch.zeros(self.width, dtype=self.dtype, device=self.device)
            shape = (self.heads, 64, 64)
            state[f"{i}.wkv"] = torch.zeros(shape, dtype=self.state_dtype, device=self.device)
        return state

    def __call__(self, ids: list[int], state: State | None = None) -> tuple[Tensor, State]:
        """Logits [len(ids), vocab] in ``dtype`` and the state after the last id."""
        state = state if state is not None else self.zero_state()
        return torch.stack([self.step(token, state) for token in ids]), state

    def step(self, token: int, state: State) -> Tensor:
        x, v_first = self.norm(self.z["emb.weight"][token], "blocks.0.ln0"), None
        for i in range(self.layers):
            y, v_first = self.time_mix(i, self.norm(x, f"blocks.{i}.ln1"), v_first, state)
            x = x + y
            x = x + self.channel_mix(i, self.norm(x, f"blocks.{i}.ln2"), state)
        return self.z["head.weight"] @ self.norm(x, "ln_out")

    def channel_mix(self, i: int, x: Tensor, state: State) -> Tensor:
        ffn = f"blocks.{i}.ffn."
        xk = torch.lerp(x, state[f"{i}.ffn"], self.z[f"{ffn}x_k"])
        state[f"{i}.ffn"] = x
        return self.z[f"{ffn}value.weight"] @ torch.relu(self.z[f"{ffn}key.weight"] @ xk) ** 2

    def time_mix(self, i: int, x: Tensor, v_first: Tensor | None, state: State) -> tuple[Tensor, Tensor]:
        att = f"blocks.{i}.att."
        p = {name.removeprefix(att): t for name, t in self.z.items() if name.startswith(att)}
        xr, xw, xk, xv, xa, xg = (torch.lerp(x, state[f"{i}.att"], p[f"x_{name}"]) for name in "rwkvag")
        state[f"{i}.att"] = x
        r, k, v = p["receptance.weight"] @ xr, p["key.weight"] @ xk, p["value.weight"] @ xv
        w = p["w0"] + torch.tanh(xw @ p["w1"]) @ p["w2"]
        a = torch.sigmoid(p["a0"] + xa @ p["a1"] @ p["a2"])
        g = torch.sigmoid(xg @ p["g1"]) @ p["g2"]
        kk = functional.normalize((k * p["k_k"]).view(self.heads, 64), dim=-1, eps=1e-12)
        k = k * (1 + (a - 1) * p["k_a"])
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(p["v0"] + xv @ p["v1"] @ p["v2"])
        y = self.recurrence(i, r, w, k, v, kk, kk * a.view(self.heads, 64), state)
        y = functional.group_norm(y.view(1, -1), self.heads, p["ln_x.weight"], p["ln_x.bias"], eps=64e-5).view(-1)
        bonus = (r * k * p["r_k"].flatten()).view(self.heads, 64).sum(-1, keepdim=True) * v.view(self.heads, 64)
        return p["output.weight"] @ ((y + bonus.view(-1)) * g), v_first

    def recurrence(
        self, i: int, r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, b: Tensor, state: State
    ) -> Tensor:
        def column(t: Tensor) -> Tensor:
            return t.view(self.heads, 64, 1).to(self.state_dtype)

        decay = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=torch.float64)).item() * torch.sigmoid(column(w)))
        s = state[f"{i}.wkv"]
        s = s * decay.mT - (s @ column(kk)) @ column(b).mT + column(v) @ column(k).mT
        state[f"{i}.wkv"] = s
        return (s @ column(r)).to(self.dtype).view(-1)
