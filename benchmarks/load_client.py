"""The clients of a load test: event streams over HTTP, in a few processes, so as not to hold up what they measure.

A server answers 409 when all its slots are taken, and now and then when they are not: such a request is sent again
after a pause, and counted.
"""

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import httpx

from benchmarks.load_stats import Record, Window
from benchmarks.load_work import Work

LIMIT = 600.0  # seconds without a byte, after which a stream counts as lost
HEADERS = {"Accept": "text/event-stream"}
Expected = dict[str, str]
Begun = Callable[[], None]  # called when the first text has come


class Clock:
    """When the ramp-up is over and when to stop, for all processes together."""

    def __init__(self, streams: int, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.seconds = seconds
        self._waiting: Synchronized[int] = context.Value("i", streams)
        self._begin: Synchronized[float] = context.Value("d", float("inf"))
        self._begun: set[int] = set()  # of this process

    def first_text(self, stream: int) -> None:
        """To be called by every stream; more than once does no harm."""
        if stream in self._begun:
            return
        self._begun.add(stream)
        with self._waiting.get_lock():
            self._waiting.value -= 1
            if self._waiting.value == 0:
                self._begin.value = time.monotonic()

    def over(self) -> bool:
        """Whether no request may begin any more."""
        return time.monotonic() >= self._begin.value + self.seconds

    def window(self, start: float) -> Window:
        """What was measured, of a run that began at ``start``."""
        return Window(start, self._begin.value, self._begin.value + self.seconds)


class _Request:
    def __init__(self, client: httpx.AsyncClient, inputs: dict[str, Any], record: Record, begun: Begun) -> None:
        self.client, self.inputs, self.record, self.begun = client, inputs, record, begun
        self.pieces: list[str] = []
        self.final: dict[str, Any] | None = None

    async def run(self) -> str:
        """Send it and fill in the record; the text of the reply."""
        try:
            while not await self._sent():
                self.record.retried += 1
                await asyncio.sleep(random.uniform(0.5, 1.5) * min(0.5, 0.01 * self.record.retried))
            self._close()
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.record.error = f"{type(error).__name__}: {error}"
        self.begun()
        return "".join(self.pieces)

    async def _sent(self) -> bool:
        """False where the server has no slot."""
        body = {"input": self.inputs}
        async with self.client.stream("POST", "/predictions", json=body, headers=HEADERS) as response:
            if response.status_code == 409:
                return False
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread())[:200]!r}")
            held = b""
            async for data in response.aiter_raw():
                *events, held = (held + data).split(b"\n\n")
                for event in events:
                    self._read(event)
        return True

    def _read(self, event: bytes) -> None:
        name, _, data = event.partition(b"\ndata:")
        if name == b"event: output":
            self.record.last = time.monotonic()
            if self.record.first is None:
                self.record.first = self.record.last
                self.begun()
            self.pieces.append(json.loads(data)["chunk"])
        elif name == b"event: completed":
            self.final = json.loads(data)

    def _close(self) -> None:
        if self.final is None:
            raise ValueError("the stream ended before the prediction was complete")
        metrics = self.final.get("metrics", {})
        self.record.tokens = metrics.get("completion_tokens", 0)
        self.record.prompt_tokens = metrics.get("prompt_tokens", 0)
        if self.final["status"] != "succeeded":
            raise ValueError(f"{self.final['status']}: {self.final.get('error')}")
        if "".join(self.final["output"]) != "".join(self.pieces):
            raise ValueError("the pieces are not the text of the completed prediction")


def _new_client(url: str) -> httpx.AsyncClient:
    # A proxy of the environment is for others.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=LIMIT, limits=limits, trust_env=False)


async def _one(
    client: httpx.AsyncClient, work: Work, expected: Expected, stream: int, number: int, begun: Begun
) -> Record:
    key = work.key(stream, number)
    inputs = work.inputs(key)
    record = Record(key, time.monotonic())
    text = await _Request(client, inputs, record, begun).run()
    if record.error is None and text != expected.get(record.key, text):
        record.error = f"another text than that of its single run: {text[:80]!r}"
    return record


async def _closed(url: str, work: Work, expected: Expected, streams: list[int], clock: Clock) -> list[Record]:
    """Every stream sends its next request when one has ended."""

    async def stream(client: httpx.AsyncClient, name: int) -> list[Record]:
        records: list[Record] = []
        while not clock.over():
            begun = partial(clock.first_text, name)
            records.append(await _one(client, work, expected, name, len(records), begun))
        return records

    async with _new_client(url) as client:
        found = await asyncio.gather(*(stream(client, name) for name in streams))
    return [record for records in found for record in records]


async def _open(url: str, work: Work, expected: Expected, name: int, rate: float, clock: Clock) -> list[Record]:
    """Requests come at random, ``rate`` a second on average, whether or not those before them have ended."""
    draw = random.Random(f"{work.seed} arrivals {name}")
    async with _new_client(url) as client:
        begun = partial(clock.first_text, name)
        tasks: list[asyncio.Task[Record]] = []
        while not clock.over():
            await asyncio.sleep(draw.expovariate(rate))
            tasks.append(asyncio.create_task(_one(client, work, expected, name, len(tasks), begun)))
        return list(await asyncio.gather(*tasks))


def _closed_process(url: str, work: Work, expected: Expected, streams: list[int]) -> list[Record]:
    return asyncio.run(_closed(url, work, expected, streams, _clock))


def _open_process(url: str, work: Work, expected: Expected, name: int, rate: float) -> list[Record]:
    return asyncio.run(_open(url, work, expected, name, rate, _clock))


_clock: Clock


def _take_clock(clock: Clock) -> None:
    global _clock  # what processes share has to come in when they are made
    _clock = clock


def run(
    url: str, work: Work, expected: Expected, *, streams: int, rate: float | None, seconds: float, processes: int
) -> tuple[list[Record], Window]:
    """All requests of a closed loop of ``streams``, or with ``rate`` of an open one, and the time that counts."""
    clock = Clock(processes if rate else streams, seconds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _take_clock, (clock,)) as pool:
        if rate:
            calls = [pool.submit(_open_process, url, work, expected, n, rate / processes) for n in range(processes)]
        else:
            shares = [list(range(n, streams, processes)) for n in range(processes)]
            calls = [pool.submit(_closed_process, url, work, expected, share) for share in shares]
        records = [record for call in calls for record in call.result()]
    return records, clock.window(min(record.sent for record in records))


def single_runs(url: str, work: Work) -> Expected:
    """The text of every request there is, one after the other."""

    async def ask() -> Expected:
        texts = {}
        async with _new_client(url) as client:
            for key in work.all_keys():
                record = Record(key, time.monotonic())
                texts[key] = await _Request(client, work.inputs(key), record, lambda: None).run()
                if record.error:
                    raise RuntimeError(f"request {key} alone: {record.error}")
        return texts

    return asyncio.run(ask())
