"""What every test may use: a small checkpoint, and the rule that tests marked gpu need a CUDA device."""

from pathlib import Path

import pytest
import torch

from tests import tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated checkpoint of 2 layers x 128 over the World vocabulary, always the same bytes."""
    return tiny.write(tiny.Shape(), tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
