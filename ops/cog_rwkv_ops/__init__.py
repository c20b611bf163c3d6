"""PyTorch operators for RWKV-7, hand-written for CPU and CUDA. One folder an operator; README.md says how to add one."""

from cog_rwkv_ops._library import LibraryError
from cog_rwkv_ops.add import add

__all__ = [
    "LibraryError",
    "add",
]
