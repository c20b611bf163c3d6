"""Other packages' kernels for the recurrences of RWKV-4 to 7, each behind the same few calls.

script/bench-peers gets the packages that requirements-peers.txt and requirements-tilelang.txt name. How each keeps its
decay, its state and its gradients is said at its function; what it computes is checked against our definition before
its time counts.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch._functorch.config as functorch
from torch import Tensor

from benchmarks.cuda_source import CudaSource
from benchmarks.op_cases import Missing
from benchmarks.wkv_problem import Arguments, Problem

SOURCES = {
    ("rwkv", "wkv4"): "cuda/operators.cu",
    ("rwkv", "wkv5"): "cuda/rwkv5.cu",
    ("rwkv", "wkv6"): "cuda/rwkv6.cu",
    ("rwkv", "wkv7"): "cuda/rwkv7.cu",
    ("rwkv_ops", "wkv6"): "rwkv6_kernel/torch_cuda_kernel/wkv6_cuda.cu",
    ("rwkv_ops", "wkv7"): "rwkv7_kernel/torch_cuda_kernel/wkv7_cuda.cu",
    ("rwkvserve", "wkv7"): "models/rwkv7/operators/cuda/wkv7_cuda.cu",
    ("rwkvserve", "inference"): "models/rwkv7/operators/cuda/wkv7s.cu",
}
SPAN = 8  # tokens that torch.compile sees at a time: it unrolls the loop over tokens


@dataclass(frozen=True)
class Kernels:
    """What a package has for one problem.

    Each call gives results by name, gradients by that of the argument. A state that is kept in place is right at the
    first call alone. ``start`` and ``end`` tell whether the package takes a state and the gradient of the last one, and
    ``decay`` what it takes for a raw w.
    """

    forward: Callable[[], Arguments]
    backward: Callable[[], Arguments] | None = None
    start: bool = True
    end: bool = True
    decay: Callable[[Tensor], Tensor] = field(default=lambda w: w)

    def of_raw(self, raw: Tensor, found: Arguments) -> Arguments:
        """``found`` with the gradient of the package's w carried on to that of the raw one."""
        if "w" not in found:
            return found
        leaf = raw.detach().float().requires_grad_()
        (d_w,) = torch.autograd.grad(self.decay(leaf), leaf, found["w"].float().reshape(leaf.shape))
        return found | {"w": d_w}


def log_decay_7(w: Tensor) -> Tensor:
    """The log of wkv7's decay."""
    return -math.exp(-0.5) * torch.sigmoid(w.float())


def twice_log_7(w: Tensor) -> Tensor:
    """What stands for w where the decay is exp(-exp(w)): the same decay as ours."""
    return torch.log(-log_decay_7(w))


def decay_5(w: Tensor) -> Tensor:
    """The decay of wkv5 and wkv6."""
    return torch.exp(-torch.exp(w.float()))


def _source(package: str, which: str) -> CudaSource:
    return CudaSource(package, SOURCES[package, which])


def _flat_sizes(p: Problem) -> tuple[int, int, int, int]:
    batch, tokens, heads = p.sizes
    return batch, tokens, heads * 64, heads


def rwkv(p: Problem) -> Kernels:
    """PyPI rwkv: forward only, states in place. 5, 6 and 7 have one state for all sequences, so B must be 1."""
    g, k = p.given, p.given["k"]
    y = torch.empty_like(k)
    if p.op != "wkv4" and p.sizes[0] > 1:
        raise Missing("its kernels have one state for all sequences: B = 1 only")
    library = _source("rwkv", p.op)
    if p.op == "wkv4":
        states = [t.clone(memory_format=torch.contiguous_format) for t in g["state"].unbind(1)]
        tensors = [-torch.exp(g["w"]), g["u"], k, g["v"], y, *states]
        return _forward_only(y, lambda: library("cuda_wkv_forwardI6__halfEv", *k.shape, *tensors))
    state = g["state"].clone()
    if p.op == "wkv7":
        w = twice_log_7(g["w"]).to(k.dtype)
        tensors = [state, g["r"], w, k, g["v"], g["a"], g["b"], y]
    else:
        tensors = [state, g["r"], k, g["v"], decay_5(g["w"]), g["u"].to(k.dtype), y]
    return _forward_only(y, lambda: library("cuda_forward_bf16", *_flat_sizes(p), *tensors))


def _forward_only(y: Tensor, call: Callable[[], None]) -> Kernels:
    def forward() -> Arguments:
        call()
        return {"y": y}

    return Kernels(forward)


def rwkv_ops(p: Problem) -> Kernels:
    """PyPI rwkv-ops: wkv7 with a state, wkv6 without: with one it keeps that in bfloat16, and has no backward."""
    if p.op == "wkv7":
        return _backstepping(p, _source("rwkv_ops", "wkv7"), start=True)
    library = _source("rwkv_ops", "wkv6")
    g, sizes = p.given, _flat_sizes(p)
    ins = [g["r"], g["k"], g["v"], g["w"], g["u"].to(torch.bfloat16)]
    y, outs = torch.empty_like(g["r"]), [torch.empty_like(g["r"]) for _ in range(4)]
    d_u = g["r"].new_empty(sizes[0], sizes[3], 64)

    def forward() -> Arguments:
        library("cuda_forward_bf16", *sizes, *ins, y)
        return {"y": y}

    def backward() -> Arguments:
        library("cuda_backward_bf16", *sizes, *ins, p.d_y, *outs, d_u)
        return dict(zip("rkvw", outs, strict=True))

    return Kernels(forward, backward, start=False, end=False)


def rwkvserve(p: Problem) -> Kernels:
    """PyPI rwkvserve, its kernels for training, which begin from nothing."""
    return _backstepping(p, _source("rwkvserve", "wkv7"), start=False)


def rwkvserve_inference(p: Problem) -> Kernels:
    """PyPI rwkvserve, its kernel for inference: the state in place."""
    library = _source("rwkvserve", "inference")
    g, y = p.given, torch.empty_like(p.given["r"])
    w, state = twice_log_7(g["w"]).to(y.dtype), g["state"].clone()
    tensors = [state, g["r"], w, g["k"], g["v"], g["a"], g["b"], y]
    return _forward_only(y, lambda: library("cuda_forward_bf16", *_flat_sizes(p), *tensors))


def _backstepping(p: Problem, library: CudaSource, start: bool) -> Kernels:
    """wkv7 whose forward keeps a state in 16 tokens, from which the backward steps back.

    The last state gets no gradient: rwkv-ops 0.11.3 adds one to the transposed sum as it is, so that its gradients of
    w, k and b are wrong by a quarter.
    """
    g, sizes = p.given, p.sizes
    batch, tokens, heads = sizes
    ins = [twice_log_7(g["w"]).to(g["r"].dtype), *(g[name] for name in "rkvab")]
    y = torch.empty_like(g["r"])
    kept = y.new_empty(batch, heads, tokens // 16, 64, 64, dtype=torch.float32)
    looked_up = y.new_empty(y.shape, dtype=torch.float32)
    d_state, no_end = torch.empty_like(g["state"]), torch.zeros_like(g["state"])
    gradients = [torch.empty_like(y) for _ in range(6)]

    def forward() -> Arguments:
        library("cuda_forward", *sizes, *ins, y, kept, looked_up, *([g["state"]] if start else []))
        return {"y": y}

    def backward() -> Arguments:
        states = [no_end, d_state] if start else []
        library("cuda_backward", *sizes, *ins, p.d_y, kept, looked_up, *states, *gradients)
        found = dict(zip("wrkvab", gradients, strict=True))
        return found | {"state": d_state} if start else found

    forward()
    return Kernels(forward, backward, start, False, twice_log_7)


def flash_linear_attention(p: Problem) -> Kernels:
    """PyPI flash-linear-attention (its operators alone are fla-core): states as [key, value], decays as logs.

    Without ``lower_bound`` its wkv7 takes a path that is slower and serves any decay.
    """
    try:
        from fla.ops.rwkv4 import fused_recurrent_rwkv4
        from fla.ops.rwkv6 import chunk_rwkv6
        from fla.ops.rwkv7 import chunk_rwkv7
    except ImportError as error:
        raise Missing(f"not installed: {error} (script/bench-peers)") from None
    leaves = _leaves(p.given)
    if p.op == "wkv4":
        _replace(leaves, "state", leaves["state"][:, :, None])

        def fourth() -> tuple[Tensor, Tensor]:
            y, end = fused_recurrent_rwkv4(**leaves)
            return y, end[:, :, 0]

        return _by_autograd(p, fourth, leaves, lambda w: w)
    _turn_state(leaves)
    options = {"scale": 1.0, "initial_state": leaves["state"], "output_final_state": True}
    if p.op == "wkv7":
        _replace(leaves, "w", log_decay_7(leaves["w"]).to(torch.bfloat16))
        seventh = partial(chunk_rwkv7, *(leaves[name] for name in "rwkvab"), lower_bound=-0.6065, **options)
        return _by_autograd(p, seventh, leaves, log_decay_7, turned=True)
    _replace(leaves, "w", -torch.exp(leaves["w"].float()))
    _replace(leaves, "u", leaves["u"].to(torch.bfloat16))
    sixth = partial(chunk_rwkv6, *(leaves[name] for name in "rkvwu"), **options)
    return _by_autograd(p, sixth, leaves, lambda w: -torch.exp(w.float()), turned=True)


def flashrwkv2(p: Problem) -> Kernels:
    """PyPI FlashRWKV2 (on tilelang): packed tokens, raw decays, states as [key, value].

    It has 64 or 32 values to a block, and reads 1 or 4 tokens at a time; its own tuning is passed over for 32 and 4,
    which fill the card with the fewest heads.
    """
    try:
        from flashrwkv2.tmix.wkv7.tilelang import tmix_wkv7_recurrent
    except (ImportError, OSError) as error:
        raise Missing(f"not installed: {error} (script/bench-peers --tilelang)") from None
    batch, tokens, _ = p.sizes
    leaves = _leaves(p.given)
    _turn_state(leaves)
    for name in "rwkvab":
        _replace(leaves, name, leaves[name].flatten(0, 1))
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=p.d_y.device) * tokens

    def call() -> tuple[Tensor, Tensor]:
        ins = (leaves[name] for name in "rwkvab")
        y, end = tmix_wkv7_recurrent(*ins, leaves["state"], bounds, block_values=32, prefetch_tokens=4)
        return y.unflatten(0, (batch, tokens)), end

    return _by_autograd(p, call, leaves, lambda w: w, turned=True)


def torch_compile(p: Problem) -> Kernels:
    """Our reference.py in float32 through torch.compile, so many tokens at a time."""
    definition = getattr(importlib.import_module(f"cog_rwkv_ops.{p.op}.reference"), p.op)
    dtype, names = p.d_y.dtype, list(p.given)

    @partial(torch.compile, dynamic=False, fullgraph=True)
    def piece(*given: Tensor) -> tuple[Tensor, Tensor]:
        y, end = definition(*(t.float() for t in given))
        return y.to(dtype), end

    leaves = _leaves(p.given)
    long = {name for name, t in leaves.items() if name != "state" and t.ndim == p.d_y.ndim}

    def call() -> tuple[Tensor, Tensor]:
        state, pieces = leaves["state"], []
        for begin in range(0, p.sizes[1], SPAN):
            now = {n: leaves[n][:, begin : begin + SPAN].contiguous() if n in long else leaves[n] for n in names}
            y, state = piece(*(now | {"state": state}).values())
            pieces.append(y)
        return torch.cat(pieces, 1), state

    return _by_autograd(p, call, leaves, lambda w: w)


def _leaves(given: Arguments) -> Arguments:
    return {name: t.detach().clone().requires_grad_() for name, t in given.items()}


def _replace(leaves: Arguments, name: str, value: Tensor) -> None:
    """Another leaf in the place of one, contiguous."""
    leaves[name] = value.detach().contiguous().requires_grad_()


def _turn_state(leaves: Arguments) -> None:
    _replace(leaves, "state", leaves["state"].transpose(2, 3))


def _by_autograd(
    p: Problem,
    call: Callable[[], tuple[Tensor, Tensor]],
    leaves: Arguments,
    decay: Callable[[Tensor], Tensor],
    turned: bool = False,
) -> Kernels:
    """A package with autograd; where its state is ``turned`` against ours, its gradient is as well."""
    d_end = p.d_end.transpose(2, 3).contiguous() if turned else p.d_end
    # The compiled backward may not keep its buffers for itself: it is called many times.
    with functorch.patch(donated_buffer=False):
        y, end = call()
        incoming = p.d_y.to(y.dtype), d_end.to(end.dtype)

        def forward() -> Arguments:
            with torch.no_grad():
                return {"y": call()[0]}

        def backward() -> Arguments:
            found = torch.autograd.grad((y, end), list(leaves.values()), incoming, retain_graph=True)
            named = dict(zip(leaves, found, strict=True))
            return {name: _as_ours(p, name, t, turned) for name, t in named.items()}

        backward()
    return Kernels(forward, backward, decay=decay)


def _as_ours(p: Problem, name: str, gradient: Tensor, turned: bool) -> Tensor:
    """A view of a gradient with the shape that ours has."""
    if name == "state" and turned:
        return gradient.transpose(2, 3)
    return gradient.reshape(p.given[name].shape)


@dataclass(frozen=True)
class Package:
    """A peer: how its kernels are made, and the operators of which it has a forward and a backward.

    One that is made anew for every size, and slowly, is measured at the short one alone.
    """

    make: Callable[[Problem], Kernels]
    forward: str
    backward: str
    short: bool = False


PACKAGES = {
    "rwkv": Package(rwkv, "wkv4 wkv5 wkv6 wkv7", ""),
    "rwkv-ops": Package(rwkv_ops, "wkv6 wkv7", "wkv6 wkv7"),
    "rwkvserve": Package(rwkvserve, "wkv7", "wkv7"),
    "rwkvserve (inference)": Package(rwkvserve_inference, "wkv7", ""),
    "flashrwkv2": Package(flashrwkv2, "wkv7", "wkv7"),
    "flash-linear-attention": Package(flash_linear_attention, "wkv4 wkv6 wkv7", "wkv4 wkv6 wkv7"),
    "torch.compile": Package(torch_compile, "", "wkv4 wkv5", short=True),
}


def main() -> None:
    """Compile the CUDA sources of the packages that are here."""
    for package, which in SOURCES:
        try:
            print(_source(package, which).file)
        except Missing as reason:
            print(reason)


if __name__ == "__main__":
    main()
