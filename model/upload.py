"""Large tensors from host memory to a CUDA device: through pinned buffers, filled by all cores while the bus works.

A copy from ordinary memory goes through one small buffer of the driver and one core, at a fraction of the bus.
"""

import torch
from torch import Tensor

from model.memory import MIB

BUFFERS = 4
SIZE = 32 * MIB
SMALL = MIB  # below, a plain copy is as good


class Upload:
    """Copies to ``device``. The buffers go when the object goes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._turn = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the device, for the current stream. ``tensor`` may change once this has returned."""
        if tensor.nbytes < SMALL:
            return tensor.to(self._device).contiguous()
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # which may still use the memory for what was in it before
        source, target = (one.reshape(-1).view(torch.uint8) for one in (tensor, there))
        for begin in range(0, len(source), SIZE):
            self._copy(source[begin : begin + SIZE], target[begin : begin + SIZE])
        current.wait_stream(self._stream)
        return there

    def _copy(self, source: Tensor, target: Tensor) -> None:
        buffer, copied = self._buffers[self._turn][: len(source)], self._copied[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        copied.synchronize()  # at once, where it was never recorded
        buffer.copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(buffer, non_blocking=True)
            copied.record(self._stream)
