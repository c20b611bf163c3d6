"""A known prefix is not read again, and nobody can tell from the reply."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from model import checkpoint
from model.engine import Engine
from model.prefix_cache import PrefixCache, prefix_keys
from model.rwkv7 import RWKV7
from model.sampling import Sampler, SamplingParams
from model.state import StatePool
from model.tiers import StateTiers
from tests import tiny
from tests.engine.by_hand import ByHand, DictStore
from tests.stub_model import StubModel, mixed, reply_of


def _engine(cache: PrefixCache, **parameters: int) -> ByHand:
    return ByHand(StubModel(mixed), cache=cache, **parameters)


@pytest.fixture
def store() -> DictStore:
    return DictStore()


def _ask(engine: ByHand, ids: list[int]) -> int:
    """How many of the ids were known."""
    handle = engine.order(ids, 3)
    engine.run()
    assert list(handle) == reply_of(mixed, ids, 3)
    assert handle.cached_tokens + handle.prefill_tokens == len(ids)
    return handle.cached_tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_goes_on_from_its_longest_known_prefix(store: DictStore, ahead: int) -> None:
    engine = _engine(PrefixCache(store, exact=True), ahead=ahead)
    prompt = [1 + n % 50 for n in range(30)]
    assert _ask(engine, prompt) == 0
    steps = len(engine.model.steps)
    assert _ask(engine, prompt) == 24
    assert engine.model.steps[steps].ids == [prompt[24:]]
    assert _ask(engine, [*prompt, 7, 8, 9]) == 24
    assert _ask(engine, [*prompt[:20], 60, *prompt[21:]]) == 16
    assert _ask(engine, prompt[:24]) == 16, "the last id has to be read, for the first of the reply"
    assert _ask(engine, [2, *prompt]) == 0
    assert engine.counters()["cached_tokens"] == 24 + 24 + 16 + 16
    engine.close()


def test_an_idle_server_goes_on_from_none_but_its_own_states(store: DictStore) -> None:
    """On a GPU those made beside others may differ in the last bits."""
    engine = _engine(PrefixCache(store, exact=False))
    prompt = [1 + n % 50 for n in range(30)]
    other = engine.order([3] * 8, 60)
    together = engine.order(prompt, 1)
    while together.finish_reason is None:
        engine.turn()
    assert all(key.startswith("shared/") for key in store.states)
    hit = engine.order(prompt, 1)
    while hit.finish_reason is None:
        engine.turn()
    assert hit.cached_tokens == 24, "beside the other one it does not matter"
    other.cancel()
    engine.run()
    assert _ask(engine, prompt) == 0
    assert _ask(engine, prompt) == 24
    assert {key.split("/")[0] for key in store.states} == {"shared", "alone"}
    engine.close()


def test_a_hit_beside_others_taints_what_is_made_of_it(store: DictStore) -> None:
    engine = _engine(PrefixCache(store, exact=False), rows=2)
    first, second = [1] * 17, [1] * 17 + [2] * 16
    other = engine.order([3], 60)
    for prompt in (first, second):
        handle = engine.order(prompt, 1)
        while handle.finish_reason is None:
            engine.turn()
    other.cancel()
    engine.run()
    assert handle.cached_tokens == 16
    assert _ask(engine, [*second, 5]) == 0
    engine.close()


def test_a_state_of_a_step_that_failed_is_not_kept(store: DictStore) -> None:
    def script(ids: list[int]) -> int:
        if ids[0] == 63:
            raise ValueError("broken")
        return mixed(ids)

    engine = ByHand(StubModel(script), cache=PrefixCache(store, exact=True))
    handle = engine.order([63] * 30, 1)
    engine.run()
    assert handle.finish_reason == "error" and not store.states
    engine.close()


def test_a_request_on_a_state_neither_finds_nor_leaves_a_prefix(store: DictStore) -> None:
    engine = _engine(PrefixCache(store, exact=True))
    prompt = [5] * 30
    assert _ask(engine, prompt) == 0
    kept = dict(store.states)
    handle = engine.submit(prompt, SamplingParams(temperature=0.0), 3, start=[9, 9])
    engine.run()
    assert list(handle) == reply_of(mixed, [9, 9, *prompt], 3)
    assert handle.cached_tokens == 0 and store.states == kept
    engine.close()


def test_few_states_are_kept_of_a_long_prompt() -> None:
    cache = PrefixCache(DictStore(), exact=True)
    kept = [chunks for chunks in range(1, 1001) if cache.wants(chunks, 1001)]
    assert len(kept) < 7 + 4 * 8
    assert kept[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert all(later - earlier <= later / 4 + 1 for earlier, later in pairwise(kept))
    assert cache.wants(997, 997) and not cache.wants(997, 998) and not cache.wants(0, 5)


def test_names_are_those_of_all_that_was_read() -> None:
    one, other = prefix_keys([1, 2, 3, 4, 5], 2), prefix_keys([1, 2, 3, 9, 5], 2)
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    assert prefix_keys([3, 4, 3, 4, 1], 2)[1] != prefix_keys([3, 4, 1], 2)[0]
    assert prefix_keys([1, 2], 2) == prefix_keys([1], 2) == []
    assert len(prefix_keys([0] * 1000, 1)) == 999


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RWKV7:
    """A real one, tiny, on the CPU."""
    path = tiny.write(tiny.Shape(vocab=300), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    return RWKV7.load(checkpoint.load(str(path)), "cpu", progress=False)


Open = Callable[[PrefixCache | None], Engine]


@pytest.fixture
def open_(model: RWKV7) -> Iterator[Open]:
    """An engine over the real model, with this cache."""
    engines: list[Engine] = []

    def open_(cache: PrefixCache | None) -> Engine:
        allowed = torch.ones(model.vocab_size, dtype=torch.bool)
        sampler = Sampler(model.vocab_size, 3, "cpu", allowed)
        engines.append(Engine(model, sampler, StatePool(model.config, 3), 16, grid=1, cache=cache))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def test_warm_equals_cold_bit_for_bit(model: RWKV7, open_: Open) -> None:
    prompts = [[1 + (3 * n + k * (n > 40)) % 290 for n in range(length)] for length in (50, 90, 17) for k in range(4)]
    cold = open_(None)
    expected = [list(cold.submit(ids, SamplingParams(seed=n), 8)) for n, ids in enumerate(prompts)]
    state = 8 * model.config.layers * model.config.width * 40  # bytes, or a little more
    tiers = StateTiers(5 * state, 0)
    warm = open_(PrefixCache(tiers, exact=True))
    busy = warm.submit([7], SamplingParams(seed=9), 5000)
    cached = 0
    for _ in range(2):
        handles = [warm.submit(ids, SamplingParams(seed=n), 8) for n, ids in enumerate(prompts)]
        assert [list(handle) for handle in handles] == expected
        cached += sum(handle.cached_tokens for handle in handles)
    assert cached > 200 and 0 < tiers.used[0] <= 5 * state
    busy.cancel()
