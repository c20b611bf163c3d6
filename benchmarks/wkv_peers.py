"""Other packages' kernels for the recurrences of RWKV-4 to 7, where they are installed, behind one call each.

Kernels that come as CUDA sources (packages rwkv, rwkv-ops, rwkvserve) are compiled with nvcc, with the flags that their
packages give, and called through ctypes on the default stream: their own bindings would take a minute each to compile.
"""

import ctypes
import importlib.util
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from nvcc import find_nvcc

Arguments = dict[str, Tensor]
Call = Callable[[], Any]
# What those sources take from PyTorch: the names of two types.
STAND_IN = """#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace at { using Half = __half; using BFloat16 = __nv_bfloat16; }
"""
FLAGS = ["-O3", "--use_fast_math", "--extra-device-vectorization", "-arch=sm_90", "-Xcompiler=-fPIC", "-shared"]


class Missing(Exception):
    """A peer cannot be had here; the message says why."""


class Library:
    """The CUDA source `path` of an installed package, compiled; `cache` is where compiled ones are kept."""

    def __init__(self, package: str, path: str, defines: list[str], cache: Path | None) -> None:
        folder = cache or Path(tempfile.mkdtemp())
        self.file = folder / f"{package}_{Path(path).stem}.so"
        if not self.file.exists():
            self._compile(package, path, defines)
        self._library = ctypes.CDLL(str(self.file))
        names = subprocess.run(["nm", "-D", "--defined-only", self.file], capture_output=True, text=True, check=True)
        self._names = [line.split()[-1] for line in names.stdout.splitlines()]

    def _compile(self, package: str, path: str, defines: list[str]) -> None:
        spec, nvcc = importlib.util.find_spec(package), find_nvcc()
        if spec is None or not spec.submodule_search_locations:
            raise Missing(f"{package} is not installed")
        if nvcc is None:
            raise Missing(f"{package} comes as CUDA sources, and there is no nvcc")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        stand_in = self.file.parent / "include" / "ATen"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "ATen.h").write_text(STAND_IN)
        source = Path(spec.submodule_search_locations[0]) / path
        command = [str(nvcc), *FLAGS, *defines, f"-I{stand_in.parent}", str(source), "-o", str(self.file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"{package}: {path} does not compile: {done.stderr.strip().splitlines()[0]}")

    def __call__(self, function: str, *arguments: Tensor | int) -> None:
        """Calls a C++ function whose name is unique, with tensors as pointers."""
        (name,) = [n for n in self._names if re.match(rf"_Z\d+{function}i", n)]
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in arguments]
        getattr(self._library, name)(*values)


def decay(w: Tensor) -> Tensor:
    """The log of wkv7's decay."""
    return -math.exp(-0.5) * torch.sigmoid(w.float())


def _then(result: Tensor, call: Callable[[], None]) -> Call:
    def both() -> Tensor:
        call()
        return result

    return both


def rwkv(op: str, given: Arguments, cache: Path | None) -> Call:
    """PyPI rwkv: forward only, the state in place. Its wkv7 is right for one sequence alone."""
    number = op[-1]
    library = Library("rwkv", f"cuda/rwkv{number}.cu", ["-D_N_=64", "-D_T_=4096"], cache)
    r = given["r"]
    y, state = torch.empty_like(r), given["state"].transpose(2, 3).contiguous()
    sizes = (r.shape[0], r.shape[1], r.shape[2] * 64, r.shape[2])
    if op == "wkv7":
        w = decay(given["w"]).exp().to(r.dtype)
        state = given["state"].clone()
        others = [r, w, *(given[name] for name in "kvab")]
        return _then(y, lambda: library("cuda_forward_bf16", *sizes, state, *others, y))
    w = torch.exp(-torch.exp(given["w"].float())).contiguous()
    u = given["u"].to(r.dtype)
    return _then(y, lambda: library("cuda_forward_bf16", *sizes, state, r, given["k"], given["v"], w, u, y))


def _backstepping(package: str, path: str, given: Arguments, cache: Path | None, start: bool) -> tuple[Call, Call]:
    """The training kernels that rwkv-ops (with a start state) and rwkvserve (without) have."""
    library = Library(package, path, ["-D_C_=64", "-D_CHUNK_LEN_=16"], cache)
    r = given["r"]
    batch, tokens, heads = r.shape[:3]
    w = torch.log(-decay(given["w"])).to(r.dtype)
    ins = [w, r, *(given[name] for name in "kvab")]
    y, d_y = torch.empty_like(r), torch.randn_like(r)
    kept = r.new_empty(batch, heads, tokens // 16, 64, 64, dtype=torch.float32)
    looked_up = r.new_empty(batch, tokens, heads, 64, dtype=torch.float32)
    states = [given["state"], torch.randn_like(given["state"]), torch.empty_like(given["state"])]
    gradients = [torch.empty_like(r) for _ in range(6)]

    def forward() -> Tensor:
        library("cuda_forward", batch, tokens, heads, *ins, y, kept, looked_up, *(states[:1] if start else []))
        return y

    def backward() -> None:
        end = states[1:] if start else []
        library("cuda_backward", batch, tokens, heads, *ins, d_y, kept, looked_up, *end, *gradients)

    return forward, backward


def rwkv_ops(op: str, given: Arguments, cache: Path | None) -> tuple[Call, Call]:
    path = "rwkv7_kernel/torch_cuda_kernel/wkv7_cuda.cu"
    return _backstepping("rwkv_ops", path, given, cache, start=True)


def rwkvserve(op: str, given: Arguments, cache: Path | None) -> tuple[Call, Call]:
    path = "models/rwkv7/operators/cuda/wkv7_cuda.cu"
    return _backstepping("rwkvserve", path, given, cache, start=False)


def flash_linear_attention(op: str, given: Arguments) -> tuple[Call, Call]:
    """PyPI flash-linear-attention: forward, and backward through autograd."""
    try:
        from fla.ops.rwkv6 import chunk_rwkv6
        from fla.ops.rwkv7 import chunk_rwkv7
    except ImportError as error:
        raise Missing(f"flash-linear-attention: {error}") from None
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    state = leaves["state"]
    # It keeps states as [key, value].
    start = state.detach().transpose(2, 3).contiguous().requires_grad_()
    if op == "wkv7":
        w = decay(given["w"]).to(given["r"].dtype).requires_grad_()
        ins = [leaves["r"], w, *(leaves[name] for name in "kvab")]

        def call() -> tuple[Tensor, Tensor]:
            return chunk_rwkv7(*ins, scale=1.0, initial_state=start, output_final_state=True, lower_bound=-0.6066)

    else:
        w = (-torch.exp(given["w"].float())).requires_grad_()
        u = given["u"].to(given["r"].dtype).requires_grad_()
        ins = [leaves["r"], leaves["k"], leaves["v"], w, u]

        def call() -> tuple[Tensor, Tensor]:
            return chunk_rwkv6(*ins, scale=1.0, initial_state=start, output_final_state=True)

    y, end = call()
    gradients = torch.randn_like(y), torch.randn_like(end)

    def forward() -> Tensor:
        with torch.no_grad():
            return call()[0]

    def backward() -> None:
        torch.autograd.grad((y, end), [*ins, start], gradients, retain_graph=True)

    return forward, backward
