"""Tensors to a CUDA device through pinned buffers, which threads fill while the bus works.

A plain copy goes through one small buffer of the driver and one core, at a fraction of the bus, and waits until all
that was asked for before it is done.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch
from torch import Tensor

from model.memory import MIB
from model.sources import Source, Sources

PIECE = 4 * MIB  # the square matrices of 7.2b have as many pieces as there are threads
THREADS = 8  # together they read faster than the bus
BUFFERS = 4 * THREADS  # so that they go on reading while pieces are on the bus


class Upload:
    """Copies to ``device``. Those of ``tensors`` that are mapped from a file are read from the file.

    The buffers and the threads go when the object goes.
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._sources = Sources(tensors)
        self._stream = torch.cuda.Stream(device)
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
        for buffer in torch.empty(BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True).split(PIECE):
            self._free.put((buffer, torch.cuda.Event()))
        self._threads = ThreadPoolExecutor(THREADS, "upload")

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the device, for the current stream. ``tensor`` may change once this has returned.

        Raises CheckpointError where the file of the tensor has become shorter.
        """
        whole = tensor.contiguous()
        there = torch.empty(whole.shape, dtype=whole.dtype, device=self._device)
        source, target = self._sources.of(whole), there.view(-1).view(torch.uint8)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # which may still use the memory for what was in it before
        begins = range(0, len(target), PIECE)
        in_turn = map if len(begins) == 1 else self._threads.map  # one piece is sooner copied than handed over
        list(in_turn(lambda begin: self._copy(source, target, begin), begins))
        current.wait_stream(self._stream)
        return there

    def _copy(self, source: Source, target: Tensor, begin: int) -> None:
        part = target[begin : begin + PIECE]
        buffer, copied = self._free.get()
        try:
            copied.synchronize()  # at once, where it was never recorded
            source.read(begin, buffer[: len(part)].numpy())
            with torch.cuda.stream(self._stream):
                part.copy_(buffer[: len(part)], non_blocking=True)
                copied.record(self._stream)
        finally:
            self._free.put((buffer, copied))
