"""script/setup in a folder of its own, with a stand-in for Python that makes environments in no time."""

import os
import shutil
import subprocess
from pathlib import Path
from unittest.mock import ANY

import pytest

from script.cog_schema import ROOT

PYTHON = """#!/usr/bin/env bash
case "$1 ${2:-}" in
    -c*) echo 3.12 ;;
    '-m venv') echo venv >>"$LOG"; sleep 0.4; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    '-m pip') echo pip >>"$LOG"; sleep 0.4 ;;
esac
"""
BUILD = '#!/bin/sh\necho build >>"$LOG"\nsleep 0.4\ntouch ops/cog_rwkv_ops/_cpu.abi3.so\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("script", "ops/cog_rwkv_ops", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "script/setup", tmp_path / "script/setup")
    for name in ("requirements.txt", "requirements-dev.txt", "ops/setup.py"):
        (tmp_path / name).write_text("")
    for name, text in (("bin/python3", PYTHON), ("script/build-ops", BUILD), ("bin/g++", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(checkout: Path, **variables: str) -> subprocess.Popen[str]:
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(checkout / "log"), "COG_RWKV_CUDA": "0"}
    for name in ("PYTHON", "CXX"):
        environment.pop(name, None)
    environment |= variables
    return subprocess.Popen(
        [checkout / "script/setup"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def setup(checkout: Path, **variables: str) -> tuple[int, str]:
    run = start(checkout, **variables)
    output = run.communicate(timeout=30)[0]
    return run.returncode, output


def did(checkout: Path) -> list[str]:
    return (checkout / "log").read_text().split()


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock")
def test_two_first_runs_at_once_are_one(checkout: Path) -> None:
    runs = [start(checkout), start(checkout)]
    outputs = [run.communicate(timeout=30)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert did(checkout) == ["venv", "pip", "build"]
    assert sum("waiting for it" in output for output in outputs) == 1


def test_a_second_run_does_nothing(checkout: Path) -> None:
    assert start(checkout).wait(30) == 0
    second = start(checkout)
    assert second.communicate(timeout=30)[0] == "" and second.returncode == 0
    assert did(checkout) == ["venv", "pip", "build"]


def test_without_flock_it_goes_on(checkout: Path) -> None:
    names = "bash cat cp cut dirname env find mkdir rm sha256sum sleep sort touch tr xargs"
    for name in names.split():
        (checkout / "bin" / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(checkout / "bin"), "LOG": str(checkout / "log"), "COG_RWKV_CUDA": "0"}
    found = subprocess.run([checkout / "script/setup"], env=environment, capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stdout + found.stderr
    assert did(checkout) == ["venv", "pip", "build"]


@pytest.mark.parametrize("python", ["/no/such/python", "true", ""])
def test_a_python_that_will_not_do_leaves_the_environment(checkout: Path, python: str) -> None:
    assert setup(checkout)[0] == 0
    (checkout / ".venv/place").write_text("elsewhere")
    (checkout / "bin/python3").write_text("#!/bin/sh\nexit 1\n")
    for version in ("python3.11", "python3.12", "python3.13"):
        (checkout / "bin" / version).write_text("#!/bin/sh\nexit 1\n")
        (checkout / "bin" / version).chmod(0o755)
    code, output = setup(checkout, PYTHON=python)
    assert code == 1 and f"found as {python or 'python3'}; name one" in output
    assert (checkout / ".venv/packages").exists()


def test_another_python_may_have_a_space_in_its_path(checkout: Path) -> None:
    assert setup(checkout)[0] == 0
    (checkout / "a b").mkdir()
    python = checkout / "a b/python"
    python.write_text(PYTHON.replace("3.12", "3.13"))
    python.chmod(0o755)
    code, output = setup(checkout, PYTHON=str(python))
    assert code == 0 and f"making .venv with {python}" in output
    assert did(checkout) == ["venv", "pip", "build"] * 2
    assert setup(checkout, PYTHON=str(python)) == (0, "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_environment_that_is_not_ours_is_left_alone(checkout: Path) -> None:
    assert setup(checkout)[0] == 0
    (checkout / ".venv/place").write_text("elsewhere")
    (checkout / ".venv/bin").chmod(0o555)
    code, output = setup(checkout)
    assert code == 1 and ".venv has to change and is not writable" in output
    assert (checkout / ".venv/packages").exists()


def test_a_missing_compiler_is_said_before_the_packages(checkout: Path) -> None:
    code, output = setup(checkout, CXX="no-such-compiler -m64")
    assert code == 1 and "no C++ compiler (no-such-compiler)" in output
    assert not (checkout / "log").exists()


def test_a_compiler_may_be_more_than_a_word(checkout: Path) -> None:
    """torch's build gets it as one."""
    shutil.copy(ROOT / "script/build-ops", checkout / "script/build-ops")
    (checkout / "bin/g++").write_text('#!/bin/sh\necho "$@" >>"$LOG"\n')
    python = PYTHON.replace("esac", """    'setup.py build_ext') "$CXX" 'a b' ;;\nesac""")
    (checkout / "bin/python3").write_text(python)
    assert setup(checkout, CXX="env g++ -m64") == (0, ANY)
    assert "-m64 a b" in (checkout / "log").read_text().splitlines()
