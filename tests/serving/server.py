"""Cog's HTTP server in a process of its own, and a small client for it."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from script import client
from script.cog_schema import config, load, openapi

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = f"{ROOT / 'predict.py'}:Runner"
STUB = f"{ROOT / 'tests/serving/stub_runner.py'}:Runner"
START_LIMIT = 120.0
# What the image sets; the build's own variable means nothing here.
ENVIRONMENT = dict(
    entry.split("=", 1) for entry in yaml.safe_load((ROOT / "cog.yaml").read_text(encoding="utf-8"))["environment"]
)


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

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.defaults: dict[str, Any] = {}  # inputs where a test does not say
        limits = httpx.Limits(max_connections=None)
        # A proxy of the environment is for others.
        self.client = httpx.Client(base_url=url, timeout=60, limits=limits, trust_env=False)

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

    def memory(self) -> int:
        """Bytes that the server and its worker hold for themselves: the least of a second, for buffers come and go."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        samples = []
        for _ in range(10):
            time.sleep(0.1)
            samples.append(sum(one.memory_full_info().uss for one in family))
        return min(samples)

    def stop(self) -> None:
        """End the process and everything it started."""
        self.client.close()
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for one in family:
            if one.is_running():
                one.kill()


def _events(response: httpx.Response) -> Iterator[Event]:
    for name, data in client.events(response):
        yield Event(name, data)


def start(folder: Path, runner: str = STUB, concurrency: int = 32, expect: str = "READY", **environment: str) -> Server:
    """Start a server that works in ``folder``; once its setup is over its health has to be ``expect``."""
    settings = config(ROOT)
    (folder / ".cog").mkdir()
    schema = openapi(load(settings.file, settings.class_name), settings.sdk_version)
    (folder / ".cog/openapi_schema.json").write_text(json.dumps(schema))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    own = {"COG_PREDICT_TYPE_STUB": runner, "COG_MAX_CONCURRENCY": str(concurrency), "PORT": str(port)}
    # The server starts its worker as "python", whatever runs the server itself.
    paths = {
        "PATH": _joined(str(Path(sys.executable).parent), os.environ.get("PATH")),
        "PYTHONPATH": _joined(str(ROOT), os.environ.get("PYTHONPATH")),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "cog.server.http", "--host", "127.0.0.1"],
        cwd=folder,
        env=os.environ | ENVIRONMENT | own | paths | environment,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    status = _wait(server)
    if status != expect:
        server.stop()
        raise AssertionError(f"{status}\n{log.read_text(errors='replace')[-4000:]}")
    return server


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(filter(None, paths))


def _wait(server: Server) -> str:
    began = time.monotonic()
    while time.monotonic() < began + START_LIMIT and server.process.poll() is None:
        try:
            if (status := server.health()["status"]) not in ("STARTING", "UNKNOWN"):
                return status
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.05)
    return "not started"
