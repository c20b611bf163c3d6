"""What benchmarks/ops.py does with other packages: their conventions, and those that are missing, wrong or too slow."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from benchmarks import cuda_source, ops, wkv_peers
from benchmarks.op_cases import Case, Missing, Peer
from benchmarks.op_cases.wkv import OPERATORS, backward, forward, make_peer
from benchmarks.wkv_problem import Problem, problem
from cog_rwkv_ops.wkv4.reference import wkv4
from cog_rwkv_ops.wkv6.reference import wkv6
from cog_rwkv_ops.wkv7.reference import wkv7

OPTIONS = argparse.Namespace(peers="", seconds=0.2, milliseconds=0.01, rounds=1)
LIMITS = {"bytes": 1e9, "float32": 1e9}


def small(op: str) -> Problem:
    return problem(op, 2, 16, 3, device="cpu")


@pytest.mark.parametrize("op", OPERATORS)
def test_ours_is_right_and_a_changed_result_is_not(op: str) -> None:
    given = small(op)
    for found in (forward(given), backward(given)):
        assert given.error(found) <= torch.finfo(given.d_y.dtype).eps
        name, tensor = next(iter(found.items()))
        assert given.error({name: tensor * 1.1}) > 0.05
    assert op == "wkv4" or given.error(forward(given), start=False) > 0.05
    assert op == "wkv4" or given.error(backward(given), end=False) > 0.05


def turned(call: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """One of our definitions with the state as flash-linear-attention has it."""
    y, end = call(*(t.float() for t in given), state.transpose(2, 3))
    return y.to(given[0].dtype), end.transpose(2, 3)


def sixth(*given: Tensor, scale: float, initial_state: Tensor, output_final_state: bool) -> tuple[Tensor, Tensor]:
    r, k, v, w, u = given
    return turned(wkv6, initial_state, r, torch.log(-w), k, v, u)


def seventh(
    *given: Tensor, scale: float, initial_state: Tensor, output_final_state: bool, lower_bound: float
) -> tuple[Tensor, Tensor]:
    r, w, *others = given
    return turned(wkv7, initial_state, r, torch.logit(-w.float() * 2.718281828459045**0.5), *others)


def fourth(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y, end = wkv4(w, u, k.float(), v.float(), state[:, :, 0])
    return y.to(k.dtype), end[:, :, None]


def packed(*given: Tensor, block_values: int, prefetch_tokens: int) -> tuple[Tensor, Tensor]:
    *tokenwise, state, bounds = given
    batch = len(bounds) - 1
    assert bounds.tolist() == [i * len(tokenwise[0]) // batch for i in range(batch + 1)]
    y, end = turned(wkv7, state, *(t.unflatten(0, (batch, -1)) for t in tokenwise))
    return y.flatten(0, 1), end


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the same interface as the real ones, which only a GPU runs."""
    functions = {
        "fla.ops.rwkv4": {"fused_recurrent_rwkv4": fourth},
        "fla.ops.rwkv6": {"chunk_rwkv6": sixth},
        "fla.ops.rwkv7": {"chunk_rwkv7": seventh},
        "flashrwkv2.tmix.wkv7.tilelang": {"tmix_wkv7_recurrent": packed},
    }
    for name, members in functions.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(
    ("package", "op"),
    [
        (name, op)
        for name in ("flash-linear-attention", "flashrwkv2")
        for op in wkv_peers.PACKAGES[name].forward.split()
    ],
)
def test_states_decays_and_gradients_are_handed_over_as_the_package_has_them(
    package: str, op: str, which: str, packages: None
) -> None:
    peer = make_peer(wkv_peers.PACKAGES[package], small(op), which)
    assert peer.error() < 0.01


def case(**packages: Callable[[], Peer]) -> Case:
    one = torch.ones(3)
    ours = [lambda: one + one]
    return Case("add", False, torch.float32, "N=3", ours, {}, lambda: 0.0, 0.1, 12, packages=packages, graph=False)


def fails() -> Peer:
    raise Missing("it is nowhere")


def slow() -> Peer:
    time.sleep(5)
    return right()


def right(error: float = 0.0) -> Peer:
    one = torch.ones(3)
    return Peer([lambda: one + one], lambda: error, 0.1)


def test_a_package_that_is_missing_wrong_or_slow_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    wrong, nan = (lambda error=error: right(error) for error in (0.2, float("nan")))
    found = case(missing=fails, wrong=wrong, nan=nan, slow=slow, right=right)
    rows = {row["peer"]: row for row in ops.measure(found, LIMITS, OPTIONS)}
    assert json.loads(json.dumps(rows)) == rows
    assert {name: row.get("why") for name, row in rows.items()} == {
        "missing": "it is nowhere",
        "wrong": "ArithmeticError: its error is 2.00e-01, over 1.0e-01",
        "nan": "ArithmeticError: its error is nan, over 1.0e-01",
        "slow": "TimeoutError: not done after 0.2 s",
        "right": None,
    }
    assert rows["right"]["ratio"] > 0
    for peers, measured in (("right,another", ["right"]), ("another", [])):
        chosen = argparse.Namespace(**vars(OPTIONS) | {"peers": peers})
        assert [row["peer"] for row in ops.measure(found, LIMITS, chosen)] == measured


def test_sources_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(cuda_source, "CACHE", tmp_path)
    with pytest.raises(Missing, match=r"not installed: no_such_package \(script/bench-peers\)"):
        cuda_source.CudaSource("no_such_package", "a.cu")
