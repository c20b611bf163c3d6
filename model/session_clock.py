"""Time for sessions, in seconds since 1970 by the wall clock at the start, and steady from then on."""

import time


class SessionClock:
    """Never behind ``latest``, a time that was written before, and never backwards.

    The wall clock counts between two runs of a server, and only the monotonic one during a run: so a clock that is set
    while the server runs makes no session older, and one that was ahead when it started makes none younger.
    """

    def __init__(self, latest: float = 0.0) -> None:
        self._base = max(time.time(), latest) - time.monotonic()

    def now(self) -> float:
        """The present."""
        return self._base + time.monotonic()
