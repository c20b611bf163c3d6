"""Which sequences run, on which row of the state pool, and which of their tokens the next step reads.

No tensors, no threads, no clock: the engine's thread owns a scheduler, asks it before every step and tells it how the
step went. A step may be planned before the last one's tokens are known: how many there will be is known.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from model.handle import Handle
from model.pacer import Pacer
from model.sampling import SamplingParams
from model.state import SavedState

GRID = 16  # tokens; where a prompt may be cut, in positions from the start of its context
# Chunks, of different prompts, that a step may read beside replies. To keep 512 rows writing 256 tokens each after
# prompts of 512, a step has to read 1,024 tokens, and more of longer ones; the pacer says what it has time for.
TOGETHER = 4
RECOVERY = 1 / 64  # by how much steps may grow with each that goes well, after one that was too large


@dataclass(eq=False)
class Sequence:
    """A request in the engine. ``ids`` are its prompt and what has been drawn and handed out since.

    They are read on top of ``start``, or of the empty context. One with ``max_tokens`` 0 is read and nothing is drawn.
    ``keys`` name its prefixes in the cache, one a chunk.
    """

    ids: list[int]
    params: SamplingParams
    max_tokens: int
    handle: Handle
    start: SavedState | None = None
    keys: list[str] = field(default_factory=list)
    row: int = -1
    result: SavedState | None = None  # what one that is only read is for
    prompt: int = field(init=False)
    served: int = 0  # the step at which its turn last ended, at first the one at which it got its row
    suspect: bool = False  # was in a step that failed; runs alone until it has drawn a token
    over: bool = False  # it has left its row
    careful: bool = False  # read by the model that takes more care of large numbers
    # These count planned steps as made.
    base: SavedState | None = field(init=False)  # the state in which its row is to begin
    origin: int = 0  # how many of the ids that state has read already
    done: int = 0  # ids that its state has read
    drawn: int = 0  # tokens
    given: int = field(init=False)  # ids before this one come from the host, later ones were drawn on the device since
    alone: bool = True  # its state was made by steps that read nothing else, cut as on an idle server

    def __post_init__(self) -> None:
        self.prompt = self.given = len(self.ids)
        self.base = self.start

    @property
    def left(self) -> int:
        """Tokens to be read: 1 while the reply is being written, 0 once the last one is drawn or all is read."""
        if self.max_tokens and self.drawn >= self.max_tokens:
            return 0
        return self.prompt + self.drawn - self.done

    def resume(self, position: int, state: SavedState, alone: bool) -> None:
        """Begin with a known state after the first ``position`` ids."""
        self.base, self.origin, self.done, self.alone = state, position, position, alone
        self.handle.cached_tokens = position

    def carefully(self) -> "Sequence":
        """Another one for the same reply, as far as it has come, to be read from the beginning with care."""
        other = Sequence(list(self.ids), self.params, self.max_tokens, self.handle, self.start, careful=True)
        other.prompt = self.prompt
        other.restart()
        return other

    def restart(self) -> None:
        """Read all from the beginning again, with what has been handed out of the reply."""
        self.base, self.origin, self.done = self.start, 0, 0
        self.given, self.drawn = len(self.ids), len(self.ids) - self.prompt
        self.handle.cached_tokens = self.handle.prefill_tokens = 0


class Part(NamedTuple):
    """``begin:end`` of what ``sequence`` has to read, to be read in one step.

    ``draws``: that is the last of it, and a token is drawn. ``completes``: the last of one that is only to be read.
    """

    sequence: Sequence
    begin: int
    end: int
    draws: bool = False
    completes: bool = False

    @property
    def size(self) -> int:
        """Tokens."""
        return self.end - self.begin

    @property
    def begins(self) -> bool:
        """Whether it is the first on its row."""
        return self.begin == self.sequence.origin


class Scheduler:
    """First in, first out onto ``rows`` rows. A step reads one token of every sequence that is being written, and parts
    of those still being read, in turns of a chunk each, together as many tokens as the pacer allows.

    Parts end at multiples of ``grid`` from the start of the context and never reach over a multiple of ``chunk``.
    Where nothing is being written they are whole chunks: so the cuts of a text, and with them its numbers on a GPU, are
    always the same on a server that has nothing else to do.
    """

    def __init__(self, rows: int, chunk: int, grid: int = GRID) -> None:
        """``chunk`` becomes a multiple of ``grid``; of a smaller chunk, ``grid`` becomes the same."""
        grid = min(grid, chunk)
        self.grid, self.chunk = grid, chunk // grid * grid
        self.pacer = Pacer(self.chunk, grid, TOGETHER * self.chunk)
        self.active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._free = list(range(rows))
        self._rows = rows
        self._most = float(rows)  # sequences in a step
        self._step = 0

    def __len__(self) -> int:
        """Sequences that wait or run."""
        return len(self._waiting) + len(self.active)

    @property
    def waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a row. One that is only read goes first: it ends the turn of a request that has waited."""
        if sequence.max_tokens:
            self._waiting.append(sequence)
        else:
            self._waiting.appendleft(sequence)

    def retry(self, sequence: Sequence) -> None:
        """Let it wait for a row before all others."""
        self._waiting.appendleft(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out and free its row."""
        sequence.over = True
        self.active.remove(sequence)
        heapq.heappush(self._free, sequence.row)

    def everything(self) -> list[Sequence]:
        """All that run or wait."""
        return [*self.active, *self._waiting]

    def ended(self) -> list[Sequence]:
        """Those on a row whose readers want no more of them."""
        return [one for one in self.active if one.handle.finish_reason]

    def forget(self) -> list[Sequence]:
        """Take those out of the queue who wait no more, and return them."""
        # Wherever they stand: behind one who waits long they would keep their ids in memory.
        gone = [one for one in self._waiting if one.handle.finish_reason]
        if gone:
            self._waiting = deque(one for one in self._waiting if one.handle.finish_reason is None)
        return gone

    def admit(self) -> list[Sequence]:
        """Give free rows, lowest first, to those who have waited longest, and return them."""
        admitted = []
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.row, sequence.served = heapq.heappop(self._free), self._step
            self.active.append(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> list[Part]:
        """What the next step reads: parts of different sequences, at least one where any has something left."""
        self._step += 1
        suspects = [one for one in self.active if one.suspect and one.left]
        # Steps with a suspect alternate with steps without one, so that finding out holds nobody up for long.
        if not (suspects and self._step % 2) and (parts := self._share()):
            return parts
        if not suspects:
            return []
        sequence = min(suspects, key=lambda one: one.served)
        return [_part(sequence, self._end(sequence, self.chunk, whole=True))]

    def launched(self, parts: list[Part]) -> None:
        """The step is on its way: what is planned next comes after it."""
        lonely = len(parts) == 1
        for part in parts:
            sequence, begin, end, draws, completes = part
            if begin < sequence.prompt:
                sequence.handle.prefill_tokens += min(end, sequence.prompt) - begin
            sequence.alone = lonely and sequence.alone and self._is_whole(part)
            sequence.base = None  # its row has it now
            sequence.done = end
            sequence.drawn += draws
            if draws or completes or end % self.chunk == 0 or sequence.suspect:
                sequence.served = self._step

    def settled(self, parts: list[Part]) -> None:
        """The step has been made."""
        for part in parts:
            if part.sequence.suspect:
                part.sequence.suspect = not (part.draws or part.completes)
        self._most = min(self._rows, self._most + RECOVERY)

    def suspicious(self) -> bool:
        """Whether any sequence is a suspect: steps are then made one by one, so that a fault has an address."""
        return any(one.suspect for one in self.active)

    def failed(self, parts: list[Part]) -> Sequence | None:
        """A step has failed, and the states of its rows are half written. Returns the sequence at fault, if known.

        A sequence that ran alone is at fault itself. Several are read again from their beginnings, alone, so that only
        the one at fault fails in the end. They may all pass, for together they were too much (for the memory, say): so
        steps are half as large from then on, until one at fault is found or many steps have gone well.
        """
        sequences = list(dict.fromkeys(part.sequence for part in parts))
        if len(sequences) == 1:
            self._most = self._rows
            return None if sequences[0].over else sequences[0]
        self._most = len(sequences) / 2
        for sequence in sequences:
            if not sequence.over:
                sequence.suspect = True
                sequence.restart()
        return None

    def _share(self) -> list[Part]:
        """A step without suspects."""
        parts, reading = [], []
        for one in self.active:
            if one.suspect or not (left := one.left):
                continue
            if left == 1:
                draws = one.max_tokens > 0
                parts.append(Part(one, one.done, one.done + 1, draws, not draws))
            else:
                reading.append(one)
        reading.sort(key=lambda one: one.served)
        whole = not parts
        budget = self.pacer.budget(len(parts), len(reading))
        # Cut anywhere, on the CPU: a step that reads one token of each sequence is made in one call, so that one token
        # of every prompt takes little longer than one of the first, and less than several of it.
        each = budget if whole or self.grid > 1 or not reading else max(1, budget // len(reading))
        for sequence in reading:
            if (end := self._end(sequence, min(budget, each), whole)) > sequence.done:
                parts.append(_part(sequence, end))
                budget -= end - sequence.done
        if len(parts) > (most := max(1, int(self._most))):
            parts = sorted(parts, key=lambda part: part.sequence.served)[:most]
        return parts

    def _end(self, sequence: Sequence, budget: int, whole: bool) -> int:
        """Where a part of at most ``budget`` tokens ends; it may be empty."""
        done = sequence.done
        end = min((done // self.chunk + 1) * self.chunk, done + sequence.left)
        if end - done <= budget:
            return end
        return done if whole else (done + budget) // self.grid * self.grid

    def _is_whole(self, part: Part) -> bool:
        return part.end % self.chunk == 0 or part.end >= part.sequence.prompt


def _part(sequence: Sequence, end: int) -> Part:
    last = end == sequence.done + sequence.left
    return Part(sequence, sequence.done, end, last and sequence.max_tokens > 0, last and sequence.max_tokens == 0)
