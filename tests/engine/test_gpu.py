"""The engine on a CUDA device: steps ahead of their ids, states in device memory, a pool of the size of the card."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from model import checkpoint
from model.engine import Engine
from model.handle import Handle
from model.memory import MIB, free_memory
from model.pool_size import SPARE, NoRoomError, fit, row_bytes
from model.prefix_cache import PrefixCache
from model.rwkv7 import RWKV7
from model.sampling import Sampler, SamplingParams
from model.scheduler import Part, Sequence
from model.settings import Settings
from model.state import SavedState, StatePool
from model.step_graphs import StepGraphs
from model.stepper import Flight, Stepper
from model.tiers import StateTiers
from model.upload import Upload
from tests import tiny
from tests.model.test_numbers import rigged

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0)
CHUNK = 64
Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=["plain", "tuned"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RWKV7:
    path = tiny.write(tiny.Shape(ranks=(32, 32, 32, 64)), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    tuned = request.param == "tuned"
    model = RWKV7.load(checkpoint.load(str(path)), "cuda", torch.float16, progress=False, tuned=tuned)
    assert model.tuned == tuned
    return model


@pytest.fixture
def open_(model: RWKV7) -> Iterator[Open]:
    """``open_(rows=4, **parameters)``: an engine over the model on the device."""
    engines: list[Engine] = []

    def open_(rows: int = 4, **parameters: object) -> Engine:
        allowed = torch.ones(model.vocab_size, dtype=torch.bool)
        sampler = Sampler(model.vocab_size, rows, model.device, allowed, tuned=model.tuned)
        pool = StatePool(model.config, rows, model.device)
        graphs = StepGraphs(model, pool, CHUNK, progress=False) if model.tuned else None
        fast = {"careful": model.careful(), "graphs": graphs}
        engines.append(Engine(model, sampler, pool, CHUNK, **fast, **parameters))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def _prompt(n: int, length: int) -> list[int]:
    return [1 + (n * 7919 + k * 104729) % 60000 for k in range(length)]


PROMPTS = [_prompt(n, length) for n, length in enumerate((1, 5, 16, 63, 64, 65, 200, 513))]


def _ask(engine: Engine, ids: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], Handle]:
    handle = engine.submit(ids, params, 24)
    drawn = list(handle)
    assert handle.finish_reason in ("length", "stop"), handle.error
    return drawn, handle


def test_steps_ahead_of_their_ids_give_the_same_ids(open_: Open) -> None:
    in_step, ahead, default = open_(ahead=0), open_(ahead=1), open_()
    for n, ids in enumerate(PROMPTS):
        for params in (GREEDY, SamplingParams(seed=n, top_p=0.9, presence_penalty=0.5)):
            expected = _ask(in_step, ids, params)[0]
            assert _ask(ahead, ids, params)[0] == expected
            assert _ask(default, ids, params)[0] == expected
    assert default._ahead == 1


def test_many_at_once_all_end_and_leave_nothing(open_: Open) -> None:
    engine = open_(rows=8)
    handles = [engine.submit(PROMPTS[n % 8], SamplingParams(seed=n), 1 + n % 30) for n in range(60)]
    for handle in handles[::7]:
        handle.cancel()
    for n, handle in enumerate(handles):
        assert len(list(handle)) <= 1 + n % 30
        assert handle.finish_reason in (("cancelled", "length", "stop") if n % 7 == 0 else ("length", "stop"))
    first = _ask(engine, PROMPTS[6])[0]
    assert first == _ask(open_(), PROMPTS[6])[0], "idle again, it gives the bytes of a fresh one"


@pytest.mark.parametrize("device_states", [0, 1, 40], ids=["host", "both", "device"])
def test_a_known_prefix_changes_no_byte_on_an_idle_server(model: RWKV7, open_: Open, device_states: int) -> None:
    state = row_bytes(model.config, torch.float32)
    tiers = StateTiers(device_states * state, 40 * state, model.device)
    cold, warm = open_(), open_(cache=PrefixCache(tiers, exact=False))
    busy = warm.submit(_prompt(99, 3), SamplingParams(seed=1), 100000)
    for ids in PROMPTS:
        list(warm.submit(ids, GREEDY, 3))  # leaves states with the marks of its neighbour
    busy.cancel()
    while warm.last_step_age():
        pass
    known = 0
    for _ in range(2):
        for ids in PROMPTS:
            for tail in ([], _prompt(50, 70)):
                drawn, handle = _ask(warm, ids + tail)
                assert drawn == _ask(cold, ids + tail)[0]
                known += handle.cached_tokens
    assert known >= 2 * (64 + 192 + 512)


def test_states_of_texts_equal_what_the_pool_holds(model: RWKV7, open_: Open) -> None:
    engine = open_()
    ids = _prompt(3, 150)
    pool = StatePool(model.config, 1, model.device)
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    for begin in range(0, 150, CHUNK):
        part = torch.tensor(ids[begin : begin + CHUNK], device="cuda")
        model.forward(part, pool, zero, torch.tensor([0, len(part)], device="cuda"))
    read = engine.read(ids)
    assert torch.equal(read.wkv, pool.wkv[:, 0]) and torch.equal(read.shift, pool.shift[:, :, 0])
    reply = list(engine.submit([5], GREEDY, 24, start=read))
    host = SavedState(read.wkv.cpu().pin_memory(), read.shift.cpu().pin_memory())
    assert list(engine.submit([5], GREEDY, 24, start=host)) == reply
    assert torch.equal(read.wkv, pool.wkv[:, 0]), "and it was not written"


def test_a_step_is_launched_without_waiting_for_the_device(model: RWKV7) -> None:
    allowed = torch.ones(model.vocab_size, dtype=torch.bool)
    sampler = Sampler(model.vocab_size, 2, model.device, allowed, tuned=model.tuned)
    pool = StatePool(model.config, 2, model.device)
    stepper = Stepper(
        model, sampler, pool, graphs=StepGraphs(model, pool, CHUNK, progress=False) if model.tuned else None
    )
    params = SamplingParams(seed=1, top_p=0.5, top_k=9, presence_penalty=0.5)
    sequences = [Sequence(_prompt(row, 40), params, 9, Handle()) for row in range(2)]
    for row, sequence in enumerate(sequences):
        sequence.row = row

    def launch() -> Flight:
        parts = [Part(one, one.done, one.done + one.left, True) for one in sequences]
        flight = stepper.launch(parts, {sequences[0]})
        for part in parts:
            part.sequence.done, part.sequence.drawn = part.end, part.sequence.drawn + 1
        return flight

    launch().result()  # first uses of kernels and memory may wait
    for sequence in sequences:
        sequence.done = sequence.drawn = 0
    with _no_waiting():
        flights = [launch() for _ in range(4)]
    assert all(len(flight.result()) == 2 for flight in flights)
    with _no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_pool_takes_what_is_free_and_no_request_finds_none(
    model: RWKV7, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = torch.ones(model.vocab_size, dtype=torch.bool)
    torch.cuda.empty_cache()
    ballast = torch.empty(free_memory(model.device) - 700 * MIB, dtype=torch.uint8, device="cuda")
    try:
        settings = Settings(max_batch=4096, memory_reserve=100, prefill_chunk=256)
        careful = model.careful()
        pool, sampler, graphs = fit(model, model.config, settings, allowed, careful)
        assert (graphs is not None) == model.tuned
        assert 16 <= pool.rows < 1400
        assert "event=pool_shrunk" in capsys.readouterr().out
        free = free_memory(model.device)
        assert free >= SPARE
        engine = Engine(model, sampler, pool, 256, careful=careful, graphs=graphs)
        params = SamplingParams(top_p=0.5, top_k=50, presence_penalty=0.1, seed=0)
        handles = [engine.submit(_prompt(n, 300), params, 12) for n in range(pool.rows + 20)]
        for handle in handles:
            list(handle)
        assert {handle.finish_reason for handle in handles} <= {"length", "stop"}
        assert engine.counters()["steps_failed"] == 0
        # The engine's thread took over the cuBLAS handle of the rehearsal, whose workspace alone has 32 MiB.
        assert free - free_memory(model.device) < 32 * MIB
        engine.close()
        with pytest.raises(NoRoomError, match=r"E140 .* MiB are free on cuda"):
            fit(model, model.config, Settings(memory_reserve=100000), allowed)
    finally:
        del ballast
        torch.cuda.empty_cache()


STEPS = [[1] * count for count in (1, 2, 7, 8, 9, 11, 12, 13, 16, 19, 20)] + [
    [1, 1, 16],  # with prompts: smaller than the graph, and as many sequences as rows
    [1, 1, 13],
    [1] * 14 + [32],
    [1] * 15 + [64],
    [1] * 12 + [3, 40, 5],
    [1] * 19 + [64],
    [2] * 20,
    [60, 1],
]


def test_graphs_give_what_the_model_gives(model: RWKV7) -> None:
    """All sizes of the ladder, those between them, and rows in any order; idle rows stay as they are."""
    if not model.tuned:
        pytest.skip("graphs are for the tuned path")
    pools = [StatePool(model.config, 20, model.device) for _ in range(2)]
    graphs = StepGraphs(model, pools[0], CHUNK, progress=False)
    for pool in pools:
        pool.wkv.copy_(torch.randn(pool.wkv.shape, generator=torch.Generator().manual_seed(1)))
    for step, lengths in enumerate(STEPS):
        random = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 60000, (sum(lengths),), generator=random).cuda()
        rows = torch.randperm(20, generator=random)[: len(lengths)].cuda()
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
        idle = torch.ones(20, dtype=torch.bool).index_fill(0, rows.cpu(), False)
        before = pools[0].wkv.clone(), pools[0].shift.clone()
        want = model.forward(ids, pools[1], rows, ends)
        got = graphs.forward(ids, rows, ends)
        assert got is not None and got.shape == want.shape, lengths
        assert float((got - want).norm() / want.norm()) < 0.01, lengths
        assert torch.allclose(pools[0].wkv, pools[1].wkv, atol=0.05), lengths
        assert torch.equal(pools[0].wkv[:, idle], before[0][:, idle]), lengths
        assert torch.equal(pools[0].shift[:, :, idle], before[1][:, :, idle]), lengths
        pools[1].wkv.copy_(pools[0].wkv)
        pools[1].shift.copy_(pools[0].shift)
    for lengths in ([5], [1] * 4 + [CHUNK + 16]):
        ids = torch.zeros(sum(lengths), dtype=torch.int64, device="cuda")
        rows, ends = torch.arange(len(lengths)), torch.tensor([0, *itertools.accumulate(lengths)])
        assert graphs.forward(ids, rows.cuda(), ends.cuda()) is None, "no graph is for that"


@pytest.mark.acceptance(7)
def test_weights_past_the_range_of_float16_are_read_with_care(tmp_path: Path) -> None:
    torch.save(rigged((32, 32, 32, 64)), tmp_path / "model.pth")
    found = checkpoint.load(tmp_path / "model.pth")
    model = RWKV7.load(found, "cuda", torch.float16, progress=False, tuned=True)
    assert model.tuned
    replies = []
    for fast, careful in ((model, model.careful()), (model.careful(), None)):
        sampler = Sampler(512, 2, model.device, torch.ones(512, dtype=torch.bool))
        engine = Engine(fast, sampler, StatePool(model.config, 2, model.device), CHUNK, careful=careful)
        state = engine.read([5, 6, 7])
        assert state.finite()
        replies.append([_ask(engine, ids)[0] for ids in ([1, 2, 3], list(range(1, 100)))])
        replies[-1].append(list(engine.submit([9], GREEDY, 8, start=state)))
        engine.close()
    assert replies[0] == replies[1]


def test_weights_go_to_the_device_through_pinned_buffers() -> None:
    upload, random = Upload(torch.device("cuda")), torch.Generator().manual_seed(1)
    for shape in ((3,), (0, 5), (700, 1001), (5000, 20011), (1, 200 * MIB)):
        tensor = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        for one in (tensor, tensor.t(), tensor[1:], tensor.half() if tensor.numel() < 10**7 else tensor):
            there = upload(one)
            assert there.is_contiguous() and torch.equal(there.cpu(), one)


def test_weights_go_to_the_device_from_their_file(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    sizes = {"large": (100, 2**20), "square": (2048, 2048), "odd": (70001, 33), "small": (5,), "one": ()}
    right = {name: torch.randn(size, generator=random).to(torch.bfloat16) for name, size in sizes.items()}
    torch.save(right, tmp_path / "weights.pth")
    tensors = torch.load(tmp_path / "weights.pth", mmap=True, weights_only=True)
    upload = Upload(torch.device("cuda"), tensors.values())
    there = {name: upload(tensor) for _ in range(2) for name, tensor in tensors.items()}
    assert upload(tensors["square"].t()).is_contiguous()
    for name, tensor in right.items():
        assert torch.equal(there[name].cpu(), tensor), name
