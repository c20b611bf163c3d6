"""The operators of the model as a table: arguments made from a seed, and the definition of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cog_rwkv_ops
from cog_rwkv_ops.layer_norm import reference as layer_norm
from cog_rwkv_ops.linear import reference as linear
from cog_rwkv_ops.low_rank import reference as low_rank
from cog_rwkv_ops.squared_relu import reference as squared_relu
from cog_rwkv_ops.time_mix_output import reference as time_mix_output
from cog_rwkv_ops.time_mix_prepare import reference as time_mix_prepare
from cog_rwkv_ops.token_shift import reference as token_shift
from cog_rwkv_ops.wkv4 import reference as wkv4
from cog_rwkv_ops.wkv5 import reference as wkv5
from cog_rwkv_ops.wkv6 import reference as wkv6
from cog_rwkv_ops.wkv7 import reference as wkv7
from tests.ops.common import numbers

Arguments = dict[str, Any]
# Relative L2 errors that a result may have: rounding it once, and float32 sums in another order.
BOUND = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


# The same for the recurrences on CUDA from CHUNKED_FROM tokens of a sequence up, which tensor cores compute in chunks.
CHUNKED = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 3e-3}
CHUNKED_FROM = 64


class Case(NamedTuple):
    """An operator: `make(n, dtype, weight, device)` gives its arguments for n tokens; `written` is updated in place."""

    name: str
    make: Callable[..., Arguments]
    definition: Callable[..., Any]
    written: str = ""
    by_row: bool = False  # token t of the result depends on token t alone
    weights: bool = False  # has matrices, in a dtype of their own
    chunked: bool = False  # long sequences are computed in chunks on CUDA
    gradient: bool = True

    @property
    def call(self) -> Callable[..., Any]:
        return getattr(cog_rwkv_ops, self.name)

    @property
    def compiled(self) -> Any:
        return getattr(torch.ops.cog_rwkv, self.name).default


class Fill:
    """Random tensors, one seed after the other."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self.seed = device, seed

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        self.seed += 1
        return numbers(*shape, dtype=dtype, device=self.device, seed=self.seed, scale=scale)


def packed(lengths: list[int], device: str) -> Arguments:
    """Rows, not in order and with gaps, and cu_seqlens for sequences of these lengths."""
    rows = [(7 * i + 5) % (2 * len(lengths) + 3) for i in range(len(lengths))]
    rows = rows if len(set(rows)) == len(rows) else list(range(len(rows), 0, -1))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {"rows": torch.tensor(rows, dtype=torch.int64, device=device), "cu_seqlens": ends.to(device)}


def pool_rows(batch: Arguments) -> int:
    """How many rows a pool needs for `batch`, and two more."""
    rows = batch["rows"]
    return (int(rows.max()) if rows.numel() else 0) + 3


def ragged(n: int) -> list[int]:
    """n tokens cut into sequences of several lengths, zero too."""
    lengths = [0]
    while n > 0:
        lengths.append(min(n, 1 + len(lengths) % 5 * 3))
        n -= lengths[-1]
    return [*lengths, 0]


def make_layer_norm(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, c: int = 40) -> Arguments:
    fill = Fill(device)
    return {"x": fill(n, c, dtype=dtype, scale=3.0) + 1, "weight": fill(c), "bias": fill(c)}


def make_linear(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, k: int = 70, m: int = 38) -> Arguments:
    fill = Fill(device)
    return {"x": fill(n, k, dtype=dtype), "weight": fill(m, k, dtype=weight), "bias": fill(m)}


def make_low_rank(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    fill = Fill(device)
    matrices = {"down": fill(24, 70, dtype=weight, scale=0.1), "up": fill(38, 24, dtype=weight)}
    return {"x": fill(n, 70, dtype=dtype), **matrices, "bias": fill(38), "activation": "tanh"}


def make_squared_relu_linear(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    fill = Fill(device)
    return {"k": fill(n, 270, dtype=dtype) - 1, "weight_t": fill(270, 70, dtype=weight)}


def make_token_shift(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, c: int = 38) -> Arguments:
    fill, batch = Fill(device), packed(ragged(n), device)
    return {"x": fill(n, c, dtype=dtype), "mix": fill(6, c), "shift": fill(pool_rows(batch), c), **batch}


def make_time_mix_prepare(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, c: int = 192) -> Arguments:
    fill = Fill(device)
    names = ("k", "v", "a", "v_first", "v_mix")
    return {name: fill(n, c, dtype=dtype) for name in names} | {"k_k": fill(c), "k_a": fill(c)}


def make_time_mix_output(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, c: int = 192) -> Arguments:
    fill = Fill(device)
    activations = {name: fill(n, c, dtype=dtype) for name in ("y", "r", "k", "v", "g")}
    return activations | {name: fill(c) for name in ("r_k", "weight", "bias")}


def recurrence(fill: Fill, *shape: int, dtype: torch.dtype) -> Arguments:
    """r, w, k, v, a, b as a model makes them: a of length 1, b against it."""
    r, w, k, v = (fill(*shape, dtype=dtype) for _ in range(4))
    heads = fill(*shape).unflatten(-1, (-1, 64))
    unit = torch.nn.functional.normalize(heads, dim=-1).flatten(-2)
    b = unit * torch.rand(shape, generator=torch.Generator().manual_seed(fill.seed)).to(unit)
    return {"r": r, "w": w * 4, "k": k, "v": v, "a": -unit.to(dtype), "b": b.to(dtype)}


def make_wkv7(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    fill = Fill(device)
    inputs = recurrence(fill, 2, n, 3 * 64, dtype=dtype)
    return {name: t.view(2, n, 3, 64) for name, t in inputs.items()} | {"state": fill(2, 3, 64, 64)}


def make_wkv4(n: int, dtype: torch.dtype, weight: torch.dtype, device: str, c: int = 70) -> Arguments:
    """States of sums that are positive, as after other tokens."""
    fill = Fill(device)
    k, v, state = fill(2, n, c, dtype=dtype), fill(2, n, c, dtype=dtype), fill(2, 3, c)
    state[:, 1] = state[:, 1].abs() + 0.5
    return {"w": fill(c) - 1, "u": fill(c), "k": k, "v": v, "state": state}


def make_wkv6(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    """Decays exp(-exp(w)) from 0.99 down to 0.0006."""
    fill = Fill(device)
    r, w, k, v = (fill(2, n, 3, 64, dtype=dtype) for _ in range(4))
    return {"r": r, "w": w - 1.5, "k": k, "v": v, "u": fill(3, 64), "state": fill(2, 3, 64, 64)}


def make_wkv5(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    return make_wkv6(n, dtype, weight, device) | {"w": Fill(device, 40)(3, 64) - 1.5}


def make_wkv7_packed(n: int, dtype: torch.dtype, weight: torch.dtype, device: str) -> Arguments:
    fill, batch = Fill(device), packed(ragged(n), device)
    return recurrence(fill, n, 2 * 64, dtype=dtype) | {"pool": fill(pool_rows(batch), 2, 64, 64), **batch}


CASES = [
    Case("layer_norm", make_layer_norm, layer_norm.layer_norm, by_row=True),
    Case("linear", make_linear, linear.linear, by_row=True, weights=True),
    Case("low_rank", make_low_rank, low_rank.low_rank, by_row=True, weights=True),
    Case("squared_relu_linear", make_squared_relu_linear, squared_relu.squared_relu_linear, by_row=True, weights=True),
    Case("token_shift_", make_token_shift, token_shift.token_shift_, written="shift", gradient=False),
    Case("time_mix_prepare", make_time_mix_prepare, time_mix_prepare.time_mix_prepare, by_row=True),
    Case("time_mix_output", make_time_mix_output, time_mix_output.time_mix_output, by_row=True),
    Case("wkv4", make_wkv4, wkv4.wkv4),
    Case("wkv5", make_wkv5, wkv5.wkv5, chunked=True),
    Case("wkv6", make_wkv6, wkv6.wkv6, chunked=True),
    Case("wkv7", make_wkv7, wkv7.wkv7, chunked=True),
    Case("wkv7_", make_wkv7_packed, wkv7.wkv7_, written="pool", gradient=False),
]


def results(case: Case, call: Callable[..., Any], arguments: Arguments) -> list[Tensor]:
    """All that a call gives: what it returns, and what it wrote."""
    out = call(**arguments)
    written = [arguments[case.written]] if case.written else []
    return [*(out if isinstance(out, tuple) else (out,)), *written]


def copied(arguments: Arguments, change: Callable[[Tensor], Tensor] = torch.clone) -> Arguments:
    return {name: change(a) if isinstance(a, Tensor) else a for name, a in arguments.items()}


def expected(case: Case, arguments: Arguments) -> list[Tensor]:
    """The definition in float64, on the CPU."""
    wide = copied(arguments, lambda t: t.detach().cpu().double() if t.is_floating_point() else t.cpu())
    return results(case, case.definition, copied(wide))


def error(actual: Tensor, wanted: Tensor) -> float:
    """The relative L2 error; infinite where one has a NaN or an infinity."""
    difference = (actual.detach().cpu().double() - wanted).norm()
    size = wanted.norm()
    if size == 0 or wanted.numel() == 0:
        return float(difference)
    ratio = float(difference / size)
    return ratio if ratio == ratio else float("inf")


def bound(case: Case, dtype: torch.dtype, weight: torch.dtype, device: str) -> float:
    """What a result may be off. On CUDA a product's activations are rounded to the dtype of its matrix."""
    if case.chunked and device != "cpu":
        return CHUNKED[dtype]
    rounded = BOUND[weight] if device == "cuda" and case.weights else 0.0
    return max(BOUND[dtype], BOUND[torch.float32]) + 2 * rounded


def assert_right(case: Case, got: list[Tensor], arguments: Arguments, limit: float, where: str = "") -> None:
    """`got`, from results(), against the definition on `arguments` as they were before."""
    for i, (actual, wanted) in enumerate(zip(got, expected(case, arguments), strict=True)):
        assert actual.shape == wanted.shape
        assert error(actual, wanted) <= limit, f"{case.name} {where}: result {i}"
