"""The scattering transform and its gradient, from kernels of this folder and PyTorch's FFT.

All paths of one scale go through one call. A wavelet is applied and the result subsampled in the frequency domain by
one kernel (`scattering_filter`), which reads half of the spectrum, as the signals are real; the factors of the
inverse FFT are in the filters. The low-pass filter is separable, so modulus, filter and subsampling are one kernel
as well (`scattering_low`), without an FFT.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cog_rwkv_ops._library import operator
from cog_rwkv_ops.scattering2d.filters import Bank

_pad = operator("scattering_pad")
_pad_adjoint = operator("scattering_pad_adjoint")
_filter = operator("scattering_filter")
_filter_adjoint = operator("scattering_filter_adjoint")
_modulus = operator("scattering_modulus")
_low = operator("scattering_low")
_low_adjoint = operator("scattering_low_adjoint")


def _spectrum(real: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.rfft2(real))


def _signals(spectrum: Tensor, filters: Tensor, step: int) -> Tensor:
    """[P, H, W/2+1, 2] -> [P L, H/step, W/step, 2]: convolved with each filter, subsampled."""
    products = torch.view_as_complex(_filter(spectrum, filters, step))
    return torch.view_as_real(torch.fft.ifft2(products, norm="forward")).flatten(0, 1)


def _signals_adjoint(gradient: Tensor, filters: Tensor, step: int, planes: int) -> Tensor:
    """What _signals' gradient gives for the real planes whose spectrum it took."""
    products = torch.view_as_real(torch.fft.fft2(torch.view_as_complex(gradient)))
    half = _filter_adjoint(products.unflatten(0, (planes, -1)), filters, step)
    return torch.fft.irfft2(torch.view_as_complex(half), s=filters.shape[1:], norm="forward")


class Transform:
    """The transform of planes [P, M, N] of one size.

    Args:
        filters: for this size, J and L.
        scales: J.
        max_order: 1 or 2.
    """

    def __init__(self, filters: Bank, scales: int, max_order: int) -> None:
        self.bank, self.scales, self.max_order = filters, scales, max_order

    def deeper(self, scale: int) -> range:
        """The scales of the second wavelet after a first one of `scale`."""
        return range(scale + 1, self.scales) if self.max_order == 2 else range(0)

    def low(self, signals: Tensor, level: int) -> Tensor:
        """The averages of real signals [P, h, w], or of the moduli of complex ones [P, h, w, 2]."""
        f = self.bank.low[level]
        step = 2 ** (self.scales - level)
        return _low(signals, f.rows, f.columns, f.row_middle, f.column_middle, step)

    def low_adjoint(self, gradient: Tensor, level: int, z: Tensor | None, more: Tensor | None) -> Tensor:
        """The gradient of low(), for signals z where they are complex; `more` is another one of their moduli."""
        f = self.bank.low[level]
        step, size = 2 ** (self.scales - level), (self.bank.height >> level, self.bank.width >> level)
        return _low_adjoint(gradient, f.rows, f.columns, f.row_middle, f.column_middle, step, *size, z, more)

    def forward(self, planes: Tensor) -> Tensor:
        """[P, M, N] -> [P, C, M // 2^J, N // 2^J]."""
        padded = _pad(planes, self.bank.height, self.bank.width)
        spectrum, count = _spectrum(padded), len(planes)
        zeroth, first, second = [self.low(padded, 0)[:, None]], [], []
        for j1 in range(self.scales):
            z1 = _signals(spectrum, self.bank.wavelets[j1, 0], 2**j1)
            if not self.deeper(j1):
                first.append(self.low(z1, j1).unflatten(0, (count, -1)))
                continue
            u1 = _modulus(z1)
            first.append(self.low(u1, j1).unflatten(0, (count, -1)))
            inner, found = _spectrum(u1), []
            for j2 in self.deeper(j1):
                z2 = _signals(inner, self.bank.wavelets[j2, j1], 2 ** (j2 - j1))
                found.append(self.low(z2, j2).unflatten(0, (len(u1), -1)))
            second.append(torch.cat(found, 1).unflatten(0, (count, -1)).flatten(1, 2))
        return torch.cat(zeroth + first + second, 1)

    def parts(self, gradient: Tensor) -> Iterator[Tensor]:
        """The parts of [P, C, h, w] in the order in which forward() puts them: [P, paths, h, w] each."""
        angles, start = len(self.bank.wavelets[0, 0]), 0
        counts = [1] + [angles] * self.scales + [angles * angles * len(self.deeper(j)) for j in range(self.scales)]
        for count in counts:
            yield gradient[:, start : start + count]
            start += count

    def backward(self, gradient: Tensor, planes: Tensor) -> Tensor:
        """The gradient of forward(planes) for the gradient [P, C, h, w] of its result. Computes the signals again."""
        parts, count = list(self.parts(gradient)), len(planes)
        spectrum = _spectrum(_pad(planes, self.bank.height, self.bank.width))
        total = self.low_adjoint(parts[0].flatten(0, 1), 0, None, None)
        for j1 in range(self.scales):
            filters = self.bank.wavelets[j1, 0]
            z1 = _signals(spectrum, filters, 2**j1)
            more = self.second_order(z1, j1, parts[1 + self.scales + j1]) if self.deeper(j1) else None
            g1 = self.low_adjoint(parts[1 + j1].flatten(0, 1), j1, z1, more)
            total += _signals_adjoint(g1, filters, 2**j1, count)
        return _pad_adjoint(total, *planes.shape[1:])

    def second_order(self, z1: Tensor, j1: int, gradient: Tensor) -> Tensor:
        """The gradient that the moduli of z1 get from the second order, [P, paths, h, w]."""
        u1 = _modulus(z1)
        inner, scales = _spectrum(u1), self.deeper(j1)
        total = torch.zeros_like(u1)
        for j2, part in zip(
            scales, gradient.reshape(len(u1), -1, *gradient.shape[2:]).chunk(len(scales), 1), strict=True
        ):
            filters, step = self.bank.wavelets[j2, j1], 2 ** (j2 - j1)
            z2 = _signals(inner, filters, step)
            g2 = self.low_adjoint(part.flatten(0, 1), j2, z2, None)
            total += _signals_adjoint(g2, filters, step, len(u1))
        return total
