"""The same requests through the engine itself: no HTTP, one thread that sends them and turns their ids into text.

What the server adds to this (HTTP, events, a thread for each stream) is what the share of the throughput says.
"""

import time
from dataclasses import dataclass

from benchmarks.load_stats import Record, Window
from benchmarks.load_work import Work
from model.engine import Engine
from model.handle import Handle
from model.request import Request
from model.sampling import SamplingParams
from model.service import Service
from model.settings import Settings
from model.text import ReplyText

PAUSE = 0.01  # seconds between two looks at all streams


@dataclass
class _Running:
    record: Record
    handle: Handle
    text: ReplyText

    def read(self) -> bool:
        """Turn into text what has come since. Whether that was all."""
        ended = self.handle.finish_reason is not None  # asked first: what comes later is read the next time
        if self.record.tokens < self.handle.tokens:
            ids = self.handle.take()
            self.record.last = time.monotonic()
            self.record.first = self.record.first or self.record.last
            self.record.tokens += len(ids)
            self.text.push_all(ids)
        return ended


class Driver:
    """A closed loop of ``streams`` over a service."""

    def __init__(self, service: Service, work: Work, streams: int) -> None:
        self.engine: Engine = service.engine
        self.tokenizer, self.settings, self.work = service.tokenizer, service.settings, work
        self.records: list[Record] = []
        self.sent = [0] * streams

    def run(self, seconds: float) -> tuple[list[Record], Window]:
        """All requests, and the time that counts: ``seconds`` from when every stream has had a first token."""
        start = time.monotonic()
        begin = end = float("inf")
        running = {stream: self._send(stream, start) for stream in range(len(self.sent))}
        while running:
            for stream, one in list(running.items()):
                if one.read():
                    self._close(running.pop(stream))
                    if (now := time.monotonic()) < end:
                        running[stream] = self._send(stream, now)
            if begin == float("inf") and all(self._has_begun(stream, running) for stream in range(len(self.sent))):
                begin = time.monotonic()
                end = begin + seconds
            time.sleep(PAUSE)
        return self.records, Window(start, begin, end)

    def _has_begun(self, stream: int, running: dict[int, _Running]) -> bool:
        return self.sent[stream] > 1 or running[stream].record.first is not None

    def _send(self, stream: int, now: float) -> _Running:
        key = self.work.key(stream, self.sent[stream])
        self.sent[stream] += 1
        inputs = self.work.inputs(key)
        record = Record(key, now)
        ids = self.tokenizer.encode(inputs["prompt"])
        record.prompt_tokens = len(ids)
        start = [0] if self.settings.start_token else []
        request = Request.of(**inputs)
        params = SamplingParams(request.temperature, request.top_p, seed=request.seed)
        handle = self.engine.submit(start + ids, params, request.max_tokens)
        return _Running(record, handle, ReplyText(self.tokenizer))

    def _close(self, one: _Running) -> None:
        one.text.finish()
        if one.handle.finish_reason == "error":
            one.record.error = one.handle.error
        self.records.append(one.record)


def run(work: Work, streams: int, seconds: float) -> tuple[list[Record], Window]:
    """The closed loop over an engine with the settings of the environment; everything of it is gone afterwards."""
    service = Service.build(Settings.read())
    try:
        return Driver(service, work, streams).run(seconds)
    finally:
        service.engine.close()
