"""scattering2d: the wavelet scattering transform of images, orders 0 to 2.

With wavelets psi_{j,t} of scale 2^j and angle t, a low-pass filter phi of scale 2^J, and * for the convolution:

    S0 = x * phi,   S1[j1,t1] = |x * psi_{j1,t1}| * phi,   S2[j1,t1,j2,t2] = ||x * psi_{j1,t1}| * psi_{j2,t2}| * phi

for j1 < j2 < J, each sampled every 2^J pixels. The image is first mirrored about its borders.
"""

from typing import Any

import torch
from torch import Tensor

from cog_rwkv_ops._no_gradient import refuse_gradient
from cog_rwkv_ops.scattering2d.filters import bank
from cog_rwkv_ops.scattering2d.transform import Transform

_ROOM = {"cpu": 4 << 20, "cuda": 2 << 30}  # bytes of intermediate signals at a time: a CPU's cache, a part of a GPU


def scattering2d(x: Tensor, J: int, L: int = 8, max_order: int = 2) -> Tensor:
    """Scattering coefficients of real images, equal to those of kymatio's Scattering2D(J, (M, N), L, max_order).

    Args:
        x: [..., M, N], any strides; float32, float64, float16 or bfloat16 (computed in float32, rounded once); CPU or
            CUDA. M and N are at least 2^J.
        J: number of scales, at least 1.
        L: number of angles, at least 1. The wavelets are designed for 8.
        max_order: 1 or 2.

    Returns:
        [..., C, M // 2^J, N // 2^J] in the dtype of `x`, C = 1 + L J, and L^2 J (J - 1) / 2 more for max_order 2. The
        channels are S0; S1 with t1 running fastest, then j1; S2 with t2 running fastest, then j2, t1 and j1.
        Differentiable once: the backward keeps `x` and nothing else, and computes the signals again. Where a modulus
        is 0 its gradient is taken to be 0.

    Raises:
        RuntimeError: a dtype, a size, J, L or max_order is wrong; the message names it.

    Source: Bruna, Mallat, "Invariant Scattering Convolution Networks", 2013 (arXiv:1203.1513); filters, borders and
    order as in Andreux et al., "Kymatio: Scattering Transforms in Python", 2020 (arXiv:1812.11214), version 0.3.0.
    """
    return _scattering2d(x, J, L, max_order)


def _check(x: Tensor, J: int, L: int, max_order: int) -> None:
    def say(text: str) -> Any:
        return lambda: f"cog_rwkv::scattering2d: {text}"

    torch._check(x.is_floating_point(), say(f"x is {x.dtype}; it must be floating point"))
    torch._check(J >= 1, say(f"J is {J}; it must be at least 1"))
    torch._check(L >= 1, say(f"L is {L}; it must be at least 1"))
    torch._check(max_order in (1, 2), say(f"max_order is {max_order}; it must be 1 or 2"))
    torch._check(x.dim() >= 2, say(f"x has shape {list(x.shape)}; it must be [..., M, N]"))
    for size in x.shape[-2:]:
        torch._check(size >= max(2**J, 2), say(f"x has shape {list(x.shape)}; M and N must be at least 2^J = {2**J}"))


def _channels(J: int, L: int, max_order: int) -> int:
    return 1 + L * J + (L * L * (J * (J - 1) // 2) if max_order == 2 else 0)


def _prepare(x: Tensor, J: int, L: int, max_order: int) -> tuple[Tensor, Transform, int]:
    """The planes of x in the dtype to compute in, the transform, and how many planes to take at a time."""
    wide = x if x.dtype == torch.float64 else x.float()
    planes = wide.reshape(-1, *x.shape[-2:])
    filters = bank((x.shape[-2], x.shape[-1]), J, L, wide.dtype, x.device)
    pixels = filters.height * filters.width
    signals = L * (1 + (L * J // 4 if max_order == 2 else 0))  # of the size of the image, at the widest place
    at_once = _ROOM.get(x.device.type, 1 << 28) // (2 * wide.element_size() * pixels * signals)
    return planes, Transform(filters, J, max_order), max(1, at_once)


@torch.library.custom_op("cog_rwkv::scattering2d", mutates_args=())
def _scattering2d(x: Tensor, J: int, L: int, max_order: int) -> Tensor:
    _check(x, J, L, max_order)
    shape = *x.shape[:-2], _channels(J, L, max_order), x.shape[-2] >> J, x.shape[-1] >> J
    if x.numel() == 0:
        return x.new_empty(shape)
    planes, transform, at_once = _prepare(x, J, L, max_order)
    found = [transform.forward(part) for part in planes.split(at_once)]
    return (found[0] if len(found) == 1 else torch.cat(found)).to(x.dtype).reshape(shape)


@torch.library.custom_op("cog_rwkv::scattering2d_backward", mutates_args=())
def _scattering2d_backward(gradient: Tensor, x: Tensor, J: int, L: int, max_order: int) -> Tensor:
    if x.numel() == 0:
        return x.new_empty(x.shape)
    planes, transform, at_once = _prepare(x, J, L, max_order)
    wide = gradient.to(planes.dtype).reshape(len(planes), -1, *gradient.shape[-2:])
    pairs = zip(wide.split(at_once), planes.split(at_once), strict=True)
    found = [transform.backward(*pair) for pair in pairs]
    return (found[0] if len(found) == 1 else torch.cat(found)).to(x.dtype).reshape(x.shape)


@_scattering2d.register_fake
def _fake(x: Tensor, J: int, L: int, max_order: int) -> Tensor:
    _check(x, J, L, max_order)
    return x.new_empty((*x.shape[:-2], _channels(J, L, max_order), x.shape[-2] // 2**J, x.shape[-1] // 2**J))


@_scattering2d_backward.register_fake
def _backward_fake(gradient: Tensor, x: Tensor, J: int, L: int, max_order: int) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.options = inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    refuse_gradient("scattering2d_backward", gradient, x)
    return _scattering2d_backward(gradient, x, *ctx.options), None, None, None


_scattering2d.register_autograd(_backward, setup_context=_keep)
