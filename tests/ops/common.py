"""What several operators' tests need."""

import torch
from torch import Tensor

FLOATING = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
FLOAT_OR_HALF = FLOATING[:3]
# Around the vector widths of every kernel, and past the grain at which work is spread over threads.
ODD_SIZES = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 255, 257, 1000, 16383, 16385, 50001]
# Units in the last place: a correctly rounded result differs from another by at most one.
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in FLOATING}


class Guard:
    """A copy of a tensor, contiguous, inside a larger buffer whose rest is watched."""

    BAND = 64  # elements before and behind

    def __init__(self, tensor: Tensor, shift: int = 0) -> None:
        size = tensor.numel() + 2 * self.BAND + shift
        fill = float("nan") if tensor.is_floating_point() else -7
        self.buffer = torch.full((size,), fill, dtype=tensor.dtype, device=tensor.device)
        start = self.BAND + shift
        self.tensor = self.buffer[start : start + tensor.numel()].view(tensor.shape)
        self.tensor.copy_(tensor)
        self.bands = self.buffer[:start], self.buffer[start + tensor.numel() :]

    def check(self) -> None:
        """Fails where the surroundings were written."""
        for band in self.bands:
            intact = band.isnan() if band.is_floating_point() else band == -7
            assert intact.all(), "a kernel wrote outside of its tensor"


def numbers(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def assert_close(actual: Tensor, expected: Tensor, ulps: float = 2.0, size: float = 1e-3) -> None:
    """Equal to `ulps` units in the last place of the dtype; NaN and infinities must be in the same places.

    Values smaller than `size` are judged by the units of `size`: raise it where a formula cancels.
    """
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rtol = ulps * EPSILON[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * size, equal_nan=True)


def layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The same values, of at least two dimensions and even sizes, laid out in memory in other ways."""
    padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
    padded = padded.to(tensor.device)
    padded[..., 1:-2] = tensor
    spread = tensor.repeat_interleave(2, dim=0)
    return {
        "contiguous": tensor,
        "transposed": tensor.transpose(0, 1).contiguous().transpose(0, 1),
        "offset rows": padded[..., 1:-2],
        "every second": spread[::2],
        "misaligned": Guard(tensor, 1).tensor,
    }
