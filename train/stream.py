"""The token stream: documents shuffled, each begun by id 0 on a chunk boundary, cut into rows that keep their state."""

import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .model import CHUNK

PAD = 65535  # fills the stream up to the next chunk boundary; neither read nor predicted


def read_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint16, document lengths int32) of a file that train.vocab wrote."""
    raw = lzma.decompress(path.read_bytes())
    count = int(np.frombuffer(raw[-8:], dtype=np.int64)[0])
    lengths = np.frombuffer(raw[-8 - 4 * count : -8], dtype=np.int32)
    return np.frombuffer(raw[: -8 - 4 * count], dtype=np.uint16), lengths


def pack(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """uint16 stream of the documents in `order`: 0, the tokens, PAD up to a multiple of CHUNK."""
    begins = np.concatenate([[0], np.cumsum(lengths)])
    sizes = -(-(lengths[order] + 1) // CHUNK) * CHUNK
    stream = np.full(int(sizes.sum()), PAD, dtype=np.uint16)
    at = 0
    for number, size in zip(order, sizes, strict=True):
        stream[at] = 0
        stream[at + 1 : at + 1 + lengths[number]] = tokens[begins[number] : begins[number + 1]]
        at += size
    return stream


def pack_rows(tokens: np.ndarray, lengths: np.ndarray, batch: int, length: int) -> np.ndarray:
    """A stream whose `batch` rows hold whole documents, so that each is read from a zero state: for scoring.

    The longest documents are dealt first, each to the shortest row; rows are filled up to a multiple of `length`.
    """
    rows: list[list[int]] = [[] for _ in range(batch)]
    sizes = np.zeros(batch, dtype=np.int64)
    for number in np.argsort(-lengths, kind="stable"):
        row = int(sizes.argmin())
        rows[row].append(int(number))
        sizes[row] += -(-(lengths[number] + 1) // CHUNK) * CHUNK
    stream = np.full((batch, -(-int(sizes.max()) // length) * length), PAD, dtype=np.uint16)
    for index, numbers in enumerate(rows):
        if numbers:
            packed = pack(tokens, lengths, np.array(numbers))
            stream[index, : len(packed)] = packed
    return stream.reshape(-1)


class Stream:
    """Serves [batch, length] windows of a stream held on the device; window t of a row follows window t - 1."""

    def __init__(self, data: np.ndarray, batch: int, length: int, device: torch.device) -> None:
        self.batch, self.length = batch, length
        self.windows = len(data) // (batch * length)
        if not self.windows:
            raise ValueError(f"{len(data)} tokens do not fill one batch of {batch} x {length}")
        self.data = torch.empty(self.windows * batch * length + 1, dtype=torch.int32, device=device)
        self.refill(data)
        rows = torch.arange(batch, device=device)[:, None] * (self.windows * length)
        self.offsets = rows + torch.arange(length + 1, device=device)
        self.position = torch.zeros((), dtype=torch.long, device=device)

    def refill(self, data: np.ndarray) -> None:
        """Replaces the stream by another order of the same documents."""
        kept = torch.from_numpy(data[: len(self.data) - 1].astype(np.int32))
        self.data[:-1].copy_(kept)
        self.data[-1] = PAD

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, targets or -100, document starts), each [batch, length]; moves on by one window."""
        window = self.data[self.offsets + self.position].long()
        self.position += self.length
        ids, targets = window[:, :-1], window[:, 1:]
        hidden = ids == PAD
        targets = torch.where(targets == PAD, 0, targets).masked_fill(hidden, -100)
        return ids.masked_fill(hidden, 0), targets, ids == 0
