"""sample_ at the World vocabulary, greedy and with temperature and top_p, beside the same step in PyTorch's own."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.op_cases import Case, numbers, sets_for
from model.sampling import Sampler, SamplingParams

OPERATORS = ("sample_",)
VOCAB = 65536
BATCHES = (1, 32, 256, 960)
WAYS: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda seed: SamplingParams(temperature=0.0, seed=seed),
    "top_p=0.5": lambda seed: SamplingParams(temperature=0.8, top_p=0.5, seed=seed),
}
Drawn = Callable[[], tuple[Tensor, Tensor]]


def calls(way: str, logits: Sequence[Tensor], tuned: bool) -> list[Drawn]:
    """A step on each of ``logits``, by the operator or in PyTorch's own; both begin with the same seeds."""
    batch = len(logits[0])
    made = Sampler(VOCAB, batch, "cuda", torch.ones(VOCAB, dtype=torch.bool), tuned)
    for row in range(batch):
        made.set_row(row, WAYS[way](row))
    rows = torch.arange(batch, device="cuda")
    return [partial(made.sample, one, rows) for one in logits]


def disagreement(way: str, logits: Tensor) -> float:
    """The share of rows whose first ids differ: exp is not the same, so one of many draws may be the neighbour."""
    ours, theirs = (calls(way, [logits], tuned)[0]()[0] for tuned in (True, False))
    return float((ours != theirs).float().mean())


def cases(op: str) -> Iterator[Case]:
    """Fresh logits each call while they fit a few GB, so that none come out of the cache."""
    for batch in BATCHES:
        sets = min(sets_for(batch * VOCAB * 4), 8)
        logits = [numbers(batch, VOCAB, dtype=torch.float32, seed=seed, scale=3.0) for seed in range(sets)]
        for way in WAYS:
            yield Case(
                op, False, torch.float32, f"B={batch} V={VOCAB} {way}",
                ours=calls(way, logits, tuned=True),
                peers={"torch": calls(way, logits, tuned=False)},
                error=partial(disagreement, way, logits[0]),
                bound=1 / 256,
                bytes=batch * (VOCAB * 4 + 17),
            )  # fmt: skip
