"""What the log says while replies run: a line for each that has ended, and now and then what the process has done.

A thread of its own writes it: what the thread of a prediction prints, the server sends to that prediction's client.
Nothing of a prompt or a reply is in it unless the settings ask for that.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from model.logs import get_logger

log = get_logger()


class Journal:
    """Any thread may add lines; they are written in their order."""

    def __init__(self, counters: Callable[[], dict[str, int | float]], interval: float) -> None:
        """``counters()`` is written every ``interval`` seconds in which something has changed; never for 0."""
        self._counters, self._interval = counters, interval
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._due = time.monotonic() + interval
        self._written: dict[str, int | float] = {}
        threading.Thread(target=self._write, name="journal", daemon=True).start()

    def reply(self, **values: Any) -> None:
        """A reply has ended, with these values."""
        self._lines.put(values)

    def _write(self) -> None:
        while True:
            wait = max(0.0, self._due - time.monotonic()) if self._interval else None
            try:
                values = self._lines.get(timeout=wait)
                log.info("reply", **{name: _short(value) for name, value in values.items()})
            except queue.Empty:
                pass
            if self._interval and time.monotonic() >= self._due:
                self._due = time.monotonic() + self._interval
                self._count()

    def _count(self) -> None:
        counters = self._counters()
        if counters != self._written:
            self._written = counters
            log.info("counters", **{name: _short(value) for name, value in counters.items()})


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
