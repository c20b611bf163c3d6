"""The regression guard that needs no GPU: operator calls of a step, and what the compiler gave the kernels."""

from pathlib import Path

import pytest

from benchmarks import operator_calls
from script import image_check, kernels

REPORT = """
Fatbin elf code:
================
arch = sm_80

Resource usage:
 Common:
  GLOBAL:28 CONSTANT[4]:224
 Function _ZN8cog_rwkv18elementwise_kernelILi1EfEEvPT0_l:
  REG:200 STACK:9 SHARED:9 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:28 CONSTANT[4]:224
 Function _ZN8cog_rwkv18elementwise_kernelILi1EN3c104HalfENS_43_GLOBAL__N__91ed6a3e_6_add_cu_c082250f_2073SumEEEv:
  REG:14 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN8cog_rwkv18elementwise_kernelILi8EfEEvPT0_l:
  REG:27 STACK:0 SHARED:1152 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN8cog_rwkv45_GLOBAL__N__0b1c2d3e_7_wkv7_cu_c082250f_2070311wkv7_kernelEPf:
  REG:73 STACK:0 SHARED:4096 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.mark.parametrize("name", operator_calls.CASES)
def test_a_step_calls_the_operators_that_were_recorded(name: str) -> None:
    """Where a change is meant: python benchmarks/operator_calls.py --record."""
    assert operator_calls.compare(name, operator_calls.CASES[name](), operator_calls.load()[name]) == []


def test_another_call_is_found() -> None:
    recorded = {"cog_rwkv.add": 2, "aten.select.int": 3}
    assert operator_calls.compare("x", {"cog_rwkv.add": 2, "aten.unbind.int": 3}, recorded) == []
    assert operator_calls.compare("x", {"cog_rwkv.add": 3, "aten.select.int": 3}, recorded) == [
        "x: cog_rwkv.add 3 times, recorded 2"
    ]
    assert operator_calls.compare("x", {"aten.select.int": 4}, recorded) == [
        "x: cog_rwkv.add 0 times, recorded 2",
        "x: 4 calls of torch's own operators, recorded 3",
    ]


def test_reading_the_compilers_report() -> None:
    assert kernels.read_usage(REPORT.splitlines()) == {
        "elementwise_kernel": {"instances": 2, "registers": 27, "stack": 8, "shared": 1152},
        "wkv7_kernel": {"instances": 1, "registers": 73, "stack": 0, "shared": 4096},
    }


@pytest.mark.parametrize("what", ["registers", "stack", "shared"])
def test_a_kernel_that_takes_more_is_found(what: str) -> None:
    recorded = kernels.read_usage(REPORT.splitlines())
    assert kernels.compare(recorded, recorded) == ([], [])
    found = {"wkv7_kernel": {**recorded["wkv7_kernel"]}, "new_kernel": recorded["wkv7_kernel"]}
    found["wkv7_kernel"][what] += 1
    more, other = kernels.compare(found, recorded)
    assert len(more) == 1 and more[0].startswith(f"wkv7_kernel: {what} ")
    assert other == ["new_kernel: not recorded", "elementwise_kernel: recorded, and not in the library"]


def test_more_instances_may_have_more_stack() -> None:
    recorded = {"k": {"instances": 2, "registers": 9, "stack": 16, "shared": 0}}
    assert kernels.compare({"k": {**recorded["k"], "instances": 4, "stack": 32}}, recorded) == ([], [])
    assert kernels.compare({"k": {**recorded["k"], "instances": 4, "stack": 33}}, recorded)[0] != []


def test_the_kernels_of_this_build() -> None:
    """Where a change is meant: python -m script.kernels --record."""
    try:
        more, _ = kernels.check(kernels.LIBRARY)
    except kernels.NotComparedError as reason:
        pytest.skip(f"not compared: {reason}")
    assert more == []


def test_the_image_check_compares_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library = Path("_cuda.abi3.so")
    monkeypatch.setattr(kernels, "check", lambda _: ([], ["new_kernel: not recorded"]))
    image_check.check_kernels(library)
    assert "new_kernel: not recorded" in capsys.readouterr().out
    monkeypatch.setattr(kernels, "check", lambda _: (["k: stack 8, recorded 0"], []))
    with pytest.raises(image_check.CheckError, match="stack 8, recorded 0"):
        image_check.check_kernels(library)
    monkeypatch.undo()
    image_check.check_kernels(library)  # there is no such file
    assert "NOT CHECKED" in capsys.readouterr().out
