"""depthwise_conv1d beside the convolution by PyTorch's Fourier transforms, at every length of RWKV-CUDA's TimeX."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import cog_rwkv_ops as ops
from benchmarks.op_cases import Case, numbers, relative_error, sets_for
from cog_rwkv_ops._library import operator

OPERATORS = ("depthwise_conv1d",)
BATCH, CHANNELS = 32, 768
TIMES = (64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
PEER = "torch.fft"


def spectrum(x: Tensor, reverse: bool) -> Tensor:
    """Of 2T points, in float32."""
    return torch.fft.rfft(x.float().flip(-1) if reverse else x.float(), 2 * x.shape[-1])


def by_fft(w: Tensor, k: Tensor) -> Tensor:
    """The forward pass."""
    return torch.fft.irfft(spectrum(w, True) * spectrum(k, False), 2 * k.shape[-1])[..., : k.shape[-1]].to(k.dtype)


def by_fft_backward(gradient: Tensor, of_w: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients, the forward's spectra kept."""
    time, found = gradient.shape[-1], spectrum(gradient, True)
    for_k = torch.fft.irfft(of_w * found, 2 * time)[..., :time].flip(-1)
    return torch.fft.irfft((of_k * found).sum(0), 2 * time)[..., :time].to(gradient.dtype), for_k.to(gradient.dtype)


def both(gradient: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients, ours."""
    backward_w, backward_k = operator("depthwise_conv1d_backward_w"), operator("depthwise_conv1d_backward_k")
    return backward_w(gradient, k), backward_k(gradient, w)


def forward_error(w: Tensor, k: Tensor) -> float:
    """Against the transforms."""
    return relative_error(ops.depthwise_conv1d(w, k), by_fft(w, k))


def backward_error(gradient: Tensor, w: Tensor, k: Tensor) -> float:
    """The larger of both, against the transforms."""
    right = by_fft_backward(gradient, spectrum(w, True), spectrum(k, False))
    return max(relative_error(a, b) for a, b in zip(both(gradient, w, k), right, strict=True))


def cases(op: str) -> Iterator[Case]:
    """B = 32, C = 768."""
    for dtype in (torch.float32, torch.float16):
        for time in TIMES:
            one = BATCH * CHANNELS * time * dtype.itemsize
            count = sets_for(2 * one, most=8)
            w = numbers(CHANNELS, time, dtype=dtype, seed=0)
            signals = [numbers(BATCH, CHANNELS, time, dtype=dtype, seed=1 + i) for i in range(count)]
            size = partial(Case, op=op, dtype=dtype, shape=f"T={time}", bound=2 * torch.finfo(dtype).eps + 2e-6)
            yield size(
                backward=False,
                ours=[partial(ops.depthwise_conv1d, w, k) for k in signals],
                peers={PEER: [partial(by_fft, w, k) for k in signals]},
                error=partial(forward_error, w, signals[0]),
                bytes=2 * one + w.numel() * dtype.itemsize,
            )
            incoming = numbers(BATCH, CHANNELS, time, dtype=dtype, seed=99)
            kept = [(k, spectrum(k, False)) for k in signals[: max(2, count // 2)]]
            of_w = spectrum(w, True)
            yield size(
                backward=True,
                ours=[partial(both, incoming, w, k) for k, _ in kept],
                peers={PEER: [partial(by_fft_backward, incoming, of_w, of_k) for _, of_k in kept]},
                error=partial(backward_error, incoming, w, signals[0]),
                bytes=3 * one + 2 * w.numel() * dtype.itemsize,
            )
