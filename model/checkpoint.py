"""From a path, a directory or a URL to the checked tensors of an RWKV-7 checkpoint, memory-mapped.

A ``.pth`` is read with torch's weights-only loader, so a pickle that needs more than tensors is refused before any of
it runs; a ``.safetensors`` holds no code at all. What a file is, is told by its first bytes and not by its name.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model import download
from model.config import Config
from model.errors import CheckpointError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SUFFIXES = (".pth", ".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors are checked and still on disk.

    ``tensors``: CPU tensors by published name, without a leading ``module.``, float32, float16 or bfloat16 as stored;
    the file is mapped, so they cost memory only once they are read. They are not to be written to: what goes to a GPU
    is read from the file itself. ``vocab``: the vocabulary file that lies beside the checkpoint, if one does.
    """

    path: Path
    config: Config
    tensors: Mapping[str, Tensor]
    vocab: Path | None

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the file, computed when first asked for."""
        return download.file_sha256(self.path)


def load(source: str | Path, *, cache: Path | None = None, progress: bool = True) -> Checkpoint:
    """Open the checkpoint at ``source``.

    ``source`` is a file, a directory with exactly one checkpoint in it, an ``http(s)://`` URL or
    ``hf://org/repository[@revision]/file``; a URL may end in ``#sha256=<64 hex digits>``. What is downloaded is kept in
    ``cache`` (None: see ``model.download``). Raises CheckpointError, DownloadError being one, in one line that says
    what was found and what was wanted; VocabularyError is the tokenizer's to raise.
    """
    source = str(source)
    if download.is_url(source):
        path, vocab = download.fetch(source, cache, progress), None
    else:
        path = _find(Path(source).expanduser())
        vocab = _vocabulary_beside(path)
    tensors = _without_module(_read(path), path)
    for key, tensor in tensors.items():
        _check_tensor(key, tensor)
    try:
        config = Config.from_shapes({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error.args[0]}") from None
    return Checkpoint(path, config, tensors, vocab)


def _find(path: Path) -> Path:
    """The checkpoint file that ``path`` means."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: found no file, wanted a .pth or .safetensors file, a directory with one, or a URL"
        )
    found = sorted(entry for entry in path.iterdir() if entry.suffix in SUFFIXES and entry.is_file())
    if len(found) != 1:
        there = found or sorted(path.iterdir())
        names = ", ".join(entry.name for entry in there[:20]) or "nothing"
        raise CheckpointError(
            f"{path}: found {names}, wanted exactly one .pth or .safetensors file; name the file itself"
        )
    return found[0]


def _vocabulary_beside(path: Path) -> Path | None:
    found = sorted(entry for entry in path.parent.glob("*vocab*.txt") if entry.is_file())
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found)
        raise CheckpointError(
            f"{path.name}: found {names} beside it, wanted one vocabulary file at most; move the others away"
        )
    return found[0] if found else None


def _read(path: Path) -> Mapping[str, Any]:
    """Whatever mapping the file holds, its tensors memory-mapped."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not head:
        raise CheckpointError(f"{path.name}: found an empty file, wanted a checkpoint; fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path.name}: found a Git LFS pointer of {size} bytes, wanted the checkpoint; run `git lfs pull` there"
        )
    if head.startswith(b"PK\x03\x04"):
        return _read_pth(path, mmap=True)
    if head.startswith(b"\x80"):
        return _read_pth(path, mmap=False)  # the format before torch 1.6 cannot be mapped
    if head[8:9] == b"{":
        return _read_safetensors(path)
    raise CheckpointError(
        f"{path.name}: found {size} bytes that begin with {head[:12]!r}, wanted a .pth or .safetensors checkpoint"
    )


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name}: found a damaged or truncated .safetensors file ({_first_line(error)}); fetch it again"
        ) from None


def _read_pth(path: Path, mmap: bool) -> Mapping[str, Any]:
    try:
        if mmap:
            _check_zip(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name}: found a pickle that holds more than tensors, wanted weights only; nothing of it was run "
            f"({_reason(error)}); save its state_dict() again or use .safetensors"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler meets any bytes at all, and says so in many types
        raise CheckpointError(
            f"{path.name}: found a damaged or truncated .pth file ({_first_line(error)}); fetch it again"
        ) from None


def _check_zip(path: Path) -> None:
    """Refuse an archive whose records are compressed: mapped, they would be read as they lie."""
    with zipfile.ZipFile(path) as archive:
        packed = next((info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(
            f"{path.name}: found {packed} compressed, wanted a .pth as torch.save writes it; save it again"
        )


def _without_module(tensors: Any, path: Path) -> dict[str, Tensor]:
    """The same tensors without the prefix that torch's data-parallel wrappers put before every name."""
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"{path.name}: found a {type(tensors).__name__}, wanted a mapping of names to tensors")
    plain: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = str(key).removeprefix("module.")
        if name in plain:
            raise CheckpointError(f"{name}: found it twice, with and without module. before it, wanted it once")
        plain[name] = tensor
    return plain


def _check_tensor(key: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise CheckpointError(
            f"{key}: found a {type(tensor).__name__}, wanted a tensor; save the model's state_dict() by itself"
        )
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        kind = str(tensor.dtype if tensor.dtype not in DTYPES else tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{key}: found {kind}, wanted float32, float16 or bfloat16; convert the checkpoint")


def _reason(error: Exception) -> str:
    """Which name a refused pickle asked for, out of torch's page of advice."""
    text = str(error)
    name = re.search(r"GLOBAL (\S+)", text)
    if name:
        return f"it asks for {name[1]}"
    reason = text.rpartition("WeightsUnpickler error: ")[2].split("\n")[0].rstrip(" .")
    return reason or "torch's loader does not say what it met"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200].rstrip(" .")
