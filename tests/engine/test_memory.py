"""How many rows there are: from what is free, with numbers where that is too little."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model import checkpoint, pool_size
from model.config import Config
from model.memory import MIB, free_memory, free_ram, leave_to_stay
from model.pool_size import NoRoomError, choose_rows, fit, row_bytes
from model.rwkv7 import RWKV7
from model.sampling import Sampler
from model.sampling_plain import Uses
from model.settings import Settings
from model.state import StatePool, state_bytes
from tests import tiny
from tests.stub_model import StubModel, mixed

CPU = torch.device("cpu")
SMALL = Config(2, 128, 2, 64, 512, 300, 8, 8, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_state_is_that_of_its_tensors(dtype: torch.dtype) -> None:
    pool = StatePool(SMALL, 3, dtype=dtype)
    assert 3 * state_bytes(SMALL, dtype) == pool.wkv.nbytes + pool.shift.nbytes
    saved = pool.save(1)
    assert state_bytes(SMALL, dtype) == saved.wkv.nbytes + saved.shift.nbytes
    sampler = Sampler(SMALL.vocab, 3, "cpu", torch.ones(SMALL.vocab, dtype=torch.bool))
    assert row_bytes(SMALL, dtype) == state_bytes(SMALL, dtype) + sampler._tables.counts.nbytes // 3


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    5000 kB\n"}
GROUP_2 = {
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/box/memory.max": "3000000\n",
    "sys/box/memory.current": "2000000\n",
    "sys/box/memory.stat": "anon 5\ninactive_file 500000\n",
    "sys/box/inner/memory.max": "max\n",
    "sys/box/inner/memory.current": "7\n",
}
GROUP_1 = {
    "proc/self/cgroup": "5:cpu:/other\n4:memory:/box\n",
    "sys/memory/box/memory.limit_in_bytes": "2500000\n",
    "sys/memory/box/memory.usage_in_bytes": "500000\n",
    "sys/memory/box/memory.stat": "total_inactive_file 100000\n",
}
NO_LIMIT = {"proc/self/cgroup": "0::/\n", "sys/memory.max": "max", "sys/memory.current": "123"}
ABOVE = {"proc/self/cgroup": "0::/\n", "sys/memory.max": "1000", "sys/memory.current": "4000"}


@pytest.mark.parametrize(
    ("files", "free"),
    [({}, 5120000), (GROUP_2, 1500000), (GROUP_1, 2100000), (NO_LIMIT, 5120000), (ABOVE, 0)],
    ids=["none", "version-2", "version-1", "no-limit", "above-its-limit"],
)
def test_free_ram_obeys_the_limits_of_a_container(tmp_path: Path, files: dict[str, str], free: int) -> None:
    root = _tree(tmp_path, MEMINFO | files)
    assert free_ram(root / "proc", root / "sys") == free


def test_free_ram_of_this_machine() -> None:
    assert 10 * MIB < free_memory(CPU) < 2**50


def test_without_linux_half_of_the_memory_counts(tmp_path: Path) -> None:
    assert 10 * MIB < free_ram(tmp_path, tmp_path) < 2**50


@pytest.mark.parametrize(
    ("settings", "free_mib", "rows"),
    [
        ({}, 100000, 64),
        ({}, 256 + 100, 50),  # half of the room
        ({"max_batch": 70}, 256 + 100, 70),
        ({"max_batch": 200}, 256 + 100, 100),
        ({"max_batch": 200, "memory_reserve": 0}, 256 + 100, 200),
        ({"max_batch": 3, "memory_reserve": 1000}, 1002, 2),
        ({}, 257, 1),
    ],
)
def test_rows_are_what_was_asked_for_or_what_there_is_room_for(
    settings: dict[str, Any], free_mib: int, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = Settings(**settings)
    assert choose_rows(chosen, MIB, free_mib * MIB, CPU) == rows
    warned = "event=pool_shrunk" in capsys.readouterr().out
    assert warned == (rows < (chosen.max_batch or 0)), "a size that nobody asked for is no disappointment"


def test_no_room_fails_with_the_numbers() -> None:
    with pytest.raises(NoRoomError, match=r"^E140 .* take 34\.0 MiB, 40\.0 MiB are free .* and 10 MiB .*RESERVE"):
        choose_rows(Settings(memory_reserve=10), 34 * MIB, 40 * MIB, CPU)


def test_a_pool_that_turns_out_too_large_is_halved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pool(config: Config, rows: int, *rest: Any) -> StatePool:
        if rows > most:
            raise torch.OutOfMemoryError("no room")
        return StatePool(config, rows, *rest)

    monkeypatch.setattr(pool_size, "StatePool", pool)
    allowed = torch.ones(SMALL.vocab, dtype=torch.bool)
    most, model = 10, StubModel(mixed)
    made, sampler, graphs = fit(model, SMALL, Settings(max_batch=32), allowed)
    assert made.rows == 8 and sampler._tables.counts.shape[0] == 8 and graphs is None
    assert capsys.readouterr().out.count("event=pool_shrunk") == 2
    most = 0
    with pytest.raises(NoRoomError, match=r"no room for a step of one sequence: \d+\.\d MiB are free on cpu: no room$"):
        fit(model, SMALL, Settings(max_batch=32), allowed)


def test_on_cuda_the_largest_steps_must_leave_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads: list[threading.Thread] = []

    def warm(model: StubModel, pool: StatePool, sampler: Sampler, chunk: int, careful: StubModel | None) -> str | None:
        threads.append(threading.current_thread())
        left.append(1000 * MIB - pool.rows * 20 * MIB)
        if left[-1] < 0:
            raise torch.OutOfMemoryError("no room for the steps\nand where")
        return "graphs" if careful is not None else None

    left = [2000 * MIB]
    monkeypatch.setattr(pool_size, "free_memory", lambda device: left[-1])
    monkeypatch.setattr(pool_size, "_warm", warm)
    monkeypatch.setattr(pool_size, "StatePool", lambda config, rows, device, dtype: StatePool(config, rows))
    monkeypatch.setattr(
        pool_size, "Sampler", lambda vocab, rows, device, *rest, **more: Sampler(vocab, rows, "cpu", *rest)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    allowed, settings = torch.ones(SMALL.vocab, dtype=torch.bool), Settings(max_batch=96, memory_reserve=100)
    model = StubModel(mixed)
    model.device = torch.device("cuda")  # so it says; what is made for it here lies on the CPU
    pool, _, graphs = fit(model, SMALL, settings, allowed, careful=model)
    assert (pool.rows, graphs) == (24, "graphs"), "96: no room for the steps; 48: 40 MiB left; 24: 520 MiB"
    log = capsys.readouterr().out
    assert 'problem="no room for the steps"' in log
    assert 'problem="the largest steps leave 40.0 MiB, 64 MiB are wanted"' in log
    assert len(threads) == 3 and not any(one.is_alive() or one is threading.main_thread() for one in threads)
    left[-1] = 2000 * MIB
    assert fit(model, SMALL, Settings(max_batch=2, memory_reserve=100), allowed)[2] is None
    monkeypatch.setattr(pool_size, "_warm", lambda *_: left.append(MIB))
    left[-1] = 2000 * MIB
    with pytest.raises(NoRoomError, match=r"^E140 .*: 1\.0 MiB are free on cuda: the largest steps leave 1\.0 MiB"):
        fit(model, SMALL, settings, allowed)


@pytest.mark.parametrize(("rows", "reading"), [(1, 1), (3, 2), (6, 4)])
def test_the_largest_step_leaves_nothing_behind(tmp_path: Path, rows: int, reading: int) -> None:
    model = RWKV7.load(checkpoint.load(str(tiny.write(tiny.Shape(vocab=300), tmp_path / "a.safetensors"))))
    seen: list[tuple[str, int, int]] = []
    drawn: list[int] = []

    class Watched(StubModel):
        name = "fast"

        def forward(self, ids: Tensor, pool: StatePool, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
            seen.append((self.name, len(ids), len(rows)))
            return model.forward(ids, pool, rows, cu_seqlens)

    class WatchedSampler(Sampler):
        def sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            drawn.append(len(rows))
            assert self._uses == Uses(drawn=True, penalised=True, top_k=True, top_p=True)
            return super().sample(logits, rows)

    pool, careful = StatePool(model.config, rows), Watched(mixed, 300)
    careful.name = "careful"
    sampler = WatchedSampler(300, rows, "cpu", torch.ones(300, dtype=torch.bool))
    pool_size.rehearse(Watched(mixed, 300), pool, sampler, 64, careful)
    sizes = [64 * reading + rows - reading, rows]
    assert seen == [(name, size, rows) for size in sizes for name in ("fast", "careful")]
    assert drawn == [max(1, rows - reading)] * 2 + [rows] * 2
    assert sampler._params == [None] * rows


@pytest.mark.parametrize(
    ("settings", "states"),
    [({}, 16), ({"prefix_cache": 1}, 15), ({"prefix_cache": 0}, None), ({"memory_reserve": 10**9}, None)],
)
def test_the_prefix_cache_is_as_large_as_set_or_small(settings: dict[str, int], states: int | None) -> None:
    size = state_bytes(SMALL, torch.float32)
    cache = pool_size.open_cache(Settings(**settings), StatePool(SMALL, 1))
    assert (cache is None) == (states is None)
    for n in range(40 if cache is not None else 0):
        cache.put(str(n), StatePool(SMALL, 1).save(0), alone=True)
    if cache is not None:
        found = [n for n in range(40) if cache.find([str(n)], alone=True)]
        assert found == list(range(40 - states, 40)), size


def test_what_stays_is_not_looked_through_again() -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    garbage, kept = weakref.ref(Ring()), Ring()
    try:
        leave_to_stay()
        assert garbage() is None, "garbage does not stay"
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is kept for one in gc.get_objects())
