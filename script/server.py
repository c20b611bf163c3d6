"""Starts Cog's HTTP server outside an image: the same server, on a checkout, with the schema written before."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from script import cog_schema
from script.children import Child, exit_on_signals

HOST = "127.0.0.1"
# Asks servers of this machine: a proxy of the environment is for others.
OWN = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


class ServerError(RuntimeError):
    """The server cannot start, or did not get as far as READY; then the message holds the end of its log."""


def command(python: str = sys.executable) -> list[str]:
    """The server's command line, as in the image but for the address: this machine alone."""
    return [python, "-m", "cog.server.http", "--host", HOST]


def environment(
    root: Path,
    port: int,
    python: str,
    base: Mapping[str, str],
    *,
    folder: Path | None = None,
    runner_stub: str | None = None,
) -> dict[str, str]:
    """Write the schema of `root` and return `base` with the variables that Cog sets in the image.

    What cog.yaml's `environment` says can be set otherwise in `base`, as by `docker run -e`. The server is to work in
    `folder` (by default `root`), and `runner_stub` is "file:class" of another runner than cog.yaml's.
    """
    runner = cog_schema.write(root, folder and folder / cog_schema.OUTPUT)
    entries = yaml.safe_load((root / "cog.yaml").read_text(encoding="utf-8"))
    return {
        **dict(entry.split("=", 1) for entry in entries.get("environment", [])),
        "COG_MAX_CONCURRENCY": str(runner.concurrency or 1),
        **base,
        "COG_PREDICT_TYPE_STUB": runner_stub or entries["run"],
        "PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        # The server starts its worker as "python": that has to be the one which runs the server.
        "PATH": os.pathsep.join([str(Path(python).parent), base.get("PATH", os.defpath)]),
    }


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


class CogServer:
    """A server on a free port of this machine, from `start` (or `with`) to `stop`; `text` is its log.

    `root` is the folder with cog.yaml, `python` the interpreter that runs it, `base` the environment it inherits.
    It works in `folder` (by default `root`), and `runner_stub` is "file:class" of another runner than cog.yaml's.
    """

    def __init__(
        self,
        root: Path = cog_schema.ROOT,
        python: str = sys.executable,
        base: Mapping[str, str] = os.environ,
        *,
        folder: Path | None = None,
        runner_stub: str | None = None,
    ) -> None:
        self.root = root
        self.python = python
        self.base = base
        self.folder = folder or root
        self.runner_stub = runner_stub
        # For appending: the server writes through the same open file, and reading it moves their common position.
        self.log = tempfile.TemporaryFile(mode="a+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.child = Child()
        self.url = ""

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        variables = environment(
            self.root, port, self.python, self.base, folder=self.folder, runner_stub=self.runner_stub
        )
        self.child.start(command(self.python), cwd=self.folder, env=variables, stdout=self.log, stderr=self.log)

    @property
    def pid(self) -> int:
        """The process that was started; its workers are children of it."""
        assert self.child.process is not None
        return self.child.process.pid

    def wait(self, timeout: float = 3600, progress: Callable[[float], None] = lambda seconds: None) -> None:
        """Return when health-check says READY; ServerError when it fails or takes more than `timeout` seconds."""
        begin = time.monotonic()
        if (status := self.settle(timeout, progress)) != "READY":
            waited = time.monotonic() - begin
            raise ServerError(f"the server is {status} after {waited:.0f} s; its log ends:\n{self.tail()}")

    def settle(self, timeout: float, progress: Callable[[float], None] = lambda seconds: None) -> str:
        """The status of health-check once the setup is over, or when `timeout` seconds are; "gone" without a server."""
        begin = time.monotonic()
        while (status := self._status()) in ("STARTING", "UNKNOWN"):
            waited = time.monotonic() - begin
            if waited > timeout:
                break
            progress(waited)
            time.sleep(0.05)
        return status

    def stop(self) -> None:
        """End the server and its workers."""
        self.child.stop()
        self.log.close()

    def tail(self, lines: int = 40) -> str:
        """The end of the server's log, as text."""
        return "\n".join(map(_readable, self.text().splitlines()[-lines:]))

    def text(self) -> str:
        """The server's log so far, as it wrote it."""
        self.log.seek(0)
        return self.log.read()

    def _status(self) -> str:
        try:
            answer: dict[str, Any] = OWN.get(f"{self.url}/health-check", timeout=5).json()
        except (httpx.TransportError, ValueError):
            return "STARTING" if self.child.alive() else "gone"
        return str(answer.get("status", "STARTING"))

    def __enter__(self) -> CogServer:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _readable(line: str) -> str:
    """The message of a log line that is a JSON record; any other line as it is."""
    try:
        fields = json.loads(line)["fields"]
        return " ".join(str(fields[name]) for name in ("message", "error") if name in fields)
    except (ValueError, KeyError, TypeError):
        return line


def wanted_port(text: str, host: str) -> int:
    """`text` as a TCP port of `host` that can be listened on; ServerError says in one line why it is none."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise ServerError(f"PORT is {text!r}; it must be a number from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: a port just left is free
        try:
            probe.bind((host, int(text)))
        except OSError as error:
            raise ServerError(
                f"port {text} of {host} cannot be used: {error.strerror}; choose another: PORT=5001 script/serve"
            ) from None
    return int(text)


def main() -> int:
    """script/serve: run the server on PORT (default 5000) until it ends or a signal ends it; the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default=HOST)
    child = Child()
    exit_on_signals(child.kill)
    try:
        port = wanted_port(os.environ.get("PORT", "5000"), parser.parse_known_args()[0].host)
        variables = environment(cog_schema.ROOT, port, sys.executable, os.environ)
        child.start([*command(), *sys.argv[1:]], cwd=cog_schema.ROOT, env=variables)
        return child.wait()
    except (cog_schema.SchemaError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename or cog_schema.ROOT}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        child.stop()
