"""Which cases benchmarks/ops.py makes, and what it does where a package is not installed."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks import op_cases, ops, ops_report
from benchmarks.op_cases import Case, scattering2d

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
