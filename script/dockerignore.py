"""What `docker build` sees of a folder: everything that its .dockerignore does not name."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def patterns(text: str) -> list[tuple[bool, re.Pattern[str]]]:
    """The lines of a .dockerignore as (ignore, pattern of a path and all below it); the last match counts."""
    found = []
    for line in (raw.strip() for raw in text.splitlines()):
        if line and not line.startswith("#"):
            glob = line.removeprefix("!").strip("/")
            found.append((not line.startswith("!"), re.compile(f"{_regex(glob)}(/.*)?")))
    return found


def is_ignored(path: str, rules: list[tuple[bool, re.Pattern[str]]]) -> bool:
    """Whether a path relative to the folder, with /, stays out."""
    ignored = False
    for ignore, pattern in rules:
        if pattern.fullmatch(path):
            ignored = ignore
    return ignored


def copy_context(root: Path, target: Path) -> None:
    """Copy `root` to `target` as .dockerignore leaves it."""
    rules = patterns((root / ".dockerignore").read_text(encoding="utf-8"))
    keep_folders = any(not ignore for ignore, _ in rules)  # an exception may bring back a file in an ignored folder
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        if not keep_folders:
            folders[:] = [name for name in folders if not is_ignored((here / name).as_posix(), rules)]
        for name in files:
            if not is_ignored((here / name).as_posix(), rules):
                (target / here).mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(folder) / name, target / here / name, follow_symlinks=False)


def _regex(glob: str) -> str:
    """`**` crosses folders, also none; `*` and `?` do not; [...] is a class."""
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]*\]|[^*?\[]+|\[", glob)
    return "".join(parts.get(t) or (t if re.fullmatch(r"\[[^\]]+\]", t) else re.escape(t)) for t in tokens)
