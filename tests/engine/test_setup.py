"""What is settled before a request is served: device and vocabulary, in that order and before the weights move."""

from pathlib import Path

import pytest
import torch

import cog_rwkv_ops
from cog_rwkv_ops import _library
from model.device import choose_device, why_not_cuda
from model.errors import VocabularyError
from model.rwkv7 import RWKV7
from model.service import Service
from model.settings import Settings, SettingsError
from tests import tiny

SMALL = tiny.Shape(vocab=300)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one CUDA device; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.acceptance(14)
def test_a_vocabulary_that_does_not_fit_fails_before_the_weights_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the weights were moved")

    monkeypatch.setattr(RWKV7, "load", load)
    checkpoint = tiny.write(SMALL, tmp_path / "small.safetensors")
    with pytest.raises(VocabularyError, match=r"^E120 the vocabulary goes up to id \d+, wanted 299 at most"):
        Service.build(Settings(weights=str(checkpoint), device="cpu"))


@pytest.mark.usefixtures("with_gpu")
def test_auto_takes_cuda_only_where_the_operators_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "HAS_CUDA", True)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert why_not_cuda("auto") is None
    monkeypatch.setattr(_library, "HAS_CUDA", False)
    assert choose_device("auto") == torch.device("cpu")
    assert why_not_cuda("auto") == cog_rwkv_ops.cuda_problem()
    assert why_not_cuda("cpu") is None, "nothing else was asked for"


def test_without_a_gpu_there_is_nothing_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_library, "HAS_CUDA", False)
    assert choose_device("auto") == torch.device("cpu")
    assert why_not_cuda("auto") is None


@pytest.mark.usefixtures("with_gpu")
def test_cuda_by_name_without_its_operators_is_a_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "HAS_CUDA", False)
    with pytest.raises(SettingsError, match=r"^E130 COG_RWKV_DEVICE: .*CPU only.*COG_RWKV_CUDA=1 pip install .*\./ops"):
        Service.build(Settings(device="cuda"))


@pytest.mark.usefixtures("with_gpu")
def test_the_ready_line_says_why_a_gpu_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_library, "HAS_CUDA", False)
    tiny.write_byte_vocabulary(tmp_path / "vocab.txt")
    checkpoint = tiny.write(SMALL, tmp_path / "small.safetensors")
    Service.build(Settings(weights=str(checkpoint))).engine.close()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "event=ready" in line]
    assert "device=cpu" in line and 'why_not_cuda="cog_rwkv_ops was built for the CPU only' in line
