"""What became of the requests of a load test, and the numbers that are made of it.

The ramp-up lasts until every stream has had its first token, and counts for nothing. What is measured is the window
after it, up to the moment at which no new requests are begun; those that run then are let to their ends, so that the
tokens of each are known. A reply's tokens count as spread evenly from its first to its last.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

QUANTILES = 40  # of the curves that are plotted
INTERVAL = 0.5  # seconds, of the plotted throughput


@dataclass
class Record:
    """One request. Times are ``time.monotonic()`` of this machine, None where there was no such moment."""

    key: str
    sent: float
    first: float | None = None  # when the first text came
    last: float | None = None  # when the last did
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    retried: int = 0  # answers 409

    @property
    def ttft(self) -> float:
        """Seconds from sending, retries included, to the first text; infinite where none came."""
        return float("inf") if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is no second."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    def tokens_within(self, begin: float, end: float) -> float:
        """How many of its tokens came in [begin, end)."""
        if self.first is None or self.last is None:
            return 0.0
        if self.last <= self.first:
            return float(self.tokens) if begin <= self.first < end else 0.0
        share = max(0.0, min(end, self.last) - max(begin, self.first)) / (self.last - self.first)
        return self.tokens * share


@dataclass(frozen=True)
class Window:
    """The time that is measured, in seconds of ``time.monotonic()``; ``start`` is that of the ramp-up."""

    start: float
    begin: float
    end: float

    def throughput(self, records: Iterable[Record]) -> float:
        """Output tokens a second in the window."""
        return sum(one.tokens_within(self.begin, self.end) for one in records) / (self.end - self.begin)

    def within(self, records: Iterable[Record]) -> list[Record]:
        """The requests that were sent in the window."""
        return [one for one in records if self.begin <= one.sent < self.end]

    def curve(self, records: Sequence[Record]) -> list[float]:
        """Output tokens a second in each INTERVAL from the start of the ramp-up to the end of the window."""
        count = int((self.end - self.start) / INTERVAL)
        edges = [self.start + INTERVAL * n for n in range(count + 1)]
        return [round(sum(one.tokens_within(a, b) for one in records) / INTERVAL, 1) for a, b in pairwise(edges)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of them do not pass, interpolated; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place, fraction = divmod(share * (len(values) - 1), 1)
    low = ordered[int(place)]
    return low + (ordered[int(place) + 1] - low) * fraction if fraction else low


def summary(records: Sequence[Record], window: Window) -> dict[str, Any]:
    """The numbers of a load test over HTTP, by the names they have in results/."""
    sent = window.within(records)
    ttft = [one.ttft for one in sent if one.error is None]
    tpot = [value for one in sent if (value := one.tpot) is not None]
    ended = [one for one in records if one.error is None]

    def mean(of: Callable[[Record], int]) -> int | None:
        return round(statistics.fmean(map(of, ended))) if ended else None

    return {
        "prompt_tokens": mean(lambda one: one.prompt_tokens),
        "output_tokens": mean(lambda one: one.tokens),
        "http_tokens_per_s": round(window.throughput(records), 1),
        **{f"ttft_p{n}_s": _rounded(percentile(ttft, n / 100)) for n in (50, 99)},
        **{f"tpot_p{n}_s": _rounded(percentile(tpot, n / 100)) for n in (50, 99)},
        "errors": sum(one.error is not None for one in records),
        "retried_409": sum(one.retried for one in records),
        "requests": len(records),
        "ramp_up_s": round(window.begin - window.start, 2),
        "window_s": round(window.end - window.begin, 2),
        "curves": {
            "ttft_s": [_rounded(percentile(ttft, n / QUANTILES)) for n in range(QUANTILES + 1)],
            "tpot_s": [_rounded(percentile(tpot, n / QUANTILES)) for n in range(QUANTILES + 1)],
            "tokens_per_s": window.curve(records),
        },
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or value == float("inf") else round(value, 5)
