"""A child process that ends with us: when a signal stops us, when we crash, and with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
GRACE = 5.0  # seconds from one signal to the next, harder one


class Child:
    """One command, in a session of its own: a Ctrl-C reaches us alone, and `stop` reaches all that it started."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], **options: Any) -> None:
        """Start `command`; `options` are those of subprocess.Popen."""
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent(), **options)

    def wait(self) -> int:
        """The exit status once it has ended by itself, as a shell gives it."""
        assert self.process is not None
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ask the command to end, then all that it started; kill what is left."""
        if self.process is None:
            return
        # To the command alone at first: workers that a signal ends before their server are a crash to it.
        for send in (os.kill, os.killpg):
            if self.alive():
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    send(self.process.pid, signal.SIGTERM)
                    self.process.wait(GRACE)
        self.kill()
        self.process.wait(10)

    def kill(self) -> None:
        """Kill the command and all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def exit_on_signals(kill: Callable[[], None]) -> None:
    """From now on the first INT, TERM or HUP raises SystemExit(128 + its number); later ones call `kill` instead."""

    def first(number: int, _: object) -> None:
        for later in SIGNALS:
            signal.signal(later, lambda *_: kill())
        sys.exit(128 + number)

    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means what it says
            signal.signal(number, first)


def _end_with_parent() -> Callable[[], None] | None:
    """What a child has to call so that Linux kills it when this process is gone, however it went."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def call() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it is gone already
            os._exit(1)

    return call
