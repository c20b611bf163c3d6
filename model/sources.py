"""Where the bytes of a tensor are read from: the file that it is mapped from, or memory.

To touch a mapping costs a page fault for every few pages; a read of the file puts any number of pages where they are
wanted.
"""

import bisect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import CheckpointError

Bytes = NDArray[np.uint8]


class Source(Protocol):
    """The bytes of one contiguous tensor. Threads may share it."""

    def read(self, begin: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``begin`` on."""


class Sources:
    """The best source of each of ``tensors``, which it keeps, and of any other."""

    def __init__(self, tensors: Iterable[Tensor] = (), maps: Path = Path("/proc/self/maps")) -> None:
        parts = _mapped(maps)
        files: dict[Path, FileIO | None] = {}
        self._tensors = [tensor for tensor in tensors if tensor.is_contiguous() and tensor.nbytes]
        self._found: dict[int, Source] = {}
        for tensor in self._tensors:
            if (part := _part_of(parts, tensor)) is None:
                continue
            if part.path not in files:
                files[part.path] = _open(part.path)
            if file := files[part.path]:
                self._found[tensor.data_ptr()] = _File(file, part.offset + tensor.data_ptr() - part.begin)

    def of(self, tensor: Tensor) -> Source:
        """The source of a contiguous CPU tensor. It reads from a file what begins where one of ``tensors`` does."""
        return self._found.get(tensor.data_ptr()) or _Memory(tensor)


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        self._bytes: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()

    def read(self, begin: int, into: Bytes) -> None:
        np.copyto(into, self._bytes[begin : begin + len(into)])  # without the interpreter's lock, on this thread


class _File:
    def __init__(self, file: FileIO, offset: int) -> None:
        self._file, self._offset = file, offset

    def read(self, begin: int, into: Bytes) -> None:
        """Raises CheckpointError where the file has become shorter, OSError where it cannot be read."""
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:].data], self._offset + begin + done)
            if count == 0:
                name = Path(str(self._file.name)).name
                raise CheckpointError(f"{name}: found it cut short while it was read, wanted it whole; fetch it again")
            done += count


@dataclass(frozen=True, order=True)
class _Part:
    """The addresses ``begin`` to ``end`` show the file ``path`` from the byte ``offset`` on."""

    begin: int
    end: int
    offset: int
    path: Path


def _mapped(maps: Path) -> list[_Part]:
    """The files that are mapped into this process, by address; none where the system does not tell."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    return sorted(part for line in lines if (part := _parse(line)) is not None)


def _parse(line: str) -> _Part | None:
    """``begin-end permissions offset device inode path``, all numbers but the inode in hexadecimal digits."""
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    begin, end = (int(number, 16) for number in fields[0].split("-"))
    return _Part(begin, end, int(fields[2], 16), Path(fields[5]))


def _part_of(parts: list[_Part], tensor: Tensor) -> _Part | None:
    at = bisect.bisect_right(parts, tensor.data_ptr(), key=lambda part: part.begin) - 1
    return parts[at] if at >= 0 and tensor.data_ptr() + tensor.nbytes <= parts[at].end else None


def _open(path: Path) -> FileIO | None:
    """None for a file that is gone ("... (deleted)") or may not be opened again."""
    try:
        return path.open("rb", buffering=0)
    except OSError:
        return None
