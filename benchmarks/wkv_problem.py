"""One size of wkv4 to wkv7: arguments as a model makes them, and what is right, in float64, for two of the heads."""

import importlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

Arguments = dict[str, Tensor]
WIDTH = 64  # of a head


@dataclass(frozen=True)
class Problem:
    """``given`` are the arguments by name, ``d_y`` and ``d_end`` the gradients of y and of the state at the end."""

    op: str
    given: Arguments
    d_y: Tensor
    d_end: Tensor
    _wanted: dict[tuple[bool, bool], Arguments] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, T and H, which is C / 64 for wkv4."""
        batch, tokens, third = self.given["k"].shape[:3]
        return batch, tokens, third // WIDTH if self.op == "wkv4" else third

    def wanted(self, start: bool, end: bool) -> Arguments:
        """``y``, ``end`` and the gradient of each argument, of the heads that ``part`` takes.

        Heads do not depend on each other, and all their tokens and sequences are computed. Without ``start`` the state
        begins with nothing, without ``end`` the last one has no gradient: as in kernels that know no state.
        """
        if (start, end) not in self._wanted:
            leaves = {name: self.part(name, t).double().requires_grad_() for name, t in self.given.items()}
            d_y, d_end = self.part("y", self.d_y).double(), self.part("end", self.d_end).double()
            if not start:
                leaves["state"] = self.part("state", nothing(self.op, self.given["state"])).double().requires_grad_()
            definition = getattr(importlib.import_module(f"cog_rwkv_ops.{self.op}.reference"), self.op)
            y, last = definition(**leaves)
            gradients = torch.autograd.grad((y, last), list(leaves.values()), (d_y, d_end if end else d_end * 0))
            right = {"y": y.detach(), "end": last.detach()} | dict(zip(leaves, gradients, strict=True))
            self._wanted[start, end] = right
        return self._wanted[start, end]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The first and the last head of the argument or result ``name``."""
        heads = self.sizes[2]
        chosen = torch.tensor([0, heads - 1], device=tensor.device)
        if self.op == "wkv4":
            channels = tensor.unflatten(-1, (heads, WIDTH))
            return channels.index_select(-2, chosen).flatten(-2)
        dimension = 0 if tensor.ndim == 2 else 1 if name in ("state", "end") else 2
        return tensor.index_select(dimension, chosen)

    def error(self, found: Arguments, start: bool = True, end: bool = True) -> float:
        """The largest relative L2 error of what is in ``found``; a NaN is infinite."""
        wanted, worst = self.wanted(start, end), 0.0
        for name, tensor in found.items():
            actual, right = self.part(name, tensor).double(), wanted[name]
            difference = (actual - right).norm() / right.norm().clamp_min(1e-300)
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
        return worst


def nothing(op: str, state: Tensor) -> Tensor:
    """The state before the first token, of the shape and dtype of ``state``."""
    empty = torch.zeros_like(state)
    if op == "wkv4":
        empty[:, 2] = -1e38
    return empty


def problem(op: str, batch: int, tokens: int, heads: int, device: str = "cuda") -> Problem:
    """Random arguments: bfloat16, and float16 for wkv4, whose peers know no bfloat16."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    half = torch.float16 if op == "wkv4" else torch.bfloat16
    shape = (batch, tokens, heads * WIDTH) if op == "wkv4" else (batch, tokens, heads, WIDTH)
    tokenwise = {name: normal(*shape).to(half) for name in ("rwkv" if op in ("wkv6", "wkv7") else "rkv")}
    r, k, v = (tokenwise[name] for name in "rkv")
    if op == "wkv4":
        channels = heads * WIDTH
        state = nothing(op, normal(batch, 3, channels))
        given = {"w": normal(channels) - 1, "u": normal(channels), "k": k, "v": v, "state": state}
        return Problem(op, given, normal(*shape).to(half), torch.zeros_like(state))
    state = normal(batch, heads, WIDTH, WIDTH)
    if op == "wkv7":
        key, rate = torch.nn.functional.normalize(normal(*shape), dim=-1), torch.sigmoid(normal(*shape))
        others = {"a": (-key).to(half), "b": (key * rate).to(half), "state": state}
        given = {"r": r, "w": tokenwise["w"], "k": k, "v": v} | others
    else:
        # Peers take u in bfloat16: what it holds is representable in it.
        w = normal(heads, WIDTH) - 1.5 if op == "wkv5" else tokenwise["w"] - 1.5
        given = {"r": r, "w": w, "k": k, "v": v, "u": normal(heads, WIDTH).to(half).float(), "state": state}
    return Problem(op, given, normal(*shape).to(half), normal(*state.shape))
