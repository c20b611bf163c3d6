"""Which sequences run, on which row of the state pool, and which of their tokens the next step reads.

No tensors, no threads, no clock: the engine's thread owns a scheduler and asks it before every step.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from model.handle import Handle
from model.sampling import SamplingParams
from model.state import SavedState

RECOVERY = 1 / 64  # by how much steps may grow with each that goes well, after one that was too large


@dataclass(eq=False)
class Sequence:
    """A request in the engine. ``ids`` are its prompt and what was drawn; its state has read the first ``done``.

    They are read on top of ``start``, or of the empty context. One with ``max_tokens`` 0 is read and nothing is drawn.
    """

    ids: list[int]
    params: SamplingParams
    max_tokens: int
    handle: Handle
    start: SavedState | None = None
    prompt: int = field(init=False)
    done: int = 0
    row: int = -1
    result: SavedState | None = None  # what one that is only read is for
    served: int = 0  # the last step that read from it, at first the one at which it got its row
    suspect: bool = False  # was in a step that failed; runs alone until it has drawn a token

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    @property
    def left(self) -> int:
        """Tokens that the state has not read: 1 while the reply is being written."""
        return len(self.ids) - self.done


@dataclass(frozen=True)
class Part:
    """``sequence.ids[begin:end]``, to be read in one step."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def draws(self) -> bool:
        """Whether the step draws a token for this sequence."""
        return self.end == len(self.sequence.ids) and self.sequence.max_tokens > 0

    @property
    def completes(self) -> bool:
        """Whether nothing is left of a sequence that is only to be read."""
        return self.end == len(self.sequence.ids) and self.sequence.max_tokens == 0


class Scheduler:
    """First in, first out onto ``rows`` rows. A step reads one token of every sequence that is being written, and whole
    chunks of those still being read, least recently served first, ``chunk`` tokens in all or one chunk.

    Chunks end at multiples of ``chunk`` from the start of the context, so that the cuts of a text, and with them its
    numbers on a GPU, do not depend on what else is running.
    """

    def __init__(self, rows: int, chunk: int) -> None:
        self.chunk = chunk
        self.active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._free = list(range(rows))
        self._rows = rows
        self._most = float(rows)  # sequences in a step
        self._step = 0

    def __len__(self) -> int:
        """Sequences that wait or run."""
        return len(self._waiting) + len(self.active)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a row."""
        self._waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out and free its row."""
        self.active.remove(sequence)
        heapq.heappush(self._free, sequence.row)

    def everything(self) -> list[Sequence]:
        """All that run or wait."""
        return [*self.active, *self._waiting]

    def ended(self) -> list[Sequence]:
        """Those on a row whose readers want no more of them."""
        return [one for one in self.active if one.handle.finish_reason]

    def admit(self) -> list[Sequence]:
        """Give free rows, lowest first, to those who have waited longest, and return them. Drops who waits no more."""
        # Wherever they stand: behind one who waits long they would keep their ids in memory.
        self._waiting = deque(one for one in self._waiting if one.handle.finish_reason is None)
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.row, sequence.served = heapq.heappop(self._free), self._step
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Part]:
        """What the next step reads: parts of different sequences, at least one where any is active."""
        self._step += 1
        suspects = [one for one in self.active if one.suspect]
        others = [one for one in self.active if not one.suspect]
        # Steps with a suspect alternate with steps without one, so that finding out holds nobody up for long.
        if suspects and (not others or self._step % 2):
            parts = [self._part(min(suspects, key=lambda one: one.served))]
        else:
            parts = self._share(others)
        for part in parts:
            part.sequence.served = self._step
        return parts

    def succeeded(self, parts: list[Part]) -> None:
        """The step has been made: its parts are read."""
        for part in parts:
            part.sequence.done = part.end
            part.sequence.suspect = part.sequence.suspect and not (part.draws or part.completes)
        self._most = min(self._rows, self._most + RECOVERY)

    def failed(self, parts: list[Part]) -> Sequence | None:
        """The step has failed, and the states of its rows are half written. Returns the sequence at fault, if known.

        A sequence that ran alone is at fault itself. Several are read again from their beginnings, alone, so that only
        the one at fault fails in the end. They may all pass, for together they were too much (for the memory, say): so
        steps are half as large from then on, until one at fault is found or many steps have gone well.
        """
        if len(parts) == 1:
            self._most = self._rows
            return parts[0].sequence
        self._most = len(parts) / 2
        for part in parts:
            part.sequence.done, part.sequence.suspect = 0, True
        return None

    def _share(self, sequences: list[Sequence]) -> list[Part]:
        parts = [self._part(one) for one in sequences if one.left == 1]
        budget = self.chunk
        for sequence in sorted((one for one in sequences if one.left > 1), key=lambda one: one.served):
            part = self._part(sequence)
            size = part.end - part.begin
            if size <= budget:
                parts.append(part)
                budget -= size
        return sorted(parts, key=lambda part: part.sequence.served)[: max(1, int(self._most))]

    def _part(self, sequence: Sequence) -> Part:
        end = (sequence.done // self.chunk + 1) * self.chunk
        return Part(sequence, sequence.done, min(end, len(sequence.ids)))
