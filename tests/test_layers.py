"""The order of data flow, kept by looking at every import: nothing imports upward.

HTTP -> predict.py -> model.service -> model.engine -> model.rwkv7 -> cog_rwkv_ops -> kernel
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("predict", "cancellation", "model", "cog_rwkv_ops", "script", "train", "benchmarks", "tests")
# What each part may import of the others; a part may always import itself.
ALLOWED = {
    "predict": {"cancellation", "model"},
    "cancellation": set(),
    "model": {"cog_rwkv_ops"},
    "cog_rwkv_ops": set(),
    "script": set(),
    "train": {"model", "cog_rwkv_ops", "benchmarks"},
    "benchmarks": {"model", "cog_rwkv_ops", "script"},
}
# Inside model/: a module may import those to its left, never one to its right.
MODEL_ORDER = ("rwkv7", "engine", "service")
COG_USERS = {"predict", "cancellation"}


def sources(part: str) -> list[Path]:
    """The Python files of a part; a part is a file, a folder, or the package in ops/."""
    folder = ROOT / "ops" / part if part == "cog_rwkv_ops" else ROOT / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{part}.py"]


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, relative imports resolved."""
    package = path.relative_to(ROOT / "ops" if "cog_rwkv_ops" in path.parts else ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", ALLOWED)
def test_nothing_imports_upward(part: str) -> None:
    for path in sources(part):
        used = {name.partition(".")[0] for name in imports(path)} & set(OURS)
        assert used <= ALLOWED[part] | {part}, f"{path.relative_to(ROOT)} imports {used - ALLOWED[part] - {part}}"


def test_the_model_is_layered() -> None:
    """rwkv7 knows no engine and the engine no service, not even through a third module."""
    known = {
        path.stem: {name.split(".")[1] for name in imports(path) if name.startswith("model.")}
        for path in sources("model")
    }
    for rank, module in enumerate(MODEL_ORDER):
        reached, todo = set(), [module]
        while todo:
            for name in known.get(todo.pop(), set()) - reached:
                reached.add(name)
                todo.append(name)
        above = reached & set(MODEL_ORDER[rank + 1 :])
        assert not above, f"model/{module}.py reaches {above}"


def test_only_the_endpoint_knows_cog() -> None:
    for part in ALLOWED:
        for path in sources(part):
            users = {name for name in imports(path) if name.partition(".")[0] in ("cog", "coglet")}
            assert not users or part in COG_USERS, f"{path.relative_to(ROOT)} imports {users}"


def test_only_ops_names_the_operators_namespace() -> None:
    for part in set(ALLOWED) - {"cog_rwkv_ops"}:
        for path in sources(part):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"torch\.ops\.cog_rwkv\b", text), f"{path.relative_to(ROOT)} calls torch.ops.cog_rwkv"


def test_no_operator_chooses_a_device_in_python() -> None:
    """One implementation a device, chosen by PyTorch's dispatcher. (A size that depends on it may be looked up.)"""
    for path in sources("cog_rwkv_ops"):
        if path.parent.name != "cog_rwkv_ops":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\.is_cuda\b|\.is_cpu\b|\.device\.type\s*([=!]=|\bin\b)", text), (
                f"{path.relative_to(ROOT)} asks for the device"
            )


def test_every_part_is_there() -> None:
    """A part that was renamed would make the tests above pass without looking at anything."""
    assert [part for part in ALLOWED if not all(path.exists() for path in sources(part)) or not sources(part)] == []
