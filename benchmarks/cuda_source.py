"""CUDA sources inside installed packages, compiled with nvcc and called through ctypes.

Packages such as rwkv compile their sources when they are first used, a minute each, against PyTorch's headers. Of those
headers the kernels take two types, which a stand-in gives, so that nvcc alone does it in seconds.
"""

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from nvcc import find_nvcc  # noqa: E402

from benchmarks.op_cases import Missing  # noqa: E402

CACHE = ROOT / ".cache" / "peers"
# Where script/bench-peers puts packages; what is installed otherwise comes first.
sys.path += [str(CACHE / "site"), str(CACHE / "tilelang")]
STAND_IN = """#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
namespace at { using Half = __half; using BFloat16 = __nv_bfloat16; }
"""
# What the packages ask for. Without NDEBUG a wrong size would abort the process instead of giving a wrong result.
FLAGS = ["-O3", "--use_fast_math", "--extra-device-vectorization", "-DNDEBUG", "-Xcompiler=-fPIC", "-shared"]
DEFINES = ["-D_N_=64", "-D_C_=64", "-D_CHUNK_LEN_=16", "-D_T_=4096"]  # sizes: heads, chunks, tokens at most


class CudaSource:
    """The CUDA source ``path`` of ``package``; compiled once into ``.cache/peers``."""

    def __init__(self, package: str, path: str) -> None:
        """Raises Missing where there is no package, no nvcc, or where it does not compile."""
        self.package, self.path = package, path
        # One binary for all cards: nothing of theirs is special to one, and it can be compiled where there is none.
        self.file = CACHE / f"{package}_{Path(path).stem}.so"
        if not self.file.exists():
            self._compile()
        self._library = ctypes.CDLL(str(self.file))
        names = subprocess.run(["nm", "-D", "--defined-only", self.file], capture_output=True, text=True, check=True)
        self._names = [line.split()[-1] for line in names.stdout.splitlines()]

    def _compile(self) -> None:
        spec, nvcc = importlib.util.find_spec(self.package), find_nvcc()
        if spec is None or not spec.submodule_search_locations:
            raise Missing(f"not installed: {self.package} (script/bench-peers)")
        if nvcc is None:
            raise Missing(f"{self.package} comes as CUDA sources, and there is no nvcc: script/bench-peers elsewhere")
        stand_in = CACHE / "include" / "ATen"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "ATen.h").write_text(STAND_IN)
        source = Path(spec.submodule_search_locations[0]) / self.path
        cards = ["-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90,code=sm_90"]
        command = [str(nvcc), *FLAGS, *DEFINES, *cards, f"-I{stand_in.parent}", str(source), "-o", f"{self.file}.part"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(
                f"{self.package}: {self.path} does not compile: {(done.stderr.strip() or '?').splitlines()[0]}"
            )
        Path(f"{self.file}.part").rename(self.file)

    def __call__(self, function: str, *arguments: Tensor | int) -> None:
        """Call a C++ function on the default stream, tensors as pointers.

        ``function`` is its name, for an instance of a template as it is mangled: ``"cuda_wkv_forwardI6__halfEv"``.
        Raises LookupError where there is not one such function.
        """
        found = [name for name in self._names if re.match(rf"_Z\d+{function}i", name)]
        if len(found) != 1:
            raise LookupError(f"{self.path} has {len(found)} functions {function}")
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in arguments]
        getattr(self._library, found[0])(*values)
