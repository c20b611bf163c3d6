"""A checkpoint's tensors, moved to a device in the layout that the operators read."""

import contextlib
import mmap
import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from tqdm import tqdm

import cog_rwkv_ops as ops
from model.upload import Upload


class Weights:
    """Hands out the tensors of a checkpoint (published names and shapes) on ``device``, with progress.

    Matrices are cast to ``dtype`` (None keeps the dtype in which each is stored), vectors to float32. On the CPU the
    matrices are copied into huge pages: decoding reads all of them for each token, and small pages cost bandwidth.
    With ``tables_on_host`` a table stays in host memory, pinned, so that a CUDA device reads its rows from there.
    With ``pinned`` the tensors go to a CUDA device by ``Upload``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype | None,
        progress: bool = True,
        tables_on_host: bool = False,
        pinned: bool = False,
    ) -> None:
        self.device = device
        self._tensors, self._dtype, self._pin_tables = tensors, dtype, tables_on_host and device.type != "cpu"
        self._memory = _HugePages()
        self._upload = Upload(device, tensors.values()) if pinned and device.type == "cuda" else None
        label = f"weights to {device}"
        self._bar = tqdm(total=len(tensors), desc=label, unit="tensor", disable=not progress, file=sys.stderr)

    def vector(self, name: str) -> Tensor:
        """The tensor as float32 [n], whatever its published shape ([n], [1, 1, n] or [heads, 64])."""
        return self._there(name).to(torch.float32, copy=True).flatten()

    def matrix(self, name: str) -> Tensor:
        """The tensor as it is published: [out, in], or [vocab, width] for the embedding."""
        return self._place(self._there(name))

    def table(self, name: str) -> Tensor:
        """A matrix, as it is published, of which a step reads a row a token: for ``cog_rwkv_ops.host_gather``."""
        if not self._pin_tables:
            return self.matrix(name)
        tensor = self._take(name)
        return tensor.to(self._dtype or tensor.dtype).contiguous().pin_memory()

    def matrix_t(self, name: str) -> Tensor:
        """The transposed tensor, row-major."""
        return self._place(self._there(name).t())

    def product(self, name: str) -> Tensor:
        """A matrix [out, in] that is only ever multiplied by: on the CPU packed, where it is bfloat16 and can be."""
        matrix = self._there(name).to(dtype=self._dtype)
        if matrix.device.type == "cpu" and matrix.dtype == torch.bfloat16 and matrix.shape[1] % 128 == 0:
            matrix = matrix if (packed := ops.pack_bfloat16(matrix)) is None else packed
            return self._memory.empty(matrix.shape, matrix.dtype).copy_(matrix)
        return self._place(matrix)

    def low_rank(self, down: str, up: str) -> tuple[Tensor, Tensor]:
        """The pair of a low-rank projection, published as x @ down @ up, as (down^T [rank, in], up^T [out, rank])."""
        return self.matrix_t(down), self.matrix_t(up)

    def close(self) -> None:
        """End the progress bar."""
        self._bar.close()

    def _take(self, name: str) -> Tensor:
        self._bar.update()
        return self._tensors[name]

    def _there(self, name: str) -> Tensor:
        tensor = self._take(name)
        return tensor.to(self.device) if self._upload is None else self._upload(tensor)

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype or tensor.dtype
        if tensor.device.type != "cpu":
            return tensor.to(dtype).contiguous()
        return self._memory.empty(tensor.shape, dtype).copy_(tensor)


class _HugePages:
    """CPU memory for many tensors, in huge pages where the kernel has them, in ordinary ones elsewhere.

    The memory of a tensor lives as long as any tensor of the same block does.
    """

    def __init__(self, block: int = 64 << 20, align: int = 64) -> None:
        self._block, self._align = block, align
        self._memory: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialised row-major tensor, aligned to a cache line."""
        count = shape.numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = count * dtype.itemsize
        if self._memory is None or self._used + size > len(self._memory):
            self._memory, self._used = _map(max(size, self._block)), 0
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-size // self._align) * self._align
        return tensor


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # no huge pages here: slower, and right
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
