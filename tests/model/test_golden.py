"""Greedy ids of the tiny and of the embedded checkpoint are those on record."""

import json

import pytest

from tests.model import golden


@pytest.mark.acceptance(15)
def test_golden_ids(tmp_path) -> None:
    known = json.loads(golden.FILE.read_text())
    paths = golden.checkpoints(tmp_path)
    assert len(paths) == 2
    for path in paths:
        sha, ids = golden.greedy(path)
        assert sha in known, f"{path.name} is new: python -m tests.model.golden records it"
        assert ids == known[sha]
