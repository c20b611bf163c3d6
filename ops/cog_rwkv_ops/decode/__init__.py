"""decode_: one token for each of B sequences through the whole of RWKV-7, in one call.

What `add`, `layer_norm`, `token_shift_`, `linear`, `low_rank`, `time_mix_prepare`, `wkv7_`, `time_mix_output` and
`squared_relu_linear` compute one after the other for sequences of one token, and with the same bits. On a CPU a small
model's step is a hundred pieces of a few microseconds, and going back to Python and to the threads' pool between them
takes longer than the pieces; here the threads stay together from the first layer to the logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cog_rwkv_ops._library import has_kernel, operator
from cog_rwkv_ops._no_gradient import refuse_gradient

_decode_ = operator("decode_", cuda=False)


def can_decode(x: Tensor) -> bool:
    """Whether `decode_` has a kernel for the device of `x`: the CPU's so far."""
    return has_kernel("decode_", x.device)


def decode_(x: Tensor, weights: Sequence[Tensor], shift: Tensor, wkv: Tensor, rows: Tensor) -> Tensor:
    """One step of B sequences.

    Args:
        x: [B, C], float32: the tokens' embeddings behind the first layer norm; CPU.
        weights: the model's tensors, layer by layer. In a layer: ln1 weight and bias [C]; the mixes of the time mix
            [6, C]; receptance, key, value [C, C]; w1 [D, C], w2 [C, D], w0 [C]; a1, a2, a0; g1, g2; v1, v2, v0 (not in
            the first layer); k_k, k_a, r_k [C]; ln_x weight and bias [C]; output [C, C]; ln2 weight and bias [C]; the
            mix of the channel mix [1, C]; key [F, C]; value transposed, [F, C]. After the last layer: ln_out weight
            and bias [C], head [V, C]. Matrices are float32, float16 or bfloat16; receptance, key, value, output and
            head also what `pack_bfloat16` makes; vectors and mixes are float32.
        shift: [layers, 2, R, C], float32, contiguous: the last normalised tokens of time mix and channel mix.
            **Updated in place.**
        wkv: [layers, R, C / 64, 64, 64], float32, float16 or bfloat16, contiguous: the states. **Updated in place.**
        rows: [B], int64: token i goes on from the states in row rows[i]. Each another row.

    Returns:
        The logits, float32 [B, V].

    Raises:
        RuntimeError: a dtype, shape or device is wrong, a row is out of range or repeated, or `weights` has too few or
            too many tensors; the message names the argument.
        NotImplementedError: an argument requires a gradient: this operator is for inference. Or it is not on the CPU.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), section 4.
    """
    refuse_gradient("decode_", x, *weights, shift, wkv)
    return _decode_(x, weights, shift, wkv, rows)


@torch.library.register_fake("cog_rwkv::decode_")
def _fake(x: Tensor, weights: Sequence[Tensor], shift: Tensor, wkv: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights[-1].shape[0])
