"""What an engine has done since it was started."""

from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean

RECENT = 1024  # steps whose times are kept


@dataclass
class Counters:
    """Written by the engine, mostly on its own thread. Times in seconds."""

    requests: Counter[str] = field(default_factory=Counter)  # by how they ended; "refused" were not let in
    reads: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0
    steps: int = 0
    steps_failed: int = 0
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def report(self) -> dict[str, int | float]:
        """Flat names for logs; times of the last 1,024 steps."""
        names = ("reads", "tokens_in", "tokens_out", "cached_tokens", "steps", "steps_failed")
        ends = ("stop", "length", "cancelled", "error", "refused")
        found: dict[str, int | float] = {f"requests_{end}": self.requests[end] for end in ends}
        found |= {name: getattr(self, name) for name in names}
        if times := sorted(self.step_times):
            found["step_mean"] = fmean(times)
            found["step_p50"] = times[len(times) // 2]
            found["step_p99"] = times[len(times) * 99 // 100]
        return found
