"""How the compiled libraries are found and loaded, and how they are built."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops import _library

OPS = Path(__file__).parents[2] / "ops"
INSTALLED = Path(cog_rwkv_ops.__file__).parent
COMMAND = "pip install --no-build-isolation --no-deps ./ops"
COG_CFLAGS = "-O3 -funroll-loops -fno-strict-aliasing -flto -S"  # what Cog exports while it installs packages
pytestmark = pytest.mark.acceptance(20)


def run(*command: str | Path, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        timeout=280,
    )


def import_error(package: Path, before: str = "") -> str:
    """The last line that importing the package from the folder `package` prints, after running `before`."""
    code = f"import torch; {before}\nimport cog_rwkv_ops"
    result = run(sys.executable, "-c", code, folder=package, PYTHONPATH=str(package))
    assert result.returncode == 1, result.stdout
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package, its libraries included."""
    shutil.copytree(INSTALLED, tmp_path / "cog_rwkv_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def make_library(to: Path, source: str) -> None:
    to.with_suffix(".c").write_text(source)
    to.unlink(missing_ok=True)
    result = run("cc", "-shared", "-fPIC", "-o", to, to.with_suffix(".c"))
    assert result.returncode == 0, result.stderr


def test_a_missing_library_is_one_line_with_the_command(package: Path) -> None:
    (package / "cog_rwkv_ops" / "_cpu.abi3.so").unlink()
    line = import_error(package)
    assert line.startswith("cog_rwkv_ops._library.LibraryError: cog_rwkv_ops is not compiled: ")
    assert line.endswith(f"_cpu.abi3.so is missing; build it with: {COMMAND}")
    assert issubclass(_library.LibraryError, ImportError)


def test_a_library_that_needs_an_unknown_symbol_is_one_line(package: Path) -> None:
    make_library(package / "cog_rwkv_ops" / "_cpu.abi3.so", "void nowhere(void); void f(void) { nowhere(); }")
    line = import_error(package)
    assert f"torch {torch.__version__} lacks the symbol nowhere; rebuild it with: {COMMAND}" in line


def test_a_library_without_an_operator_is_one_line(package: Path) -> None:
    make_library(package / "cog_rwkv_ops" / "_cpu.abi3.so", "int unused;")
    line = import_error(package)
    assert re.search(rf"LibraryError: the library in .* lacks the operator add: rebuild it with: {COMMAND}", line)


def test_a_file_that_is_no_library_is_one_line(package: Path) -> None:
    (package / "cog_rwkv_ops" / "_cpu.abi3.so").write_bytes(b"version https://git-lfs")
    line = import_error(package)
    assert re.search(r"LibraryError: cog_rwkv_ops cannot load .*: (file too short|invalid ELF header); rebuild", line)


def test_an_older_torch_is_one_line(package: Path) -> None:
    line = import_error(package, before="torch.__version__ = '2.9.1+cu128'")
    assert line == (
        "cog_rwkv_ops._library.LibraryError: cog_rwkv_ops needs torch 2.10 or newer, and this is 2.9.1+cu128: "
        "upgrade torch"
    )


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0+cpu", "nonsense"])
def test_older_torches_are_refused(version: str) -> None:
    with pytest.raises(_library.LibraryError, match=f"this is {re.escape(version)}: upgrade torch"):
        _library.check_torch(version)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.0a0+git123", "3.0.0"])
def test_newer_torches_pass(version: str) -> None:
    _library.check_torch(version)


def test_importing_needs_no_gpu_and_no_compiler(package: Path, tmp_path: Path) -> None:
    code = "import cog_rwkv_ops, torch; print(cog_rwkv_ops.add(torch.ones(2), torch.ones(2)).tolist())"
    found = run(
        sys.executable, "-c", code, PYTHONPATH=str(package), PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="", CUDA_HOME=""
    )
    assert found.stdout == "[2.0, 2.0]\n", found.stderr


def test_only_the_library_beside_the_package_is_used(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "cog_rwkv_ops"
    elsewhere.mkdir(parents=True)
    (elsewhere / "_cpu.abi3.so").write_text("not a library")
    code = "import cog_rwkv_ops; print(cog_rwkv_ops.__file__)"
    found = run(sys.executable, "-c", code, folder=elsewhere.parent, PYTHONPATH=str(package))
    assert found.stdout.strip() == str(package / "cog_rwkv_ops" / "__init__.py"), found.stderr


@pytest.mark.skipif(not (INSTALLED / "_cuda.abi3.so").exists(), reason="the CUDA library is not built")
def test_the_cuda_library_loads_without_a_gpu_and_has_every_operator() -> None:
    code = """
import torch, cog_rwkv_ops
from cog_rwkv_ops import _library
if not _library.HAS_CUDA:  # a CPU build of torch, which must not load it by itself
    _library.load_library(_library.FOLDER / "_cuda.abi3.so")
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("cog_rwkv::")]
has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
print(len(names) > 4, sorted(n for n in names if not (has(n, "CUDA") and has(n, "CPU"))))
"""
    found = run(sys.executable, "-c", code, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(INSTALLED.parent))
    for_cpu = [re.findall(r'operator\("(\w+)", cuda=False\)', f.read_text()) for f in INSTALLED.glob("*/__init__.py")]
    one_device = ["forward_", *(name for names in for_cpu for name in names)]  # forward_ is what decode_ is on a CPU
    assert found.stdout == f"True {sorted(f'cog_rwkv::{name}' for name in one_device)}\n", found.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="not an x86-64 machine")
def test_only_marked_functions_use_more_than_x86_64_v2() -> None:
    listing = run("objdump", "--disassemble", "--demangle", "--no-show-raw-insn", INSTALLED / "_cpu.abi3.so").stdout
    function, found = "", set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line
        elif re.search(r"%[yz]mm|\tv[a-z]", line) and "avx" not in function:
            found.add(function)
    assert listing
    assert not found


def copy_of_ops(to: Path) -> Path:
    """The sources of the package with `add` as the only operator: what a build does, in seconds."""
    kept = {"add", "csrc"}

    def leave_out(folder: str, names: list[str]) -> list[str]:
        others = [n for n in names if (Path(folder) / n).is_dir() and Path(folder).name == "cog_rwkv_ops"]
        return (
            [n for n in others if n not in kept]
            + [n for n in names if n in ("build", "__pycache__")]
            + [n for n in names if n.endswith((".so", ".egg-info"))]
            + [n for n in names if Path(folder).name == "csrc" and n.endswith((".cpp", ".cu"))]  # add needs none
        )

    shutil.copytree(OPS, to, ignore=leave_out)
    (to / "cog_rwkv_ops" / "__init__.py").write_text("from cog_rwkv_ops.add import add\n")
    return to


def install(ops: Path, to: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--verbose"]
    return run(*command, "--target", to, ops, **environment)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_builds_under_the_flags_of_cog_without_a_gpu(tmp_path: Path) -> None:
    ops = copy_of_ops(tmp_path / "ops")
    nvcc = run(sys.executable, ops / "nvcc.py").returncode == 0
    built = install(
        ops,
        tmp_path / "site",
        CFLAGS=COG_CFLAGS,
        COG_RWKV_CUDA="1" if nvcc else "0",
        TORCH_CUDA_ARCH_LIST="8.0 9.0a",
        CUDA_VISIBLE_DEVICES="",
    )
    assert built.returncode == 0, built.stdout + built.stderr
    names = {path.name for path in (tmp_path / "site" / "cog_rwkv_ops").glob("*.so")}
    assert names == ({"_cpu.abi3.so", "_cuda.abi3.so"} if nvcc else {"_cpu.abi3.so"})
    code = "import cog_rwkv_ops, torch; print(cog_rwkv_ops.__file__, cog_rwkv_ops.add(torch.ones(1), torch.ones(1)))"
    found = run(sys.executable, "-c", code, folder=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert found.stdout == f"{tmp_path}/site/cog_rwkv_ops/__init__.py tensor([2.])\n", found.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_second_build_compiles_only_what_changed(tmp_path: Path) -> None:
    operators = copy_of_ops(tmp_path / "ops") / "cog_rwkv_ops"
    (operators / "add" / "add.cpp").write_text("int add;\n")  # quicker to compile than an operator
    (operators / "other").mkdir()
    (operators / "other" / "other.cpp").write_text("int other;\n")
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]

    def compiled() -> set[str]:
        result = run(*build, folder=operators.parent, COG_RWKV_CUDA="0")
        assert result.returncode == 0, result.stdout + result.stderr
        return set(re.findall(r"-c \S*/(\w+\.cpp) ", result.stdout))

    assert compiled() == {"add.cpp", "other.cpp"}
    assert compiled() == set()
    (operators / "other" / "other.cpp").write_text("int changed;\n")
    assert compiled() == {"other.cpp"}


def test_without_torch_the_build_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such module')\n")
    result = run(sys.executable, OPS / "setup.py", "--version", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert COMMAND in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_missing_nvcc_is_one_line(tmp_path: Path) -> None:
    if list(Path(torch.__file__).parents[1].glob("nvidia/cu13/bin/nvcc")):
        pytest.skip("this environment has an nvcc from PyPI")
    setup = copy_of_ops(tmp_path / "ops") / "setup.py"
    finder = setup.with_name("nvcc.py")
    finder.write_text(finder.read_text().replace("/usr/local/cuda/bin/nvcc", "/nowhere/nvcc"))
    environment = {"PATH": str(tmp_path), "CUDA_HOME": ""}
    without = run(sys.executable, setup, "--version", **environment, COG_RWKV_CUDA="")
    assert without.returncode == 0
    assert [line for line in without.stderr.splitlines() if "building for the CPU only: no nvcc" in line]
    demanded = run(sys.executable, setup, "--version", **environment, COG_RWKV_CUDA="1")
    assert demanded.returncode == 1
    assert re.search("COG_RWKV_CUDA=1, but there is no nvcc .* pip install", demanded.stderr.splitlines()[-1])


def test_cuda_tensors_on_a_cpu_only_build_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"built for the CPU only.*COG_RWKV_CUDA=1"):
        _library._no_cuda(torch.ones(1))
