"""Files of results: a JSON list with a row a line, so that a new measurement changes its own lines alone."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(path: Path) -> list[Any]:
    """The rows of a file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def write(path: Path, rows: Iterable[Any]) -> None:
    """The file, with its folder, holds ``rows`` and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
