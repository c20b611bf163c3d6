"""Markers and fixtures that every test may use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated checkpoint of 2 layers x 128 over the World vocabulary, always the same bytes."""
    from tests import tiny

    return tiny.write(tiny.Shape(), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
