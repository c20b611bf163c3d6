"""An order-5 byte n-gram model: the next byte from the five before it, interpolated modified Kneser-Ney.

P_n(s | c) = max(count(c s) - D(count), 0) / count(c) + gamma(c) P_{n-1}(s | c without its first byte), down to a
uniform base. Below the highest order, counts are the numbers of different bytes seen before c s. The three discounts
of each order come from its counts of counts (Chen and Goodman 1999, "An empirical study of smoothing techniques").
A document begins after five zero bytes and ends with one, which is predicted like any byte.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

ORDER = 5
PIECE = 32 << 20


def keys_of(data: np.ndarray) -> np.ndarray:
    """uint64 keys of the byte runs of ORDER + 1 that end in data[ORDER:], the predicted byte lowest."""
    keys = np.zeros(len(data) - ORDER, dtype=np.uint64)
    for i in range(ORDER + 1):
        keys = (keys << np.uint64(8)) | data[i : len(data) - ORDER + i]
    return keys[(keys & np.uint64(0xFFFF)) != 0]  # zeros that only separate documents are not predicted


def separated(corpus: bytes) -> np.ndarray:
    """uint8 of documents that each end with one zero byte, with ORDER of them between and before."""
    return np.frombuffer(b"\0" * ORDER + corpus.replace(b"\0", b"\0" * ORDER), dtype=np.uint8)


def count(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted different keys and the sums of their counts."""
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)


@dataclass(frozen=True)
class Level:
    """One order: what each seen (context, byte) adds, and what each context leaves to the order below."""

    keys: np.ndarray  # uint64 [n], sorted: context << 8 | byte
    weight: np.ndarray  # float32 [n]
    contexts: np.ndarray  # uint64 [m], sorted
    first: np.ndarray  # int64 [m + 1]: a context's range in keys
    gamma: np.ndarray  # float32 [m]

    @classmethod
    def build(cls, keys: np.ndarray, counts: np.ndarray) -> "Level":
        """From the different keys, sorted (uint64 [n]), and how often each was counted (int [n])."""
        contexts = keys >> np.uint64(8)
        first = np.flatnonzero(np.concatenate([[True], contexts[1:] != contexts[:-1]]))
        discount = discounts(counts)[np.minimum(counts, 3)]
        totals = np.add.reduceat(counts, first)
        sizes = np.diff(np.append(first, len(keys)))
        weight = ((counts - discount) / np.repeat(totals, sizes)).astype(np.float32)
        gamma = (np.add.reduceat(discount, first) / totals).astype(np.float32)
        return cls(keys, weight, contexts[first], np.append(first, len(keys)), gamma)

    def apply(self, keys: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Probabilities of `keys` from those of the order below."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        weight = np.where(self.keys[at] == keys, self.weight[at], 0)
        contexts = keys >> np.uint64(8)
        at = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        return weight + np.where(self.contexts[at] == contexts, self.gamma[at], 1) * below

    def spread(self, context: int, below: np.ndarray) -> np.ndarray:
        """The probabilities of all 256 bytes after one context."""
        at = int(np.searchsorted(self.contexts, np.uint64(context)))
        if at == len(self.contexts) or self.contexts[at] != context:
            return below
        found = slice(self.first[at], self.first[at + 1])
        result = self.gamma[at] * below
        result[(self.keys[found] & np.uint64(255)).astype(np.intp)] += self.weight[found]
        return result


def discounts(counts: np.ndarray) -> np.ndarray:
    """Float64 [4]: the discounts of counts 0, 1, 2 and 3 or more."""
    ones, twos, threes, fours = (max(1, int((counts == n).sum())) for n in (1, 2, 3, 4))
    y = ones / (ones + 2 * twos)
    raw = [0, 1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes]
    return np.clip(raw, [0, 0.05, 0.05, 0.05], [0, 0.95, 1.95, 2.95])


class ByteNgram:
    """Levels 0 .. ORDER, trained on a corpus file (documents, each ended by one zero byte)."""

    def __init__(self, corpus: Path) -> None:
        data = separated(corpus.read_bytes())
        parts = []
        for begin in range(0, len(data) - ORDER, PIECE):
            keys = np.sort(keys_of(data[begin : begin + PIECE + ORDER]))
            first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
            parts.append((keys[first], np.diff(np.append(first, len(keys)))))
        keys, counts = count(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        self.levels = [Level.build(keys, counts)]
        for order in range(ORDER, 0, -1):
            shorter = keys & np.uint64((1 << 8 * order) - 1)
            keys, counts = count(shorter, np.ones(len(shorter), dtype=np.int64))
            self.levels.insert(0, Level.build(keys, counts))

    def score(self, corpus: bytes) -> float:
        """Nats of the bytes of documents, each one's end included."""
        keys, total = keys_of(separated(corpus)), 0.0
        for begin in range(0, len(keys), 1 << 20):
            piece = keys[begin : begin + (1 << 20)]
            p = np.full(len(piece), 1 / 256)
            for order, level in enumerate(self.levels):
                p = level.apply(piece & np.uint64((1 << 8 * (order + 1)) - 1), p)
            total -= float(np.log(p).sum())
        return total

    def next(self, text: bytes) -> np.ndarray:
        """Float64 [256]: the probabilities of the byte after `text`, which begins a document."""
        context = int.from_bytes((b"\0" * ORDER + text)[-ORDER:])
        p = np.full(256, 1 / 256)
        for order, level in enumerate(self.levels):
            p = level.spread(context & ((1 << 8 * order) - 1), p)
        return p
