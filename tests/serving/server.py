"""Cog's HTTP server in a process of its own, and a small client for it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from script import client
from script.cog_schema import ROOT
from script.server import CogServer

PRODUCT = f"{ROOT / 'predict.py'}:Runner"
STUB = f"{ROOT / 'tests/serving/stub_runner.py'}:Runner"
START_LIMIT = 120.0


@dataclass(frozen=True)
class Event:
    """One event of an event stream, and when it came (``time.monotonic()``)."""

    name: str
    data: Any
    time: float = field(default_factory=time.monotonic)


@dataclass
class Streamed:
    """All of an event stream that was read to its end."""

    events: list[Event]

    def named(self, name: str) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.name == name]

    @property
    def text(self) -> str:
        """The chunks, joined."""
        return "".join(event.data["chunk"] for event in self.named("output"))

    @property
    def final(self) -> dict[str, Any]:
        """The prediction in the one completed event."""
        (completed,) = self.named("completed")
        assert self.events[-1] is completed
        return completed.data


class Server:
    """A running server. ``client`` talks to it; every call here repeats a 409, as all clients of Cog have to."""

    def __init__(self, cog: CogServer) -> None:
        self.cog, self.url = cog, cog.url
        self.defaults: dict[str, Any] = {}  # inputs where a test does not say
        # No connection is used twice: httpcore may close one that has been idle for long while another thread takes it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # A proxy of the environment is for others.
        self.client = httpx.Client(base_url=self.url, timeout=60, limits=limits, trust_env=False)

    def log(self) -> str:
        """What the server has written so far."""
        return self.cog.text()

    def health(self) -> dict[str, Any]:
        """The answer of /health-check."""
        return self.client.get("/health-check").json()

    def post(self, inputs: dict[str, Any], **options: Any) -> httpx.Response:
        """POST /predictions."""
        while (response := self.client.post("/predictions", json={"input": inputs}, **options)).status_code == 409:
            time.sleep(0.02)
        return response

    def predict(self, prompt: str, **inputs: Any) -> dict[str, Any]:
        """A prediction as plain JSON, whatever its status."""
        response = self.post({"prompt": prompt} | self.defaults | inputs)
        assert response.status_code == 200, response.text
        return response.json()

    def text(self, prompt: str, **inputs: Any) -> str:
        """The text of a prediction that has to succeed."""
        prediction = self.predict(prompt, **inputs)
        assert prediction["status"] == "succeeded", prediction
        return "".join(prediction["output"])

    @contextmanager
    def open_stream(self, prompt: str, id: str | None = None, **inputs: Any) -> Iterator[Iterator[Event]]:
        """A prediction as events, read as they come; leaving the block drops the connection."""
        method, path = ("PUT", f"/predictions/{id}") if id else ("POST", "/predictions")
        headers, body = {"Accept": "text/event-stream"}, {"input": {"prompt": prompt} | self.defaults | inputs}
        while True:
            with self.client.stream(method, path, json=body, headers=headers) as response:
                if response.status_code != 409:
                    assert response.status_code == 200, response.read()
                    yield _events(response)
                    return
            time.sleep(0.02)

    def stream(self, prompt: str, **inputs: Any) -> Streamed:
        """A prediction as events, read to its end."""
        with self.open_stream(prompt, **inputs) as events:
            return Streamed(list(events))

    def cancel(self, id: str) -> int:
        """POST /predictions/{id}/cancel; returns the HTTP status."""
        return self.client.post(f"/predictions/{id}/cancel").status_code

    def processes(self) -> list[psutil.Process]:
        """The server and its worker."""
        server = psutil.Process(self.cog.pid)
        return [server, *server.children(recursive=True)]

    def memory(self) -> int:
        """Bytes that the server and its worker hold for themselves: the least of a second, for buffers come and go."""
        samples = []
        for _ in range(10):
            time.sleep(0.1)
            samples.append(sum(one.memory_full_info().uss for one in self.processes()))
        return min(samples)

    def stop(self) -> None:
        """End the server and everything it started."""
        self.client.close()
        self.cog.stop()


def was_cancelled(final: dict[str, Any]) -> bool:
    """Whether a prediction ended by a cancellation.

    One that reaches Cog while that still decodes the request is thrown as an exception into Cog's own code, and Cog
    says "failed" (README.md, Limits).
    """
    return final["status"] == "canceled" or (final["status"] == "failed" and "CancelationException" in final["error"])


def _events(response: httpx.Response) -> Iterator[Event]:
    for name, data in client.events(response):
        yield Event(name, data)


def start(folder: Path, runner: str = STUB, concurrency: int = 32, expect: str = "READY", **settings: str) -> Server:
    """Start a server that works in ``folder``; once its setup is over its health has to be ``expect``."""
    base = os.environ | {"COG_MAX_CONCURRENCY": str(concurrency), "PYTHONPATH": _python_path()} | settings
    cog = CogServer(base=base, folder=folder, runner_stub=runner)
    try:
        cog.start()
        if (status := cog.settle(START_LIMIT)) != expect:
            raise AssertionError(f"{status}\n{cog.tail()}")
        return Server(cog)
    except BaseException:
        cog.stop()
        raise


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
