"""Log lines: one an event, as key=value, on standard output, where Cog's server collects them."""

from typing import Any

import structlog


class _Printer:
    """structlog's own one keeps a weak reference to its file, and Cog's stand-in for standard output allows none."""

    def msg(self, message: str) -> None:
        print(message, flush=True)

    debug = info = warning = error = msg


def get_logger() -> Any:
    """A logger with ``info(event, **values)``, ``warning`` and ``error``."""
    return structlog.wrap_logger(
        _Printer(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
    )
