"""linear: a matrix product with float32 sums, whatever the dtype of the weight.

    out[n, m] = sum over k of x[n, k] * weight[m, k]  (+ bias[m])

On the CPU a 16-bit weight stays 16 bits in memory and is widened in registers, x is used in float32, and the order
of the sums is fixed: a row of the result is the same, bit for bit, for any number of rows and threads. On CUDA x
is rounded to the dtype of a 16-bit weight, each row divided by a power of two where it would overflow float16; the
tensor cores' sums and their result are float32, and the factor is taken out again there. So nothing overflows.
"""

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops.linear import reference

_linear = operator("linear")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias.

    Args:
        x: [N, K]; float32, float16 or bfloat16; CPU or CUDA. N, K and M may be anything, 0 too.
        weight: [M, K] on the device of `x`; float32, float16 or bfloat16, not necessarily the dtype of `x`. On the CPU
            also what `pack_bfloat16` makes of a bfloat16 one, for the same result bit for bit.
        bias: [M], float32, or None.

    Returns:
        [N, M] in the dtype of `x`, rounded once. Differentiable in every tensor: the gradient is that of the definition
        in reference.py, which backward() computes again in float32. Backward kernels of its own are not written yet.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Source: y = x W^T + b of torch.nn.functional.linear.
    """
    return _linear(x, weight, bias)


@torch.library.register_fake("cog_rwkv::linear")
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wanted = x.shape[1] * 3 // 2 + 32 if weight.dtype == torch.uint8 else x.shape[1]
    torch._check(weight.shape[1] == wanted, lambda: f"cog_rwkv::linear: weight has shape {weight.shape}")
    return x.new_empty(x.shape[0], weight.shape[0])


differentiate_definition("linear", reference.linear)
