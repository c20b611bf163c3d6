"""PyTorch operators for RWKV-7, hand-written for CPU and CUDA. One folder an operator; README.md: how to add one."""

from cog_rwkv_ops._library import LibraryError, cuda_problem
from cog_rwkv_ops.add import add
from cog_rwkv_ops.binary_activation import binary_activation
from cog_rwkv_ops.binary_linear import binary_linear, binary_linear_packed, pack_signs
from cog_rwkv_ops.conv2d import conv2d
from cog_rwkv_ops.decode import can_decode, decode_
from cog_rwkv_ops.depthwise_conv1d import depthwise_conv1d
from cog_rwkv_ops.forward import can_forward, forward_
from cog_rwkv_ops.host_gather import host_gather
from cog_rwkv_ops.host_scatter import host_scatter_
from cog_rwkv_ops.layer_norm import layer_norm
from cog_rwkv_ops.linear import linear
from cog_rwkv_ops.low_rank import low_rank
from cog_rwkv_ops.pack_bfloat16 import pack_bfloat16, unpack_bfloat16
from cog_rwkv_ops.products import active_rows, products
from cog_rwkv_ops.sample import sample_
from cog_rwkv_ops.scattering2d import scattering2d
from cog_rwkv_ops.squared_relu import squared_relu, squared_relu_linear
from cog_rwkv_ops.swish import swish
from cog_rwkv_ops.time_mix_output import time_mix_output
from cog_rwkv_ops.time_mix_prepare import time_mix_prepare
from cog_rwkv_ops.token_shift import token_shift_
from cog_rwkv_ops.wkv4 import wkv4
from cog_rwkv_ops.wkv5 import wkv5
from cog_rwkv_ops.wkv6 import wkv6
from cog_rwkv_ops.wkv7 import wkv7, wkv7_

__all__ = [
    "LibraryError",
    "active_rows",
    "add",
    "binary_activation",
    "binary_linear",
    "binary_linear_packed",
    "can_decode",
    "can_forward",
    "conv2d",
    "cuda_problem",
    "decode_",
    "depthwise_conv1d",
    "forward_",
    "host_gather",
    "host_scatter_",
    "layer_norm",
    "linear",
    "low_rank",
    "pack_bfloat16",
    "pack_signs",
    "products",
    "sample_",
    "scattering2d",
    "squared_relu",
    "squared_relu_linear",
    "swish",
    "time_mix_output",
    "time_mix_prepare",
    "token_shift_",
    "unpack_bfloat16",
    "wkv4",
    "wkv5",
    "wkv6",
    "wkv7",
    "wkv7_",
]
