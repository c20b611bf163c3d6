"""Loads the compiled libraries, and turns each way in which that can fail into one clear line.

The libraries lie beside this file and are looked for nowhere else: what an image compiled into its
site-packages cannot be replaced by a file in the working directory.
"""

import re
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

FOLDER = Path(__file__).parent
OLDEST_TORCH = (2, 10)
BUILD = "pip install --no-build-isolation --no-deps ./ops"


class LibraryError(ImportError):
    """The compiled operators are missing or do not fit the installed torch. The message says what to do."""


def check_torch(version: str) -> None:
    """Raises LibraryError where `version`, such as "2.13.0+cpu", is older than the stable ABI that we use."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise LibraryError(f"cog_rwkv_ops needs torch {oldest} or newer, and this is {version}: upgrade torch")


def load_library(path: Path) -> None:
    """Loads one library, which registers its operators with PyTorch.

    Raises:
        LibraryError: there is no such file, it lacks a symbol, or it is not a library for this machine.
    """
    if not path.exists():
        raise LibraryError(f"cog_rwkv_ops is not compiled: {path} is missing; build it with: {BUILD}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        reason = str(error.__cause__ or error)  # torch puts its own error around the loader's
        symbol = re.search(r"undefined symbol: (\S+)", reason)
        cause = f"torch {torch.__version__} lacks the symbol {symbol[1]}" if symbol else reason
        raise LibraryError(f"cog_rwkv_ops cannot load {path}: {cause}; rebuild it with: {BUILD}") from error


def load() -> bool:
    """Loads the CPU library, and the CUDA library where it is built and torch has CUDA.

    Returns:
        Whether the CUDA library is loaded. That needs no GPU.
    """
    check_torch(str(torch.__version__))
    load_library(FOLDER / "_cpu.abi3.so")
    cuda = FOLDER / "_cuda.abi3.so"
    if torch.version.cuda is None or not cuda.exists():
        return False
    load_library(cuda)
    return True


HAS_CUDA = load()
CPU_ONLY = (
    "cog_rwkv_ops was built for the CPU only; for CUDA tensors build it where there is an nvcc: "
    f"COG_RWKV_CUDA=1 {BUILD}"
)


def cuda_problem() -> str | None:
    """Why the operators take no CUDA tensors, and what to do; None where the CUDA library is loaded. Needs no GPU."""
    return None if HAS_CUDA else CPU_ONLY


def operator(name: str, cuda: bool = True) -> OpOverload:
    """The compiled operator torch.ops.cog_rwkv.<name>; `cuda`: whether it has a CUDA kernel.

    Raises:
        LibraryError: the loaded library is older than this Python code and lacks the operator.
    """
    try:
        found: OpOverload = getattr(torch.ops.cog_rwkv, name).default
    except AttributeError:
        raise LibraryError(f"the library in {FOLDER} lacks the operator {name}: rebuild it with: {BUILD}") from None
    if cuda and HAS_CUDA and not torch._C._dispatch_has_kernel_for_dispatch_key(f"cog_rwkv::{name}", "CUDA"):
        raise LibraryError(f"_cuda.abi3.so in {FOLDER} lacks the operator {name}: rebuild it with: {BUILD}")
    if cuda and torch.version.cuda and not HAS_CUDA:
        torch.library.impl(f"cog_rwkv::{name}", "cuda")(_no_cuda)
    return found


def has_kernel(name: str, device: torch.device) -> bool:
    """Whether the operator cog_rwkv::<name> has a kernel of its own for that type of device."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"cog_rwkv::{name}", key)


def _no_cuda(*_arguments: Tensor, **_options: object) -> NoReturn:
    raise RuntimeError(CPU_ONLY)
