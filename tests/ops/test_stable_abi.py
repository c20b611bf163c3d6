"""One build for every torch from 2.10: the libraries take from PyTorch only C functions that 2.10 has already."""

import shutil
from pathlib import Path

import pytest
import torch

import cog_rwkv_ops
from script.torch_symbols import declared, exported, undefined

INCLUDE = Path(torch.__file__).parent / "include"
LIBRARIES = sorted(Path(cog_rwkv_ops.__file__).parent.glob("_*.so"))
# Of libtorch_cuda, which a build for the CPU lacks; shim.h shows it where CUDA is.
OF_CUDA = {"aoti_torch_get_current_cuda_stream"}
pytestmark = pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("c++") is None, reason="no nm or no C++ compiler"
)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_every_function_is_of_torch_2_10(library: Path) -> None:
    needed = undefined(library)
    assert "torch_library_impl" in needed, "what every library calls"
    of_others = needed - declared(INCLUDE, "2.10") - OF_CUDA
    assert not of_others, f"{library.name} needs more of PyTorch than its stable interface of 2.10: {sorted(of_others)}"


def test_this_torch_has_every_function() -> None:
    here = exported((Path(torch.__file__).parent / "lib").glob("libtorch*.so"))
    for library in LIBRARIES:
        assert undefined(library) - OF_CUDA <= here


def test_newer_functions_are_told_from_those_of_2_10() -> None:
    """What guards in the headers hide is not taken for a function of 2.10; else nothing above could fail."""
    newest = ".".join(torch.__version__.split(".")[:2])
    if newest == "2.10":
        pytest.skip("this is torch 2.10")
    old, new = declared(INCLUDE, "2.10"), declared(INCLUDE, newest)
    assert old < new
    assert len(old) > 60
