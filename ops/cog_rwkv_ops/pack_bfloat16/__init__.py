"""pack_bfloat16: a matrix of bfloat16 in 12 bits a weight, without loss, for products on the CPU.

    linear(x, pack_bfloat16(weight)) == linear(x, weight)        bit for bit

Decoding on a CPU is as fast as memory is read, so a smaller weight is a faster one. bfloat16 has 256 exponents, and
the weights of a row that is about normal use 16 neighbouring ones: 8 bits hold the low end of a weight and 4 its sign
and its exponent's distance from the row's least. Up to seven weights of a row may lie elsewhere; they are kept beside
it. (csrc/packed_weight.h has the layout.)
"""

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator

_pack_bfloat16 = operator("pack_bfloat16", cuda=False)
_unpack_bfloat16 = operator("unpack_bfloat16", cuda=False)


def pack_bfloat16(weight: Tensor) -> Tensor | None:
    """`weight` in packed rows, which `linear` and `decode_` take in its place on the CPU.

    Args:
        weight: [M, K], bfloat16, on the CPU; K a multiple of 128, at most 65,536.

    Returns:
        uint8 [M, 3 K / 2 + 32]; None where a row holds more than seven weights that are out of its range of exponents
        (many zeros, say): such a matrix stays as it is.

    Raises:
        RuntimeError: the dtype or the shape is wrong; the message names the argument.
        NotImplementedError: `weight` is not on the CPU: elsewhere nothing reads packed rows.
    """
    packed, fits = _pack_bfloat16(weight)
    return packed if fits else None


def unpack_bfloat16(packed: Tensor) -> Tensor:
    """The matrix that was packed.

    Args:
        packed: uint8 [M, 3 K / 2 + 32] from `pack_bfloat16`, on the CPU.

    Returns:
        bfloat16 [M, K], with the bits that it had.

    Raises:
        RuntimeError: the dtype or the shape is wrong; the message names the argument.
        NotImplementedError: `packed` is not on the CPU.
    """
    return _unpack_bfloat16(packed)


@torch.library.register_fake("cog_rwkv::pack_bfloat16")
def _fake_pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    return (
        weight.new_empty(weight.shape[0], weight.shape[1] * 3 // 2 + 32, dtype=torch.uint8),
        weight.new_empty((), dtype=torch.bool),
    )


@torch.library.register_fake("cog_rwkv::unpack_bfloat16")
def _fake_unpack(packed: Tensor) -> Tensor:
    return packed.new_empty(packed.shape[0], (packed.shape[1] - 32) // 3 * 2, dtype=torch.bfloat16)
