"""The bytes of a checkpoint's tensors: from its file where they are mapped from one, else from memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model import checkpoint, sources
from model.errors import CheckpointError
from model.sources import Sources
from tests import tiny

SHAPE = tiny.Shape(vocab=300)


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"a model{suffix}"  # with a space: paths stand at the end of a line with spaces
    if suffix == ".safetensors":
        save_file(tiny.tensors(SHAPE), path)
    else:
        torch.save(tiny.tensors(SHAPE), path, _use_new_zipfile_serialization=suffix == ".pth")
    return path


def read(source: sources.Source, tensor: Tensor) -> Tensor:
    """All of it, in two pieces."""
    into, cut = np.zeros(tensor.nbytes, np.uint8), tensor.nbytes // 3
    source.read(cut, into[cut:])
    source.read(0, into[:cut])
    return torch.from_numpy(into).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".old"])
def test_every_tensor_of_a_checkpoint(tmp_path: Path, suffix: str) -> None:
    tensors = checkpoint.load(write(tmp_path, suffix)).tensors
    found = Sources(tensors.values())
    for name, right in tiny.tensors(SHAPE).items():
        source = found.of(tensors[name])
        assert isinstance(source, sources._Memory if suffix == ".old" else sources._File), name
        assert torch.equal(read(source, tensors[name]), right), name


def test_what_is_not_in_a_file_comes_from_memory(tmp_path: Path) -> None:
    tensors = checkpoint.load(write(tmp_path, ".pth")).tensors
    mapped = tensors["head.weight"]
    found, unknown = Sources([mapped, mapped[1:].t()]), Sources()
    for tensor in (mapped.t().contiguous(), mapped.float(), torch.tensor(3.0), torch.ones(4, requires_grad=True)):
        assert torch.equal(read(found.of(tensor), tensor), tensor)
        assert isinstance(found.of(tensor), sources._Memory)
    assert isinstance(found.of(mapped), sources._File)
    assert isinstance(found.of(mapped[1:]), sources._Memory)  # nobody named it
    assert isinstance(unknown.of(mapped), sources._Memory)
    nothing_told = Sources([mapped], maps=tmp_path / "none")
    assert torch.equal(read(nothing_told.of(mapped), mapped), mapped)


def test_a_file_that_is_gone_is_read_from_memory(tmp_path: Path) -> None:
    path = write(tmp_path, ".pth")
    tensors = checkpoint.load(path).tensors
    path.unlink()
    head = tensors["head.weight"]
    source = Sources([head]).of(head)
    assert isinstance(source, sources._Memory)
    assert torch.equal(read(source, head), tiny.tensors(SHAPE)["head.weight"])


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, ".safetensors")
    head = checkpoint.load(path).tensors["head.weight"]
    source = Sources([head]).of(head)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"E100 a model.safetensors: found it cut short while it was read"):
        source.read(head.nbytes // 2, np.zeros(head.nbytes // 2, np.uint8))
