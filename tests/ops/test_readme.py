"""The example of ops/README.md works as it is printed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "ops"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_compiling_just_in_time(tmp_path: Path) -> None:
    text = (OPS / "README.md").read_text().split("### Just in time")[1].split("\n### ")[0]
    blocks = dict(re.findall(r"```(cpp|python)\n(.*?)```", text, re.DOTALL))
    (tmp_path / "cube.cpp").write_text(blocks["cpp"])
    (tmp_path / "try_cube.py").write_text(blocks["python"])
    # PyTorch calls the ninja on PATH, and the environment of these tests may not be the active one.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [sys.executable, "try_cube.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(OPS), "PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path / "built")},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "tensor([ 1.,  8., 27.])"
