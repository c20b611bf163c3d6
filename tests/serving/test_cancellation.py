"""The hook in cancellation.py, without a server."""

import asyncio
import concurrent.futures
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from cog import CancelationException

import cancellation


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    cancellation.install()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _current() -> cancellation.Cancellation:
    return cancellation.current()


def test_cancel_reaches_a_coroutine_that_is_done(loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.run_coroutine_threadsafe(_current(), loop)
    calls: list[str] = []
    future.result(5).then(lambda: calls.append("cancelled"))
    assert future.cancel() is False  # that is what Future.cancel says of a finished one
    future.cancel()
    assert calls == ["cancelled"]


def test_an_action_that_comes_late_is_called_at_once(loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.run_coroutine_threadsafe(_current(), loop)
    found = future.result(5)
    future.cancel()
    calls: list[str] = []
    found.then(lambda: calls.append("cancelled"))
    assert calls == ["cancelled"]


def test_cancel_still_stops_a_running_coroutine(loop: asyncio.AbstractEventLoop) -> None:
    started = threading.Event()

    async def long() -> None:
        started.set()
        await asyncio.sleep(60)

    future = asyncio.run_coroutine_threadsafe(long(), loop)
    assert started.wait(5)
    assert future.cancel() is True
    assert future.cancelled()


def test_predictions_do_not_share_a_cancellation(loop: asyncio.AbstractEventLoop) -> None:
    first, second = (asyncio.run_coroutine_threadsafe(_current(), loop) for _ in range(2))
    calls: list[str] = []
    first.result(5).then(lambda: calls.append("first"))
    second.result(5).then(lambda: calls.append("second"))
    second.cancel()
    assert calls == ["second"]


def test_without_a_prediction_there_is_one_that_never_fires() -> None:
    calls: list[str] = []
    cancellation.current().then(lambda: calls.append("cancelled"))
    cancellation.current().cancel()
    assert calls == []


def test_a_finished_result_is_not_kept(loop: asyncio.AbstractEventLoop) -> None:
    class Reply:
        pass

    async def reply() -> Reply:
        return Reply()

    future = asyncio.run_coroutine_threadsafe(reply(), loop)
    kept = weakref.ref(future.result(5))
    asyncio.run_coroutine_threadsafe(_current(), loop).result(5)  # the loop has let go of the first by now
    gc.disable()
    try:
        del future
        assert kept() is None
    finally:
        gc.enable()


def test_an_exception_thrown_while_it_waits_is_a_cancellation(loop: asyncio.AbstractEventLoop) -> None:
    """Cog's way where it knows of no future yet: it may arrive later than that."""
    calls: list[str] = []

    async def long() -> None:
        cancellation.current().then(lambda: calls.append("cancelled"))
        await asyncio.sleep(60)

    future, found = asyncio.run_coroutine_threadsafe(long(), loop), []

    def wait() -> None:
        try:
            future.result(0.5)
        except BaseException as error:
            found.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    thrown = ctypes.py_object(CancelationException)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(waiting.ident or 0), thrown) == 1
    waiting.join()
    assert found == [concurrent.futures.CancelledError] and calls == ["cancelled"]


def test_an_exception_thrown_while_it_begins_is_a_cancellation(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thrown(coro: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        coro.close()
        raise CancelationException

    monkeypatch.setattr(cancellation, "_original", thrown)
    coro = _current()
    assert asyncio.run_coroutine_threadsafe(coro, loop).cancelled()
    coro.close()
