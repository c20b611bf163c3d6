"""With a seed, a reply does not depend on who else is there, nor on a step that had to be read again."""

import random
import time

import pytest
import torch
from torch import Tensor

from model.sampling import SamplingParams
from tests.engine.conftest import StartEngine
from tests.stub_model import StubModel, StubPool, mixed, reply_of


class Spread(StubModel):
    """Logits over the whole vocabulary, a function of all that a row has read."""

    def forward(self, ids: Tensor, pool: StubPool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
        super().forward(ids, pool, rows, cu_seqlens)
        read = [pool.read[row] for row in rows.tolist()]
        return torch.tensor(
            [[-30.0] + [mixed([*one, token]) / 16 for token in range(1, self.vocab_size)] for one in read]
        )


def _params(n: int) -> SamplingParams:
    return SamplingParams(seed=n % 3, temperature=0.5 + n % 2, top_p=0.9, presence_penalty=0.4, frequency_penalty=0.3)


@pytest.mark.acceptance(13)
@pytest.mark.acceptance(17)
def test_seeded_replies_equal_their_single_runs(start: StartEngine) -> None:
    alone = start(Spread(mixed), rows=1)
    expected = [list(alone.submit([n], _params(n), 12)) for n in range(1, 13)]
    assert len({tuple(ids) for ids in expected}) == 12
    together = start(Spread(mixed), rows=5)
    order = list(range(1, 13))
    random.Random(3).shuffle(order)
    handles = {}
    for n in order:
        handles[n] = together.submit([n], _params(n), 12)
        time.sleep(0.002)
    assert [list(handles[n]) for n in range(1, 13)] == expected


@pytest.mark.acceptance(18)
def test_a_seeded_reply_goes_on_as_before_after_a_neighbour_failed(start: StartEngine) -> None:
    expected = list(start(Spread(mixed)).submit([5], _params(5), 40))

    def script(ids: list[int]) -> int:
        if ids[0] == 63 and len(ids) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return mixed(ids)

    engine = start(Spread(script, delay=0.001))
    handle = engine.submit([5], _params(5), 40)
    handle_ids = handle.take()
    guilty = engine.submit([63], _params(1), 40)
    assert handle_ids + list(handle) == expected
    assert len(list(guilty)) == 3 and guilty.finish_reason == "error"


def test_a_reply_that_has_ended_costs_the_others_no_time(start: StartEngine) -> None:
    """Its parameters are gone from the sampler, which takes every step that any row asks for, however it ended."""

    def script(ids: list[int]) -> int:
        if ids[0] == 63 and len(ids) == 3:
            raise ValueError("broken")
        return 0 if ids[0] == 62 else mixed(ids)

    engine = start(StubModel(script, delay=0.001))
    costly = SamplingParams(top_p=0.5, top_k=9, presence_penalty=0.5, seed=1)
    handles = [engine.submit([first], costly, length) for first, length in ((1, 5), (62, 5), (63, 5), (2, 10000))]
    handles[-1].take()
    handles[-1].cancel()
    for handle in handles:
        list(handle)
    assert [handle.finish_reason for handle in handles] == ["length", "stop", "error", "cancelled"]
    assert list(engine.submit([5], SamplingParams(temperature=0.0), 3)) == reply_of(mixed, [5], 3)
    engine.close()
    assert engine._stepper._sampler._params == [None] * 4


def test_without_a_seed_replies_differ(start: StartEngine) -> None:
    engine = start(Spread(mixed))
    first, second = (list(engine.submit([5], SamplingParams(temperature=2.0), 20)) for _ in range(2))
    assert first != second
