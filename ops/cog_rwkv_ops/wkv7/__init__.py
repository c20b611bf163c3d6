"""wkv7: the recurrence of RWKV-7, a generalised delta rule with a decay for every key.

    S <- S diag(decay) + (S a) b' + v k'        y = S r        decay = exp(-exp(-0.5) * sigmoid(w))

S is a head's state, [64 values, 64 keys]; r, w, k, v, a, b are a token's vectors of that head. In the model a is
minus the normalised removal key and b that key times the in-context learning rate. `w` is raw, as it comes from its
low-rank projection, so that the decay lies between 0.5452 and 1 whatever it is. Arithmetic is float32; on CUDA,
sequences of 64 tokens and more (for 16-bit inputs on Hopper, of 16) are computed in chunks on tensor cores: for inputs
in float32 with products split so that they stay near it (relative error 1e-6 to 5e-6), for 16-bit inputs in tf32 (2e-4
to 8e-4). On Hopper such a sequence of 1,024 tokens and more is computed in parts at the same time where heads are few,
by the number of heads and the sequence's own length, with 128 bytes of scratch memory a token and head and 32 KB a part
and head.

`wkv7` is functional, over B sequences of T tokens; `wkv7_` takes packed sequences of any lengths and updates their
rows of a pool of states in place. The pool may be float16 or bfloat16, to hold more sequences in less memory: a state
is then widened at the beginning of a call and rounded to nearest once at its end, so once a token while decoding.
Over 8,192 such steps with a decay of 0.9999, where nothing is removed, the relative error of a state is 5e-5 in
float32, 1.2e-2 in float16 and 0.1 in bfloat16; where half of what is looked up is removed, 2e-6, 2e-3 and 1.6e-2. In
float16 an entry of a state past 65,504 becomes infinite.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._gradient import differentiate_definition
from cog_rwkv_ops._library import operator
from cog_rwkv_ops._no_gradient import refuse_gradient
from cog_rwkv_ops.wkv7 import reference

_wkv7 = operator("wkv7")
_wkv7_ = operator("wkv7_")
_wkv7_backward = operator("wkv7_backward")


def wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over B sequences of T tokens.

    Args:
        r: receptance, [B, T, H, 64]; float32, float16 or bfloat16; CPU or CUDA.
        w: the raw decay, like `r`.
        k: key, like `r`.
        v: value, like `r`.
        a: what is looked up to be removed, like `r`.
        b: where it is removed, like `r`.
        state: [B, H, 64, 64], float32: value, key.

    Returns:
        y, like `r`, and the state after the last token, like `state`.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; the message names the argument.

    Differentiable twice: the first time by kernels that keep the arguments alone and compute the states again, the
    second time in plain PyTorch. On the CPU, in float32, the first time takes 1 KB a token and head while it runs. On
    CUDA it takes 2.5 KB, on tensor cores with products split as said above: a relative error of 1e-6 to 2e-6, and what
    the dtype rounds. Gradients in bfloat16 are made in tf32, though, from such states: 4e-4, that of `w` 8e-4, where
    rounding is 1.7e-3.

    Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution", 2025 (arXiv:2503.14456), equation 1.
    """
    return _wkv7(r, w, k, v, a, b, state)


def wkv7_(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """The recurrence over packed sequences, each with its state in a pool.

    Args:
        r: receptance, [N, C], the tokens of B sequences one after the other, C = H * 64; float32, float16 or
            bfloat16; CPU or CUDA.
        w: the raw decay, like `r`.
        k: key, like `r`.
        v: value, like `r`.
        a: what is looked up to be removed, like `r`.
        b: where it is removed, like `r`.
        pool: [R, H, 64, 64]; float32, float16 or bfloat16, whatever the dtype of `r`; each row contiguous. **Updated
            in place**; in 16 bits rounded to nearest once, at the end of the call: the error is said above.
        rows: [B], int64: sequence i has the row rows[i] of `pool`. Each another row.
        cu_seqlens: [B + 1], int64: sequence i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]; it begins with 0 and
            ends with N. A sequence without tokens changes nothing.

    Returns:
        y, like `r`. With a float32 pool the same for any cut of a sequence into calls; on the CPU bit for bit. A pool
        of 16 bits is rounded at every cut.

    Raises:
        RuntimeError: a dtype, shape or device is wrong; on the CPU also, a row is out of range or repeated, or
            `cu_seqlens` is not as said. The message names the argument. On CUDA, where the host cannot look, a
            sequence whose row is out of range leaves the pool alone and gets NaN, and so do tokens of no sequence.
        NotImplementedError: an argument requires a gradient: this operator is for inference.

    Source: as `wkv7`.
    """
    refuse_gradient("wkv7_", r, w, k, v, a, b, pool)
    return _wkv7_(r, w, k, v, a, b, pool, rows, cu_seqlens)


@torch.library.register_fake("cog_rwkv::wkv7")
def _fake(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return r.new_empty(r.shape), state.new_empty(state.shape)


@torch.library.register_fake("cog_rwkv::wkv7_")
def _fake_packed(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    torch._check(
        pool.dtype in (torch.float32, torch.float16, torch.bfloat16),
        lambda: f"cog_rwkv::wkv7_: pool is {pool.dtype}; it must be float32, float16, bfloat16",
    )
    return r.new_empty(r.shape)


@torch.library.register_fake("cog_rwkv::wkv7_backward")
def _fake_backward(d_y: Tensor, d_end: Tensor, r: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return (*(r.new_empty(r.shape) for _ in range(6)), d_end.new_empty(d_end.shape))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_y: Tensor, d_end: Tensor) -> tuple[Tensor, ...]:
    return _wkv7_backward(d_y, d_end, *ctx.saved_tensors)


torch.library.register_autograd("cog_rwkv::wkv7", _backward, setup_context=_keep)
differentiate_definition("wkv7_backward", reference.wkv7_backward)
