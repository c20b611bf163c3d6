"""Cog's cancellation, handed on to a run() that has already returned its generator.

Cog cancels a prediction by ``cancel()`` on the future that ``asyncio.run_coroutine_threadsafe`` gave it for run(). Once
run() has returned a generator that future is done, and nobody tells the generator. So ``install()`` wraps the function:
its futures also fire a ``Cancellation``, which run() finds with ``current()``. When Cog passes cancellation on itself,
this file and its two uses in predict.py can go.
"""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cog import CancelationException

T = TypeVar("T")


class Cancellation:
    """Something that is cancelled at most once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._action: Callable[[], None] | None = None

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` when it is cancelled, in the thread that cancels it; now where that has been already."""
        with self._lock:
            self._action = action
            cancelled = self._cancelled
        if cancelled:
            action()

    def cancel(self) -> None:
        """Call the action. Only the first call counts."""
        with self._lock:
            action = None if self._cancelled else self._action
            self._cancelled = True
        if action:
            action()


class _Future(concurrent.futures.Future[Any]):
    """A future whose ``cancel`` is heard even where the coroutine is done."""

    cancellation: Cancellation

    def cancel(self) -> bool:
        self.cancellation.cancel()
        return super().cancel()

    def result(self, timeout: float | None = None) -> Any:
        """As ever, but what Cog throws into a thread that waits here is a cancellation as well."""
        try:
            return super().result(timeout)
        except CancelationException:
            self.cancel()
            raise concurrent.futures.CancelledError from None


_current: contextvars.ContextVar[Cancellation] = contextvars.ContextVar("cancellation")
_original = asyncio.run_coroutine_threadsafe


def current() -> Cancellation:
    """The cancellation of the prediction that this coroutine serves; one that never fires where there is none."""
    return _current.get(Cancellation())


def install() -> None:
    """Put the wrapper in place, once in a process."""
    asyncio.run_coroutine_threadsafe = _submit


def _submit(coro: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[T]:
    cancellation = Cancellation()

    async def with_cancellation() -> T:
        _current.set(cancellation)
        return await coro

    try:
        future = _original(with_cancellation(), loop)
    except CancelationException:  # too early for a future: Cog throws it into this thread, wherever that is
        cancellation.cancel()
        future = concurrent.futures.Future()
        future.cancel()
    # The class is all that differs. Setting an attribute ``cancel`` instead would make a cycle of references, and the
    # finished reply would stay in memory until the garbage collector comes round.
    future.__class__ = _Future
    assert isinstance(future, _Future)
    future.cancellation = cancellation
    return future
