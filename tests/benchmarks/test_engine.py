"""benchmarks/engine.py from its command line to its files, on the CPU: a small model, and a stand-in for the peer."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import engine, engine_peer, engine_report, result_rows, synth_rwkv7
from benchmarks.engine_cells import Cell
from benchmarks.engine_gate import Gate, Gated, cut
from benchmarks.engine_step import Repeated, Step, Timer, Times, count_launches, measure
from model import checkpoint
from model.checkpoint import Checkpoint
from model.rwkv7 import RWKV7

VOCAB = 300
# What the peer's script takes and prints, with times that tell the two variants apart.
PEER = """
import argparse
parser = argparse.ArgumentParser()
for name in ("model", "warmup", "iters", "cases", "batched-rkv", "cmix-sparse"):
    parser.add_argument(f"--{name}", default="off")
def load_extensions(mode):
    assert mode == "fp16"
if __name__ == "__main__":
    args = parser.parse_args()
    open(args.model).close()
    print("csv_header,label,B,T,iters,p10_ms,p50_ms,p90_ms,tok_s_p50", flush=True)
    for case in args.cases.split(","):
        b, t = map(int, case.split("x"))
        ms = {"off": 10.0, "auto": 8.0 if b > 1 else 12.0}[args.batched_rkv]
        print(f"RESULT B={b} T={t} iters={args.iters}")
        print(f"csv,rwkv7_fast_v3a,{b},{t},{args.iters},{ms - 1:.6f},{ms:.6f},{ms + 1:.6f},1.0", flush=True)
        assert b < 100, "out of memory"
"""


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synth_rwkv7.SIZES, "small", (5, 128, 32, 32, 16, 64))
    monkeypatch.setattr(engine, "FULL_DEPTH", (Cell(1, 1), Cell(1, 33)))
    monkeypatch.setattr(engine, "measure", lambda call, timer: measure(call, timer, seconds=0))


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    folder = tmp_path / "peer"
    (folder / "rwkv_quant_nv-1.2.1.dist-info").mkdir(parents=True)
    (folder / "rwkv_quant_nv-1.2.1.dist-info" / "METADATA").write_text("Name: rwkv-quant-nv\nVersion: 1.2.1\n")
    (folder / engine_peer.SCRIPT).write_text(PEER)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("small") / "small.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synth_rwkv7.SIZES, "small", (5, 128, 32, 32, 16, 64))
        torch.save(synth_rwkv7.checkpoint("small", vocab=VOCAB), path)
    return checkpoint.load(path)


def options(tmp_path: Path, *more: str) -> list[str]:
    start = ["--model", "small", "--device", "cpu", "--vocab", str(VOCAB), "--keep", str(tmp_path / "keep")]
    return [*start, "--save", str(tmp_path / "rows.json"), *more]


def test_from_the_command_line_to_the_files(tmp_path: Path, peer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = options(tmp_path, "--cells", "1x1,2x3,128x1", "--peer-folder", str(peer))
    assert engine.run(engine.parse(arguments)) == 0
    printed = capsys.readouterr()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert json.loads(printed.out.splitlines()[-1])["rows"] == rows
    assert [(row["B"], row["T"], row["state_dtype"], row["peer_ms"]) for row in rows] == [
        (1, 1, "float16", 10.0),  # the better of 10 and 12
        (2, 3, "float16", 8.0),
        (128, 1, "float16", 8.0),
        (128, 1, "float32", 8.0),
    ]
    for row in rows:
        assert row["gate"]["ok"] and 0 < row["gate"]["error"] <= 1.5 * row["gate"]["plain_error"]
        assert row["peer"] == "rwkv-quant-nv 1.2.1" and row["peer_state_dtype"] == "float16"
        assert row["tokens_per_s"] == pytest.approx(row["B"] * row["T"] / row["ours_ms"] * 1e3, rel=1e-2, abs=0.51)
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "at full depth: gate green" in printed.err and "weights loaded with" in printed.err


def test_without_peer_only_the_cells_that_ran_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"model": "small", "T": 1, "weight_dtype": "float16", "state_dtype": "float16", "launches": 1}
    times = {"ours_ms": 1.0, "floor_ms": 0.5, "peer_ms": None}
    engine_report.merge(tmp_path / "rows.json", [{**old, **times, "B": 1}, {**old, **times, "B": 2}])
    assert engine.run(engine.parse(options(tmp_path, "--cells", "2x1", "--no-peer"))) == 0
    rows = result_rows.read(tmp_path / "rows.json")
    assert [(row["B"], row["launches"]) for row in rows] == [(1, 1), (2, None)]
    assert "pip install" not in capsys.readouterr().err


def test_a_missing_peer_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = options(tmp_path, "--cells", "1x1", "--peer-folder", str(tmp_path))
    assert engine.run(engine.parse(arguments)) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "pip install --no-deps rwkv-quant-nv" in line]


def test_no_time_for_wrong_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A row of the batch that reads its neighbour's state is found, and its cell gets no row."""
    forward = RWKV7.forward

    def swapped(self: RWKV7, ids, pool, rows, ends, last_only=True):
        return forward(self, ids, pool, rows.flip(0) if len(rows) == 3 else rows, ends, last_only)

    monkeypatch.setattr(RWKV7, "forward", swapped)
    assert engine.run(engine.parse(options(tmp_path, "--cells", "3x1,1x1", "--no-peer"))) == 1
    assert [row["B"] for row in result_rows.read(tmp_path / "rows.json")] == [1]
    assert "gate RED" in capsys.readouterr().err


def test_a_state_that_is_not_written_is_found(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(small)
    assert found.config.layers == 4 and not any(name.startswith("blocks.4.") for name in found.tensors)
    model = RWKV7.load(found, "cpu", torch.float16, progress=False)
    assert Gated(found, model).check(Cell(2, 5), torch.float32).ok
    forward = RWKV7.forward

    def forgetful(self: RWKV7, ids, pool, rows, ends, last_only=True):
        before = pool.wkv.clone()
        logits = forward(self, ids, pool, rows, ends, last_only)
        pool.wkv.copy_(before)
        return logits

    monkeypatch.setattr(RWKV7, "forward", forgetful)
    assert not Gated(found, model).check(Cell(2, 5), torch.float32).ok


def test_what_the_gate_refuses() -> None:
    exact = torch.tensor([[4.0, 3.0, 0.0]], dtype=torch.float64)
    plain = (exact + torch.tensor([0.0, 0.1, 0.0])).half()
    for got, ok in [
        (exact.float(), True),
        (exact + torch.tensor([0.0, 0.14, 0.0]), True),
        (exact + torch.tensor([0.0, 0.16, 0.0]), False),  # more than 1.5 times as wrong
        (torch.full_like(exact, torch.nan), False),
    ]:
        gate = Gate()
        gate.add(got, plain, exact)
        assert gate.ok is ok and gate.compared == 1
    gate = Gate()  # the sum of errors is small beside the others', but the token is another one
    for _ in range(20):
        gate.add(exact, plain, exact)
    gate.add(torch.tensor([[3.0, 3.3, 0.0]]), plain, exact)
    assert gate.error < 1.5 * gate.plain_error * 3 and gate.wrong == 1 and not gate.ok
    gate = Gate()
    gate.add(exact, exact + torch.tensor([0.0, 0.6, 0.0]), exact)
    assert gate.compared == 0, "the margin is within twice the plain forward's error"


def test_a_step_that_leaves_its_logits_is_found(small: Checkpoint) -> None:
    model = RWKV7.load(small, "cpu", torch.float16, progress=False)
    step = Step(model, Cell(2, 1), torch.float32)
    repeated = Repeated(step)
    assert repeated.launches is None and repeated.problem == "not on a GPU"
    before = repeated()
    repeated.poison()
    assert before.isnan().all()
    assert torch.isfinite(repeated()).all()


def test_every_row_has_tokens_and_a_state_of_its_own(small: Checkpoint) -> None:
    step = Step(RWKV7.load(small, "cpu", torch.float16, progress=False), Cell(3, 2), torch.float16)
    assert step.pool.wkv.dtype == torch.float16 and len(step.ids) == 6 and step.ends.tolist() == [0, 2, 4, 6]
    for part in (step.pool.wkv.float(), step.pool.shift.transpose(1, 2)):
        assert all(not torch.equal(part[:, i], part[:, j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    start = step.pool.wkv.clone()
    step.run()
    assert not torch.equal(step.pool.wkv, start)
    step.begin()
    assert torch.equal(step.pool.wkv, start)


def test_times() -> None:
    calls: list[int] = []
    found = measure(lambda: calls.append(1), Timer(torch.device("cpu")), seconds=0)
    assert len(calls) == 23 and found.count == 20 and found.ms > 0 and found.spread >= 0
    assert isinstance(found, Times)


def test_more_launches_than_before() -> None:
    row = {"model": "m", "B": 1, "T": 1, "weight_dtype": "float16", "state_dtype": "float16", "launches": 5}
    assert engine.more_launches(row, [{**row, "launches": 4}]) == "m 1x1 float16: 5 launches, before 4"
    for before in ([], [row], [{**row, "launches": None}], [{**row, "launches": 4, "B": 2}]):
        assert engine.more_launches(row, before) is None


def test_a_peer_that_stops_half_way(tmp_path: Path, peer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.pth").touch()
    one = engine_peer.Peer(peer, tmp_path / "build")
    one.start_compiling()
    assert one.compiled(60) is None
    assert one.run(tmp_path / "model.pth", [Cell(1, 1), Cell(100, 1), Cell(2, 1)], "auto", 60) == {
        Cell(1, 1): 12.0,
        Cell(100, 1): 8.0,
    }
    assert "no time for 2x1" in (said := capsys.readouterr().err) and "out of memory" in said
    (peer / engine_peer.SCRIPT).write_text("import time\ntime.sleep(60)")
    assert one.run(tmp_path / "model.pth", [Cell(1, 1)], "default", 0.5) == {}
    one.start_compiling()
    assert "not compiled in time" in str(one.compiled(0.5))
    (peer / engine_peer.SCRIPT).write_text("raise SystemExit('no nvcc')")
    one.start_compiling()
    assert "did not compile: no nvcc" in str(one.compiled(60))


def test_command_lines_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in [
        (["--model", "7.2b", "--cells", "1"], "cells: '1' is not BxT"),
        (["--model", "2.9b"], "'2.9b' has no cells"),
        ([], "--model is needed"),
        (["--model", "7.2b", "--peer-variants", "best"], "best is none of default, auto"),
    ]:
        with pytest.raises(SystemExit):
            engine.parse(arguments)
        assert said in capsys.readouterr().err
    assert [str(cell) for cell in engine.parse(["--model", "0.4b"]).cells] == ["1x1", "32x1", "512x1", "1x4096"]


def test_rows_of_another_card_are_not_saved_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    plain = engine.parse(["--model", "7.2b"])
    assert engine.where_to_save(plain, "NVIDIA H200") == engine.RESULTS
    assert engine.where_to_save(plain, "CPU") is None and "nothing is saved" in capsys.readouterr().err
    assert engine.where_to_save(engine.parse(["--model", "7.2b", "--save", "x"]), "CPU") == Path("x")
    assert engine.where_to_save(engine.parse(["--model", "7.2b", "--no-save"]), "NVIDIA H200") is None


def test_the_table_has_every_cell() -> None:
    row = {"model": "0.4b", "B": 1, "T": 1, "weight_dtype": "float16", "state_dtype": "float16", "launches": 5}
    row |= {"ours_ms": 0.3, "peer_ms": 0.9, "floor_ms": 0.15, "tokens_per_s": 3333}
    lines = engine_report.table([row]).splitlines()
    assert len(lines) == 2 + 18 + 5, "a line a cell, and one more for each with float32 states"
    assert "| 0.4b | 1x1 | float16 | 0.3 | 0.9 | 0.15 | 50% | 3.00 | 0.36 (met) | 3,333 |" in lines
    assert "| 7.2b | 320x1 | float16 | - | - | 6.54 | - | - | 9.8 | - |" in lines
    assert "| 7.2b | 320x1 | float32 | - | - | 8.2 | - | - | 11.5 | - |" in lines


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", [Cell(1, 1), Cell(3, 1), Cell(2, 17)], ids=str)
def test_a_graph_of_a_step(small: Checkpoint, cell: Cell, state: torch.dtype) -> None:
    """It is captured, its launches are counted, and its gate is green."""
    model = RWKV7.load(small, "cuda", torch.float16, progress=False)
    repeated = Repeated(Step(model, cell, state))
    assert repeated.problem == "" and repeated.launches and repeated.launches > 5
    assert measure(repeated, Timer(model.device), seconds=0).ms > 0
    assert Gated(small, model).check(cell, state).ok


@pytest.mark.gpu
def test_launches_are_counted() -> None:
    x, y = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
        x.copy_(y)
        x.mul_(2)
    graph.instantiate()
    assert count_launches(graph.raw_cuda_graph()) == 3
