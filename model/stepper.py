"""One step of the model: parts of sequences in, drawn ids out, without waiting for the device.

Ids that were drawn stay on the device, where the next step reads them; their way to the host is a copy into pinned
memory with an event behind it. So the next step can be launched before anybody has seen the last one's ids.
"""

import itertools
import time
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model.sampling import Sampler
from model.scheduler import Part, Sequence
from model.state import SavedState, StatePool
from model.step_graphs import StepGraphs

NOT_FINITE = -1


class Model(Protocol):
    """What is asked of a model."""

    @property
    def device(self) -> torch.device:
        """Where ids, rows and logits lie."""

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""

    def forward(self, ids: Tensor, pool: StatePool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        """ids int64 [N] of B sequences -> float32 logits [B, vocab] after the last id of each; updates ``pool``."""


@dataclass
class Flight:
    """A step that has been launched."""

    parts: list[Part]
    saved: dict[Sequence, SavedState | None]  # after their parts, of those to be kept; None: there was no memory
    launched: float  # time.monotonic() before anything was done for it
    drawn: Tensor | None  # int64, on the host once the event has come: one a part that draws
    event: torch.cuda.Event | None  # None: all is there already
    used: list[SavedState] = field(default_factory=list)  # kept until the device has read them

    def result(self) -> list[int]:
        """Waits for the step. One id for each part that draws, in their order; NOT_FINITE where its logits are not."""
        if self.event is not None:
            self.event.synchronize()
        return [] if self.drawn is None else self.drawn.tolist()

    @property
    def writing(self) -> int:
        """Sequences of which the step reads the one token that is left."""
        return sum([end - begin == 1 and (draws or completes) for _, begin, end, draws, completes in self.parts])

    @property
    def reading(self) -> int:
        """Tokens of the other parts."""
        return sum([part.end - part.begin for part in self.parts]) - self.writing


class Stepper:
    """``model``, ``sampler`` and ``pool`` at work together. Only the engine's thread uses it."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        pool: StatePool,
        careful: Model | None = None,
        graphs: StepGraphs | None = None,
    ) -> None:
        """``careful``: for steps with a careful sequence. ``graphs``: of ``model`` over ``pool``."""
        self._model, self._sampler, self._pool = model, sampler, pool
        self._careful, self._graphs = careful or model, graphs
        self._cuda = model.device.type == "cuda"
        self._last = torch.zeros(pool.rows, dtype=torch.int64, device=model.device)  # drawn last, a row

    @torch.inference_mode()
    def launch(self, parts: list[Part], keep: set[Sequence]) -> Flight:
        """Begin a step; ``keep``: sequences whose states after it are wanted. Raises what model or device raise."""
        launched = time.monotonic()
        from_host = [part for part in parts if part.begin < part.sequence.given]
        if len(from_host) < len(parts):
            parts = [part for part in parts if part.begin >= part.sequence.given] + from_host  # drawn ids first
        beginning = [part.sequence for part in from_host if part.begins]
        used = [sequence.base for sequence in beginning if sequence.base is not None]
        for sequence in beginning:
            self._begin(sequence)
        drawing = [index for index, part in enumerate(parts) if part.draws]
        rows, ends, draws, ids = self._inputs(parts, from_host, drawing)
        logits = self._forward(parts, ids, rows, ends)
        saved = {part.sequence: self._save(part.sequence.row) for part in parts if part.sequence in keep}
        drawn = None
        if drawing:
            if len(drawing) < len(parts):
                logits, rows = logits.index_select(0, draws), rows.index_select(0, draws)
            drawn = self._draw(logits, rows)
        event = torch.cuda.current_stream(self._model.device).record_event() if self._cuda else None
        return Flight(parts, saved, launched, drawn, event, used)

    def _forward(self, parts: list[Part], ids: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        if any(part.sequence.careful for part in parts):
            return self._careful.forward(ids, self._pool, rows, ends)
        logits = None if self._graphs is None else self._graphs.forward(ids, rows, ends)
        return self._model.forward(ids, self._pool, rows, ends) if logits is None else logits

    def end(self, row: int) -> None:
        """The sequence in ``row`` is over."""
        self._sampler.clear_row(row)

    def _begin(self, sequence: Sequence) -> None:
        if sequence.base is None:
            self._pool.clear(sequence.row)
        else:
            self._pool.load(sequence.row, sequence.base)
        self._sampler.set_row(sequence.row, sequence.params, sequence.ids[sequence.prompt :])

    def _save(self, row: int) -> SavedState | None:
        try:
            return self._pool.save(row)
        except torch.OutOfMemoryError:
            return None

    def _inputs(self, parts: list[Part], from_host: list[Part], drawing: list[int]) -> list[Tensor]:
        """rows [B], cu_seqlens [B + 1], ``drawing``, ids [N], all int64 on the device: in one copy.

        ``from_host``: the last of ``parts``, whose ids the host knows; those of the others were drawn on the device.
        """
        ends = [0, *itertools.accumulate([part.end - part.begin for part in parts])]
        ids = [one for part in from_host for one in part.sequence.ids[part.begin : part.end]]
        values = [[part.sequence.row for part in parts], ends, drawing, ids]
        flat = torch.frombuffer(array("q", itertools.chain.from_iterable(values)), dtype=torch.int64)
        together = torch.empty(len(flat), dtype=torch.int64, pin_memory=True).copy_(flat) if self._cuda else flat
        there = together.to(self._model.device, non_blocking=True).split([len(some) for some in values])
        if on_device := len(parts) - len(from_host):
            drawn = self._last.index_select(0, there[0][:on_device])
            return [*there[:3], torch.cat([drawn, there[3]]) if ids else drawn]
        return list(there)

    def _draw(self, logits: Tensor, rows: Tensor) -> Tensor:
        drawn, finite = self._sampler.sample(logits, rows)
        self._last.index_copy_(0, rows, drawn)
        drawn = torch.where(finite, drawn, NOT_FINITE)
        if not self._cuda:
            return drawn
        there = torch.empty(len(drawn), dtype=torch.int64, pin_memory=True)
        return there.copy_(drawn, non_blocking=True)
