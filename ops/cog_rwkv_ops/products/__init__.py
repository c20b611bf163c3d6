"""products: matrix products that do not depend on each other, in one launch; active_rows: one with a sparse operand.

    products:     out_i[n, m] = f_i(sum over k of x_i[n, k] * weight_i[m, k] + bias_i[m])
    active_rows:  out[n, c] = sum over f of act[n, f] * value_t[f, c], for an act that is mostly zero

What a step is made of on a GPU: 16-bit operands, float32 sums. `linear` takes any size and dtype; these take what the
step needs, for speed. A result is the same bytes every time, and a token's does not depend on what the tokens beside it
are; N may change its last bits, by the order of the sums.

The model calls them on CUDA, through `forward_`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient

ACTIVATIONS = ("none", "tanh", "sigmoid", "squared_relu")
MOST_PRODUCTS = 8
MOST_ACTIVE_ROWS = 16

_products_ = operator("products_")
_active_rows_ = operator("active_rows_")


def products(
    x: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    activations: Sequence[str] | None = None,
    float_out: bool = False,
) -> list[Tensor]:
    """activation(x weight^T + bias) of each product of a group.

    Args:
        x: 1 to 8 tensors [N, K], float16 or bfloat16, N the same for all; contiguous, on CUDA on a 16-byte boundary.
        weights: as many [M, K] of the dtype and device of `x`, on CUDA on a 16-byte boundary; all contiguous, or all
            transposes of what is. K and M are multiples of 32. On CUDA the kernel before this one on the stream must
            not write them: they are read while it still runs.
        biases: as many [M], float32, contiguous, or None; None: no bias at all.
        activations: as many of "none", "tanh", "sigmoid" and "squared_relu" (relu(y)^2); None: "none" for all.
        float_out: whether the results are float32; else they are rounded to the dtype of `x`, once. Beyond 65504 a
            float16 is infinite.

    Returns:
        As many [N, M].

    Raises:
        RuntimeError: a dtype, shape, device, layout or the number of tensors is wrong; the message names the product.
        NotImplementedError: an argument requires a gradient: this operator is for inference.
        ValueError: there is no such activation.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4.
    """
    offsets = [None] * len(x) if biases is None else list(biases)
    names = ["none"] * len(x) if activations is None else list(activations)
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f'cog_rwkv_ops.products: activation "{name}"; it must be one of {", ".join(ACTIVATIONS)}')
    refuse_gradient("products", *x, *weights, *offsets)
    dtype = torch.float32 if float_out else None
    out = [one.new_empty(one.shape[0], weight.shape[0], dtype=dtype) for one, weight in zip(x, weights, strict=False)]
    _products_(x, weights, offsets, [ACTIVATIONS.index(name) for name in names], out)
    return out


def active_rows(act: Tensor, value_t: Tensor) -> Tensor:
    """act value_t, without reading the rows of value_t that only zeros meet (on CUDA; on the CPU it reads all).

    Args:
        act: [N, F], float16 or bfloat16, contiguous, N from 1 to 16; on CUDA on a 16-byte boundary.
        value_t: [F, C] of the dtype and device of `act`, contiguous, on CUDA on a 16-byte boundary. F and C are
            multiples of 32. Its values must be finite: infinity and NaN spread to tokens whose activation is zero.

    Returns:
        [N, C], float32.

    Raises:
        RuntimeError: a dtype, shape, device or layout is wrong; the message names the argument.
        NotImplementedError: an argument requires a gradient: this operator is for inference.

    Source: the value product of the channel mix, same paper as above.
    """
    refuse_gradient("active_rows", act, value_t)
    out = act.new_empty(act.shape[0], value_t.shape[-1], dtype=torch.float32)
    _active_rows_(act, value_t, out)
    return out


@torch.library.register_fake("cog_rwkv::products_")
def _fake_products_(
    x: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activations: Sequence[int],
    out: Sequence[Tensor],
) -> None:
    for i, (one, weight) in enumerate(zip(x, weights, strict=True)):
        torch._check(one.shape[1] == weight.shape[1], lambda i=i, w=weight: f"cog_rwkv::products_: {i}: {w.shape}")


@torch.library.register_fake("cog_rwkv::active_rows_")
def _fake_active_rows_(act: Tensor, value_t: Tensor, out: Tensor) -> None:
    torch._check(act.shape[1] == value_t.shape[0], lambda: f"cog_rwkv::active_rows_: value_t has shape {value_t.shape}")
