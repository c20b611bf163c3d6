"""States by key in two tiers, memory of the device and of the host. What is used least recently goes down."""

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple

import torch

from model.host_memory import HostMemory, nbytes, on_last_reference
from model.state import SavedState


class _Copy(NamedTuple):
    state: SavedState
    ready: torch.cuda.Event | None  # after which it is whole; None on the CPU


class StateTiers:
    """At most ``device_bytes`` of states on ``device`` and ``host_bytes`` on the host; what falls off the host is gone.

    Copies between the two run on a stream of their own, and no call waits for one unless it says so. What was given out
    counts as memory of the device until nobody refers to it. Where ``device`` is the CPU both tiers are ordinary
    memory, and nothing is copied. Any thread may call any method.
    """

    def __init__(self, device_bytes: int, host_bytes: int, device: torch.device | str = "cpu") -> None:
        self._device_limit, self._host_limit = device_bytes, host_bytes
        self._place = torch.device(device)
        self._stream = torch.cuda.Stream(self._place) if self._place.type == "cuda" else None
        self._memory = HostMemory(host_bytes) if self._stream else None
        self._lock = threading.RLock()
        self._device: OrderedDict[Hashable, _Copy] = OrderedDict()  # the least recently used first
        self._host: OrderedDict[Hashable, _Copy] = OrderedDict()
        self._on_device = 0  # bytes of states that were here and are referred to by anyone
        self._on_host = 0  # bytes of ``_host``
        self._released: deque[int] = deque()  # bytes on the device that went with a last reference, in any thread
        self.device_hits = self.host_hits = self.misses = self.forgotten = 0

    def __len__(self) -> int:
        """States that are there."""
        with self._lock:
            return len(self._device.keys() | self._host.keys())

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a state under ``key``; not a use of it."""
        with self._lock:
            return key in self._device or key in self._host

    @property
    def used(self) -> tuple[int, int]:
        """Bytes on the device and on the host."""
        with self._lock:
            self._settle()
            return self._on_device, self._on_host

    def put(self, key: Hashable, state: SavedState, host: SavedState | None = None) -> None:
        """Keep ``state`` under ``key``, in place of what is there. ``host`` may be its copy made by ``to_host``.

        The state is finished, or will be by what has been given to the current stream; nobody writes to it any more.
        One that fits nowhere is not kept.
        """
        with self._lock, torch.inference_mode():
            self.drop(key)
            if host is not None and self._stream and self._room_on_host(nbytes(host)):
                self._keep_on_host(key, _Copy(host, None))
            try:
                self._keep_on_device(key, self._upload(_Copy(state, self._now() if state.wkv.is_cuda else None)))
            except torch.OutOfMemoryError:
                self.forgotten += key not in self._host
            self._shrink(self._device_limit)

    def get(self, key: Hashable, wait: bool = False) -> SavedState | None:
        """The state under ``key``, or None: on the device, or on the host where the device has no room for it.

        It may be used by what is given to the current stream from now on; with ``wait`` on any stream, and by the CPU.
        Do not write to it, and keep the object itself, not its tensors alone, until a copy from it is done.
        """
        with self._lock, torch.inference_mode():
            if (copy := self._device.get(key)) is not None:
                self.device_hits += 1
                self._device.move_to_end(key)
            elif (copy := self._host.get(key)) is not None:
                self.host_hits += 1
                self._host.move_to_end(key)
                copy = self._raise(key, copy)
            else:
                self.misses += 1
                return None
            if copy.state.wkv.is_cuda:
                copy.state.wkv.record_stream(torch.cuda.current_stream(self._place))
                copy.state.shift.record_stream(torch.cuda.current_stream(self._place))
        if copy.ready is not None and wait:
            copy.ready.synchronize()
        elif copy.ready is not None:
            copy.ready.wait(torch.cuda.current_stream(self._place))
        return copy.state

    def drop(self, key: Hashable) -> None:
        """Forget the state under ``key``, if there is one."""
        with self._lock:
            self._device.pop(key, None)
            if (copy := self._host.pop(key, None)) is not None:
                self._on_host -= nbytes(copy.state)

    def to_host(self, state: SavedState) -> SavedState:
        """A copy that the CPU can read; ``state`` itself where it can be read already. Waits for it."""
        if not state.wkv.is_cuda:
            return state
        with self._lock, torch.inference_mode():
            host = self._download(_Copy(state, self._now()))
        if host is None:  # no slot is free: ordinary memory, then
            return SavedState(state.wkv.cpu(), state.shift.cpu())
        assert host.ready is not None
        host.ready.synchronize()
        return host.state

    def _now(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._place).record_event() if self._stream else None

    def _settle(self) -> None:
        while self._released:
            self._on_device -= self._released.popleft()

    def _shrink(self, limit: int) -> None:
        """Bring the device's tier to ``limit`` bytes or, where those given out are more, to nothing."""
        self._settle()
        while self._on_device > limit and self._device:
            key, copy = self._device.popitem(last=False)
            if key not in self._host:
                self._lower(key, copy)
            del copy
            self._settle()

    def _lower(self, key: Hashable, copy: _Copy) -> None:
        host = self._download(copy) if self._room_on_host(nbytes(copy.state)) else None
        if host is None:
            self.forgotten += 1
        else:
            self._keep_on_host(key, host)

    def _raise(self, key: Hashable, copy: _Copy) -> _Copy:
        """Move a state up, if the device has room; returns the copy to use."""
        size = nbytes(copy.state)
        if size > self._device_limit:
            return copy
        self.drop(key)  # first, so that what comes down for it finds room
        self._shrink(self._device_limit - size)
        if self._on_device + size <= self._device_limit:
            with contextlib.suppress(torch.OutOfMemoryError):
                raised = self._upload(copy)
                self._keep_on_device(key, raised)
                return raised
        if self._room_on_host(size):
            self._keep_on_host(key, copy)
        return copy

    def _keep_on_device(self, key: Hashable, copy: _Copy) -> None:
        size = nbytes(copy.state)
        self._device[key] = copy
        self._on_device += size
        on_last_reference(copy.state, lambda: self._released.append(size))

    def _keep_on_host(self, key: Hashable, copy: _Copy) -> None:
        self._host[key] = copy
        self._on_host += nbytes(copy.state)

    def _room_on_host(self, size: int) -> bool:
        """Forget the least recently used on the host until ``size`` bytes fit."""
        if size > self._host_limit:
            return False
        while self._host and self._on_host + size > self._host_limit:
            self._forget()
        return True

    def _forget(self) -> None:
        key, copy = self._host.popitem(last=False)
        self._on_host -= nbytes(copy.state)
        self.forgotten += key not in self._device

    def _upload(self, copy: _Copy) -> _Copy:
        """The state as an object of its own on the device; no copy where it is there."""
        if self._stream is None or copy.state.wkv.is_cuda:
            return _Copy(SavedState(copy.state.wkv, copy.state.shift), copy.ready)
        with torch.cuda.stream(self._stream):
            if copy.ready is not None:
                self._stream.wait_event(copy.ready)
            wkv = copy.state.wkv.to(self._place, non_blocking=True)
            shift = copy.state.shift.to(self._place, non_blocking=True)
            return _Copy(SavedState(wkv, shift), self._stream.record_event())

    def _download(self, copy: _Copy) -> _Copy | None:
        """The state as an object of its own on the host, or None where no memory is free there."""
        if self._stream is None or self._memory is None or copy.ready is None:
            return _Copy(SavedState(copy.state.wkv, copy.state.shift), None)
        while (host := self._memory.take(copy.state)) is None:
            if not self._host:
                return None
            self._forget()
        # The stream is one for both directions: what is still read from that slot, is read before it is written again.
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.ready)
            for target, source in ((host.wkv, copy.state.wkv), (host.shift, copy.state.shift)):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            return _Copy(host, self._stream.record_event())
