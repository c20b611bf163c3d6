"""States of prompts that have been read, so that a prompt that starts alike need not be read from its beginning.

A state is kept after a whole number of chunks, under the hash of all ids before it, each chunk's hash begun with that
of the chunks before it. States made on a server that did nothing else have names of their own: on a GPU the cuts and
the neighbours of a text show in the last bits, and an idle server goes on from none but these. So it gives the same
bytes for the same request, whatever it has cached under load.
"""

from array import array
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from model.state import SavedState

DENSE = 4  # of the chunks of a prompt, the distance between kept states grows to at most one of this many parts of it


class Store(Protocol):
    """What the states are kept in, as StateTiers: it may forget any of them at any time."""

    def __contains__(self, key: str) -> bool:
        """Whether it is there now; not a use of it."""

    def put(self, key: str, state: SavedState) -> None:
        """Keep ``state``, in place of any other under ``key``."""

    def get(self, key: str) -> SavedState | None:
        """What was put under ``key``, on any device, for use on the current stream, or None."""


@dataclass(frozen=True)
class Found:
    """``state`` has read the first ``chunks`` chunks; ``alone``: it was made on a server that did nothing else."""

    chunks: int
    state: SavedState
    alone: bool


def prefix_keys(ids: Ids[int], chunk: int) -> list[str]:
    """Names of the prefixes of 1, 2, ... whole chunks, all shorter than ``ids``: one has to be left to be read."""
    keys, digest = [], b""
    for begin in range(0, len(ids) - chunk, chunk):
        digest = blake2b(digest + array("q", ids[begin : begin + chunk]).tobytes(), digest_size=16).digest()
        keys.append(digest.hex())
    return keys


class PrefixCache:
    """Finds and keeps states. Only the engine's thread uses it."""

    def __init__(self, store: Store, exact: bool) -> None:
        """``exact``: neighbours and cuts never show in a state, so that all are the same (true on the CPU)."""
        self._store, self._exact = store, exact

    def find(self, keys: Ids[str], alone: bool) -> Found | None:
        """The longest of the prefixes ``keys`` whose state is known. ``alone``: made on an idle server only."""
        for chunks in range(len(keys), 0, -1):
            for made_alone in (True,) if alone or self._exact else (True, False):
                name = _name(keys[chunks - 1], made_alone)
                if name in self._store and (state := self._store.get(name)) is not None:
                    return Found(chunks, state, made_alone)
        return None

    def wants(self, chunks: int, last: int) -> bool:
        """Whether to keep the state after so many chunks of a prompt that has ``last`` of them.

        Always the last, from which the next turn of a conversation goes on; before it few, for a state may be large:
        the first 7 and then 4 for each doubling.
        """
        distance = 1 << max(0, (chunks // DENSE).bit_length() - 1)
        return 0 < chunks <= last and (chunks == last or chunks % distance == 0)

    def put(self, key: str, state: SavedState, alone: bool) -> None:
        """Keep the state after the prefix ``key``."""
        self._store.put(_name(key, alone or self._exact), state)


def _name(key: str, alone: bool) -> str:
    return f"{'alone' if alone else 'shared'}/{key}"
