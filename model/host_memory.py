"""Pinned memory of the host, in equal slots: where states go that leave the device."""

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from model.logs import get_logger
from model.state import SavedState

PAGE = 4096

log = get_logger()


def nbytes(state: SavedState) -> int:
    """The size of a state in bytes."""
    return state.wkv.nbytes + state.shift.nbytes


def on_last_reference(state: SavedState, action: Callable[[], None]) -> None:
    """Call ``action`` once nothing refers to ``state`` any more, in whatever thread that is, with locks it may hold."""
    weakref.finalize(state, action).atexit = False


class HostMemory:
    """``capacity`` bytes for copies of states of a CUDA device, all of one size, and room for one more on its way.

    It is taken in one piece when the first state comes (the warm-up of a server): pinning is slow and stops the
    device, so it must not happen for each state. Not safe for threads: its owner holds a lock.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kind: tuple[object, ...] | None = None
        self._slots: Tensor | None = None
        self._free: deque[int] = deque()  # whose operations are atomic: slots come back from any thread

    def __len__(self) -> int:
        """Slots in all; 0 before the first state."""
        return 0 if self._slots is None else len(self._slots)

    def take(self, like: SavedState) -> SavedState | None:
        """A state on the host of the shapes of ``like``, not filled in yet; None where no slot is free.

        Its slot is free again when nobody refers to that object any more. So whoever starts a copy from it has to keep
        the object, and not its tensors alone, until the copy is done. Raises ValueError where ``like`` is of another
        kind than the first state was.
        """
        if self._kind is None:
            self._kind = _kind(like)
            self._reserve(nbytes(like))
        if _kind(like) != self._kind:
            raise ValueError(f"state: found {_kind(like)}, wanted {self._kind} like the first one")
        if self._slots is None or not self._free:
            return None
        index = self._free.popleft()
        state = _views(self._slots[index], like)
        on_last_reference(state, lambda: self._free.append(index))
        return state

    def _reserve(self, size: int) -> None:
        size = -(-size // PAGE) * PAGE
        if self._capacity < size:
            return
        slots = self._capacity // size + 1
        try:
            self._slots = torch.empty(slots, size, dtype=torch.uint8)
        except RuntimeError as error:
            log.warning("no_host_memory_for_states", wanted_bytes=slots * size, error=str(error).split("\n")[0])
            return
        _pin(self._slots)
        self._free.extend(range(slots))


def _pin(memory: Tensor) -> None:
    # Registered rather than allocated as pinned: torch would round the size up to a power of two.
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        log.warning("host_memory_not_pinned", bytes=memory.nbytes, cuda_error=error)
        return
    weakref.finalize(memory.untyped_storage(), torch.cuda.cudart().cudaHostUnregister, memory.data_ptr()).atexit = False


def _kind(state: SavedState) -> tuple[object, ...]:
    return (tuple(state.wkv.shape), state.wkv.dtype, tuple(state.shift.shape), state.shift.dtype)


def _views(slot: Tensor, like: SavedState) -> SavedState:
    """The bytes of a slot as the two tensors of a state."""
    middle = like.wkv.nbytes
    wkv = slot[:middle].view(like.wkv.dtype).view(like.wkv.shape)
    shift = slot[middle : middle + like.shift.nbytes].view(like.shift.dtype).view(like.shift.shape)
    return SavedState(wkv, shift)
