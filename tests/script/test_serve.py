"""script/serve says in one line why it cannot start."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from script.cog_schema import ROOT
from script.server import ServerError, free_port, wanted_port

HOST = "127.0.0.1"


def serve(port: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "script", "serve"],
        cwd=root,
        env={**os.environ, "PORT": port, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_port_that_is_no_number_is_one_line() -> None:
    found = serve("http")
    assert found.returncode == 1
    assert found.stderr == "PORT is 'http'; it must be a number from 1 to 65535\n"


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        found = serve(str(port))
    assert found.returncode == 1
    assert found.stderr == (
        f"port {port} of {HOST} cannot be used: Address already in use; choose another: PORT=5001 script/serve\n"
    )


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "5000.0", " 5000"])
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(ServerError, match="it must be a number from 1 to 65535"):
        wanted_port(text, HOST)


def test_a_free_port() -> None:
    port = free_port()
    assert wanted_port(str(port), HOST) == port


def test_a_schema_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "script", tmp_path / "script", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cog.yaml", "predict.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".cog").write_text("")  # in the way, for root may write anywhere
    found = serve(str(free_port()), tmp_path)
    assert (found.returncode, found.stderr) == (1, f"{tmp_path}/.cog: File exists\n")
