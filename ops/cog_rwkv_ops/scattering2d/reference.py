"""The definition of `scattering2d`, in plain PyTorch: one path after the other, products in the frequency domain."""

import torch
from torch import Tensor

from cog_rwkv_ops.scattering2d.filters import fold, gabor, morlet, padded_size, reflect


def _subsample(spectrum: Tensor, step: int) -> Tensor:
    height, width = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    return spectrum.unflatten(-1, (step, width)).mean(-2).unflatten(-2, (step, height)).mean(-3)


def scattering2d(x: Tensor, J: int, L: int = 8, max_order: int = 2) -> Tensor:
    """Scattering coefficients of x [..., M, N], as cog_rwkv_ops.scattering2d defines them."""
    wide = x if x.dtype == torch.float64 else x.float()
    size = x.shape[-2:]
    height, width = (padded_size(n, J) for n in size)
    rows, columns = (reflect(n, p).to(x.device) for n, p in zip(size, (height, width), strict=True))
    real, image = wide.dtype, wide.index_select(-2, rows).index_select(-1, columns)
    gaussian = torch.fft.fft2(gabor(height, width, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0)).real

    def filtered(spectrum: Tensor, whole: Tensor, level: int, step: int) -> Tensor:
        part = fold(fold(whole, level, 0), level, 1).to(x.device, real)
        return torch.fft.ifft2(_subsample(spectrum * part, step))

    def low(spectrum: Tensor, level: int) -> Tensor:
        return filtered(spectrum, gaussian, level, 2 ** (J - level)).real[..., 1:-1, 1:-1]

    wavelets = [(j, morlet(height, width, j, angle, L)) for j in range(J) for angle in range(L)]
    spectrum = torch.fft.fft2(image)
    zeroth, first, second = [low(spectrum, 0)], [], []
    for j1, wavelet1 in wavelets:
        inner = torch.fft.fft2(filtered(spectrum, wavelet1, 0, 2**j1).abs())
        first.append(low(inner, j1))
        for j2, wavelet2 in wavelets if max_order == 2 else []:
            if j2 > j1:
                second.append(low(torch.fft.fft2(filtered(inner, wavelet2, j1, 2 ** (j2 - j1)).abs()), j2))
    return torch.stack(zeroth + first + second, -3).to(x.dtype)
