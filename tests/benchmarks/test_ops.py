"""Which cases benchmarks/ops.py makes, and what it does where a package is not installed."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import op_cases, ops, ops_report, result_rows
from benchmarks.op_cases import Case, scattering2d, wkv
from benchmarks.wkv_problem import Problem, problem

OPTIONS = argparse.Namespace(peers="", seconds=60.0, milliseconds=0.01, rounds=1)
LIMITS = {"bytes": 1e9, "float32": 1e9}
FILES = [found.name for found in pkgutil.iter_modules(op_cases.__path__)]


def on_cpu(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def test_cases_of_other_operators_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def record(op: str) -> Iterator[Case]:
        made.append(op)
        yield from ()

    for name in FILES:
        monkeypatch.setattr(importlib.import_module(f"benchmarks.op_cases.{name}"), "cases", record)
    for only, modules, wanted in (
        ({"swish", "wkv6"}, set(), {"swish", "wkv6"}),
        (set(), {"host_rows"}, {"host_gather", "host_scatter_"}),
        ({"swish"}, {"host_rows"}, set()),
    ):
        made.clear()
        assert list(ops.all_cases(only, modules)) == []
        assert set(made) == wanted and len(made) == len(wanted)
    list(ops.all_cases(set(), set()))
    assert len(made) == len(set(made)) and set(made) >= {"add", "conv2d", "wkv4", "wkv7", "scattering2d", "sample_"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(scattering2d, "numbers", on_cpu)
    monkeypatch.setattr(scattering2d, "SIZES", [((2, 1), 16, 2)])
    return scattering2d.cases("scattering2d")


def test_ours_is_measured_where_kymatio_is_not_installed(
    small: Iterator[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kymatio.torch", None)
    for which, case in zip(("forward", "backward"), small, strict=True):
        missing, alone = ops.measure(case, LIMITS, OPTIONS)
        assert (missing["peer"], alone["peer"]) == ("kymatio", ops_report.ALONE)
        assert str(missing["why"]).startswith("not installed: ")
        assert "kymatio does not count: not installed: " in ops_report.line(missing)
        assert alone["pass"] == which and alone["ours_ms"] > 0 and alone["ratio"] is None


def test_kymatio_counts_where_it_is(small: Iterator[Case]) -> None:
    pytest.importorskip("kymatio")
    found = [list(ops.measure(case, LIMITS, OPTIONS)) for case in small]
    assert [[row["peer"] for row in rows] for rows in found] == [["kymatio"], ["kymatio"]]
    assert all(rows[0]["ratio"] > 0 for rows in found)


def test_a_call_of_pytorch_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = [partial(torch.ones, 3)]
    peers = {"torch.compile": [fails], "device copy": calls}
    case = Case("add", False, torch.float32, "N=3", calls, peers, lambda: 0.0, 0.1, 12, graph=False)
    rows = {row["peer"]: row for row in ops.measure(case, LIMITS, OPTIONS)}
    assert rows["torch.compile"]["why"] == "not installed: No module named 'triton'"
    assert rows["device copy"]["ratio"] > 0


def late() -> None:
    raise TimeoutError("not done after 40 s")


def test_what_is_known_or_took_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = [partial(torch.ones, 3)]
    peers = {"slow": [late], "measured": calls, "new": calls}

    def case(op: str, shape: str) -> Case:
        return Case(op, False, torch.float32, shape, calls, peers, lambda: 0.0, 0.1, 12, graph=False)

    ops_report.merge(tmp_path / "rows.json", [{**row_of(case("add", "N=3")), "peer": "measured"}])
    skip = ops.Skipped(result_rows.read(tmp_path / "rows.json"))
    found = []
    for one in (case("add", "N=3"), case("add", "N=4"), case("swish", "N=3")):
        rows = list(ops.measure(one, LIMITS, OPTIONS, skip))
        found.append([row["peer"] for row in rows])
        for row in rows:
            skip.note(row)
    assert found == [["slow", "new"], ["measured", "new"], ["slow", "measured", "new"]]
    known = ops.Skipped([{**row_of(case("add", "N=3")), "peer": peer} for peer in peers])
    assert list(ops.measure(case("add", "N=3"), LIMITS, OPTIONS, known)) == [], "and ours is not measured either"


def row_of(case: Case) -> ops_report.Row:
    return {"op": case.op, "pass": "forward", "dtype": "float32", "shape": case.shape}


def test_the_most_wanted_recurrences_come_first_and_slow_compilers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def little(op: str, *shape: int) -> Problem:
        made.append(shape)
        return problem(op, 1, 2, 2, device="cpu")

    monkeypatch.setattr(wkv, "problem", little)
    found = list(ops.all_cases(set(), {"wkv"}))
    assert [case.op for case in found] == [op for op in ("wkv7", "wkv6", "wkv5", "wkv4") for _ in range(6)]
    assert [case.backward for case in found] == [False, True] * 12
    assert made == [(1, 4096, 64), (16, 256, 64), (8, 4096, 32)] * 4
    compiled = [(case.op, case.shape) for case in found if "torch.compile" in case.packages]
    assert compiled == [("wkv5", "B=16 T=256 H=64"), ("wkv4", "B=16 T=256 H=64")]
    assert all("flash-linear-attention" in case.packages for case in found if case.op in ("wkv7", "wkv6", "wkv4"))
