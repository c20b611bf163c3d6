"""PyTorch operators for RWKV-7, hand-written for CPU and CUDA. One folder an operator; README.md says how to add one."""

from cog_rwkv_ops._library import LibraryError
from cog_rwkv_ops.add import add
from cog_rwkv_ops.binary_activation import binary_activation
from cog_rwkv_ops.swish import swish

__all__ = [
    "LibraryError",
    "add",
    "binary_activation",
    "swish",
]
