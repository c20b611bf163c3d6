"""What goes into the image: .dockerignore and the build.run entry of cog.yaml. script/image-check builds it."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from script.cog_schema import ROOT
from script.dockerignore import copy_context, is_ignored, patterns
from script.image_check import Image, split_run


@pytest.mark.parametrize(
    ("rules", "path", "ignored"),
    [
        (".git", ".git", True),
        (".git", ".git/config", True),
        (".git", "ops/.git", False),
        (".venv*", ".venv312/bin/python", True),
        ("**/*.so", "ops/cog_rwkv_ops/_cpu.abi3.so", True),
        ("**/*.so", "top.so", True),
        ("*.so", "ops/a.so", False),
        ("**/build", "ops/build/x.o", True),
        ("**/build", "ops/rebuild/x.o", False),
        ("a?.txt", "ab.txt", True),
        ("a[0-9].txt", "a7.txt", True),
        ("# a comment\n\ndocs/\n!docs/keep.md", "docs/keep.md", False),
        ("docs\n!docs/keep.md", "docs/other.md", True),
    ],
)
def test_dockerignore_patterns(rules: str, path: str, ignored: bool) -> None:
    assert is_ignored(path, patterns(rules)) is ignored


def test_the_image_gets_sources_and_weights_only(tmp_path: Path) -> None:
    copy_context(ROOT, tmp_path / "src")
    found = {path.relative_to(tmp_path / "src").as_posix() for path in (tmp_path / "src").rglob("*") if path.is_file()}
    needed = {"predict.py", "cancellation.py", "cog.yaml", "requirements.txt", "model/rwkv7.py", "ops/setup.py"}
    assert needed <= found
    assert any(name.startswith("weights/") for name in found)
    strange = (".so", ".pyc", ".o")
    kept_out = (".git/", ".venv", "tests/", "local/", "train/", "ops/build/", ".cog/", "script/", "benchmarks/")
    kept_out += ("requirements-dev.txt", ".clang-format", ".pre-commit-config.yaml", "CONTRIBUTING.md")
    assert not [name for name in found if name.endswith(strange) or name.startswith(kept_out)]


def test_the_operators_are_compiled_from_the_mounted_folder() -> None:
    entry = yaml.safe_load((ROOT / "cog.yaml").read_text())["build"]["run"][0]
    mount, command = split_run(entry)
    assert mount == {"type": "bind", "source": "ops", "target": "/ops", "rw": ""}
    assert command == "uv pip install --break-system-packages --no-build-isolation --no-deps /ops"


def test_image_check_finds_nvcc_where_the_build_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, usual = tmp_path / "root", tmp_path / "cuda/bin/nvcc"
    (root / "ops").mkdir(parents=True)
    shutil.copy(ROOT / "cog.yaml", root)
    finder = (ROOT / "ops/nvcc.py").read_text()
    (root / "ops/nvcc.py").write_text(finder.replace("/usr/local/cuda/bin/nvcc", str(usual)))
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    image = Image(tmp_path, root)
    assert not image.has_nvcc()
    usual.parent.mkdir(parents=True)
    usual.write_text("")
    usual.chmod(0o755)
    assert image.has_nvcc()


def test_every_requirement_is_pinned() -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        assert [line for line in lines if line and "==" not in line] == []
