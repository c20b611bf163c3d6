"""The filters of the scattering transform: Morlet wavelets and a Gaussian, in float64, kept for each size.

They are those of kymatio 0.3.0, whose Gaussian is divided by 2 * 3.1415 * sigma^2 / slant: with pi in its place,
results would differ by 3e-5.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

F64 = torch.float64


def padded_size(size: int, scale: int) -> int:
    """The multiple of 2^scale to which `size` is extended: at least 2^scale more."""
    step = 2**scale
    return ((size + step) // step + 1) * step


def reflect(size: int, padded: int) -> Tensor:
    """Where the elements of a line of `padded` come from in one of `size`, mirrored about its ends: int64."""
    period = max(2 * (size - 1), 1)
    place = (torch.arange(padded) - (padded - size) // 2) % period
    return torch.minimum(place, period - place)


def gabor(height: int, width: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A plane wave under a Gaussian envelope, made periodic: complex128 [height, width]."""
    cos, sin = math.cos(angle), math.sin(angle)
    yy = (cos * cos + slant * slant * sin * sin) / (2 * sigma * sigma)
    yx = cos * sin * (1 - slant * slant) / (sigma * sigma)
    xx = (sin * sin + slant * slant * cos * cos) / (2 * sigma * sigma)
    total = torch.zeros(height, width, dtype=torch.complex128)
    for far_y in range(-2, 3):
        for far_x in range(-2, 3):
            y = (torch.arange(height, dtype=F64) + far_y * height)[:, None]
            x = (torch.arange(width, dtype=F64) + far_x * width)[None]
            envelope = torch.exp(-(yy * y * y + yx * y * x + xx * x * x))
            total += torch.polar(envelope, frequency * (cos * y + sin * x))
    return total / (2 * 3.1415 * sigma * sigma / slant)


def morlet(height: int, width: int, scale: int, angle: int, angles: int) -> Tensor:
    """The Fourier transform of one wavelet, which is real: float64 [height, width]."""
    shape = height, width, 0.8 * 2**scale, (int(angles - angles / 2 - 1) - angle) * math.pi / angles
    wave = gabor(*shape, 0.75 * math.pi / 2**scale, 4 / angles)
    envelope = gabor(*shape, 0.0, 4 / angles)
    return torch.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def fold(spectrum: Tensor, level: int, dim: int) -> Tensor:
    """A spectrum for signals subsampled by 2^level along `dim`: the high frequencies are cut off, the rest moved."""
    size = spectrum.shape[dim]
    start, kept = size >> (level + 1), spectrum.clone()
    kept.narrow(dim, start, size - (size >> level)).zero_()
    return torch.stack(kept.chunk(2**level, dim)).sum(0)


def gaussian(size: int, scales: int, level: int) -> tuple[Tensor, int]:
    """The low-pass filter along one dimension, for signals subsampled by 2^level.

    Returns:
        Its taps, float64, and where among them the middle is. What is left out is less than 1e-8 of the sum.
    """
    sigma = 0.8 * 2 ** (scales - 1)
    places = torch.arange(-2 * size, 3 * size, dtype=F64)
    line = torch.exp(-places * places / (2 * sigma * sigma)).view(5, size).sum(0) / math.sqrt(2 * 3.1415) / sigma
    taps = torch.fft.ifft(fold(torch.fft.fft(line).real, level, 0)).real
    count, middle = len(taps), len(taps) // 2
    taps = taps.roll(middle)
    size_of = taps.abs()
    for reach in range(1, middle):
        near = size_of[middle - reach : middle + reach + 1]
        if size_of.sum() - near.sum() <= 1e-8 * size_of.sum():
            return taps[middle - reach : middle + reach + 1].clone(), reach
    assert len(taps) == count
    return taps, middle


@dataclass(frozen=True)
class LowPass:
    """Taps along the two dimensions, and where the middle of each is."""

    rows: Tensor
    columns: Tensor
    row_middle: int
    column_middle: int


@dataclass(frozen=True)
class Bank:
    """What one size of image needs, on one device."""

    height: int  # of the padded image
    width: int
    low: list[LowPass]  # for signals subsampled by 2^level
    wavelets: dict[tuple[int, int], Tensor]  # (scale, level) -> [L, height / 2^level, width / 2^level]


@lru_cache(maxsize=8)
def bank(size: tuple[int, int], scales: int, angles: int, dtype: torch.dtype, device: torch.device) -> Bank:
    """The filters for images of `size`, padded. Making them takes some tenths of a second; the last few are kept."""
    height, width = (padded_size(n, scales) for n in size)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype).contiguous()

    low = []
    for level in range(scales):
        (rows, row_middle), (columns, column_middle) = (gaussian(n, scales, level) for n in (height, width))
        low.append(LowPass(place(rows), place(columns), row_middle, column_middle))
    wavelets = {}
    for scale in range(scales):
        whole = torch.stack([morlet(height, width, scale, angle, angles) for angle in range(angles)])
        for level in range(max(scale, 1)):
            part = fold(fold(whole, level, 1), level, 2)
            wavelets[scale, level] = place(part / (part.shape[1] * part.shape[2]))
    return Bank(height, width, low, wavelets)
