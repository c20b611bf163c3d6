"""What loads, and what is refused in one line that says why."""

import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model import checkpoint
from model.config import Config, guess_version
from model.errors import CheckpointError
from tests import tiny

SHAPE = tiny.Shape(vocab=300)
Tensors = dict[str, Tensor]

pytestmark = pytest.mark.acceptance(14)


@pytest.fixture
def tensors() -> Tensors:
    return tiny.tensors(SHAPE)


def save(tensors: Tensors, folder: Path, suffix: str = ".pth") -> Path:
    path = folder / f"model{suffix}"
    if suffix == ".pth":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    message = str(error.value)
    assert message.startswith("E100 ") and "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_good_file_loads(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path = tiny.write(SHAPE, tmp_path / f"model{suffix}", dtype)
    loaded = checkpoint.load(path)
    assert loaded.config == Config(2, 128, 2, 64, 512, 300, decay_rank=32, a_rank=32, v_rank=16, gate_rank=64)
    assert loaded.path == path and loaded.vocab is None and re.fullmatch("[0-9a-f]{64}", loaded.sha256)
    for key, tensor in tiny.tensors(SHAPE, dtype).items():
        assert torch.equal(loaded.tensors[key], tensor) and loaded.tensors[key].dtype == dtype


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_the_file_is_mapped_and_not_read(tmp_path: Path, suffix: str) -> None:
    path = tiny.write(tiny.Shape(layers=1, vocab=1 << 18), tmp_path / f"model{suffix}")
    before = _anonymous_bytes()
    loaded = checkpoint.load(path)
    assert _anonymous_bytes() - before < path.stat().st_size / 4
    assert str(path) in Path("/proc/self/maps").read_text()
    assert loaded.tensors["head.weight"].sum().isfinite()


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def test_the_legacy_format_loads(tmp_path: Path, tensors: Tensors) -> None:
    torch.save(tensors, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(checkpoint.load(tmp_path / "model.pth").tensors["emb.weight"], tensors["emb.weight"])


def test_value_mix_of_the_first_layer_may_be_there(tmp_path: Path, tensors: Tensors) -> None:
    assert "blocks.0.att.v0" not in tensors
    for key in ("v0", "v1", "v2"):
        tensors[f"blocks.0.att.{key}"] = tensors[f"blocks.1.att.{key}"].clone()
    assert checkpoint.load(save(tensors, tmp_path)).config.v_rank == 16
    tensors["blocks.0.att.v1"] = torch.zeros(128, 17)
    assert "blocks.0.att.v1: found [128, 17], wanted [128, 16]" in refusal(save(tensors, tmp_path))


def test_prefixes_of_data_parallel_training_go(tmp_path: Path, tensors: Tensors) -> None:
    prefixed = {f"module.{key}": tensor for key, tensor in tensors.items()}
    assert set(checkpoint.load(save(prefixed, tmp_path)).tensors) == set(tensors)
    assert "emb.weight: found it twice" in refusal(save(prefixed | {"emb.weight": tensors["emb.weight"]}, tmp_path))


def test_vectors_may_be_flat(tmp_path: Path, tensors: Tensors) -> None:
    flat = {key: tensor.flatten() if tensor.dim() == 3 else tensor for key, tensor in tensors.items()}
    assert checkpoint.load(save(flat, tmp_path)).config == checkpoint.load(save(tensors, tmp_path)).config


@pytest.mark.parametrize(
    ("key", "change", "says"),
    [
        ("blocks.1.att.w2", None, "blocks.1.att.w2: found no such tensor, wanted [32, 128]"),
        ("emb.weight", None, "emb.weight: found no such tensor, wanted [vocabulary, width]"),
        ("ln_out.bias", None, "ln_out.bias: found no such tensor, wanted [128]"),
        ("blocks.1.att.v0", None, "blocks.1.att.v0: found no such tensor, wanted [128]"),
        ("blocks.1.att.v1", None, "blocks.1.att.v1: found no such tensor, wanted [width, rank]"),
        ("blocks.1.att.x_r", torch.zeros(1, 128, 1), "blocks.1.att.x_r: found [1, 128, 1], wanted [128]"),
        (
            "blocks.1.att.key.weight",
            torch.zeros(128, 64),
            "blocks.1.att.key.weight: found [128, 64], wanted [128, 128]",
        ),
        (
            "blocks.0.ffn.key.weight",
            torch.zeros(100, 128),
            "blocks.0.ffn.value.weight: found [128, 512], wanted [128, 100]",
        ),
        ("head.weight", torch.zeros(299, 128), "head.weight: found [299, 128], wanted [300, 128]"),
        ("emb.weight", torch.zeros(0, 128), "emb.weight: found [0, 128], wanted [vocabulary, width]"),
        (
            "blocks.0.att.r_k",
            torch.zeros(1, 128),
            "blocks.0.att.r_k: found [1, 128], wanted [2, 64]; only head size 64",
        ),
        ("blocks.0.att.new", torch.zeros(3), "blocks.0.att.new: found [3], wanted no such tensor"),
        ("blocks.7000000000.ln1.bias", torch.zeros(3), "blocks.2.ln1.weight: found no such tensor, wanted [128]"),
    ],
)
def test_each_wrong_tensor_is_named(
    tmp_path: Path, tensors: Tensors, key: str, change: Tensor | None, says: str
) -> None:
    if change is None:
        del tensors[key]
    else:
        tensors[key] = change
    message = refusal(save(tensors, tmp_path))
    assert says in message and message.startswith("E100 model.pth: ") and "looks like RWKV-7" in message


@pytest.mark.parametrize(
    ("layer", "says"), [(0, "blocks.0.att.r_k"), (1, "blocks.1.att.v1"), (2, "blocks.2.ln1.weight")]
)
def test_a_missing_layer_is_named(tmp_path: Path, layer: int, says: str) -> None:
    tensors = tiny.tensors(tiny.Shape(layers=4, vocab=300))
    kept = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"blocks.{layer}.")}
    assert f"{says}: found no such tensor, wanted [" in refusal(save(kept, tmp_path))


def test_head_size_128_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    tensors |= {f"blocks.{layer}.att.r_k": torch.zeros(1, 128) for layer in range(2)}
    assert "found [1, 128], wanted [2, 64]; only head size 64 is supported" in refusal(save(tensors, tmp_path))


OTHERS = {
    "RWKV-4": ["att.time_decay", "att.time_first", "att.time_mix_k", "att.receptance.weight", "ffn.time_mix_k"],
    "RWKV-5": [
        "att.time_decay",
        "att.time_faaaa",
        "att.time_mix_k",
        "att.time_mix_g",
        "att.gate.weight",
        "att.ln_x.weight",
    ],
    "RWKV-6": [
        "att.time_maa_x",
        "att.time_maa_w1",
        "att.time_decay",
        "att.time_faaaa",
        "att.gate.weight",
        "att.ln_x.weight",
    ],
    "RWKV-7 with DeepEmbed": ["att.r_k", "att.x_r", "ffn.s_emb.weight", "ffn.s1"],
}


@pytest.mark.parametrize("version", OTHERS)
def test_another_version_is_guessed(tmp_path: Path, version: str) -> None:
    tensors = {"emb.weight": torch.zeros(300, 128)} | {f"blocks.0.{key}": torch.zeros(128) for key in OTHERS[version]}
    message = refusal(save(tensors, tmp_path))
    assert (
        f"looks like {version}" in message
        and "blocks.0." in message
        and "found [128], wanted no such tensor" in message
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.layers.0.attn.r_proj.weight", "a checkpoint in the layout of Hugging Face"),
        ("blocks.0.att.receptance.lora_A", "a LoRA adapter"),
        ("fc.weight", "no version of RWKV"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, key: str, says: str) -> None:
    assert f"{key}: found [4], wanted no such tensor (the checkpoint looks like {says}" in refusal(
        save({key: torch.zeros(4)}, tmp_path)
    )


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert "found no tensor at all" in refusal(save({}, tmp_path))
    assert guess_version({}) == "no version of RWKV"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, tensors: Tensors, dtype: torch.dtype) -> None:
    tensors["blocks.1.att.key.weight"] = tensors["blocks.1.att.key.weight"].to(dtype)
    name = str(dtype).removeprefix("torch.")
    for suffix in (".pth", ".safetensors"):
        assert f"blocks.1.att.key.weight: found {name}, wanted float32, float16 or bfloat16" in refusal(
            save(tensors, tmp_path, suffix)
        )


def test_values_that_are_no_tensors_are_refused(tmp_path: Path, tensors: Tensors) -> None:
    torch.save({"state_dict": tensors}, tmp_path / "model.pth")
    assert "state_dict: found a dict, wanted a tensor" in refusal(tmp_path / "model.pth")
    torch.save([1, 2], tmp_path / "model.pth")
    assert "found a list, wanted a mapping" in refusal(tmp_path / "model.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".legacy"])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / "model.pth"
    if suffix == ".legacy":
        torch.save(tiny.tensors(SHAPE), path, _use_new_zipfile_serialization=False)
    else:
        path = tiny.write(SHAPE, tmp_path / f"model{suffix}")
    os.truncate(path, int(path.stat().st_size * share))
    assert "damaged or truncated" in refusal(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pth").touch()
    assert "model.pth: found an empty file" in refusal(tmp_path / "model.pth")


def test_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 382000000\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert f"found a Git LFS pointer of {len(pointer)} bytes" in refusal(tmp_path / "model.safetensors")


def test_a_web_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_text("<!doctype html><title>Sign in</title>")
    assert "found 37 bytes that begin with b'<!doctype ht', wanted a .pth or .safetensors" in refusal(
        tmp_path / "model.pth"
    )


class Bomb:
    """Unpickled without care, it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return subprocess.call, (["touch", str(self.trace)],)


@pytest.mark.parametrize("kind", ["zip", "legacy", "bare pickle"])
def test_a_pickle_that_would_run_a_command_is_refused_and_nothing_ran(
    tmp_path: Path, tensors: Tensors, kind: str
) -> None:
    path, trace = tmp_path / "model.pth", tmp_path / "trace"
    content = tensors | {"blocks.0.att.bomb": Bomb(trace)}
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    message = refusal(path)
    assert "holds more than tensors" in message and "nothing of it was run" in message
    # Protocol 2 calls subprocess.call by its name of Python 2.
    assert kind == "bare pickle" or "it asks for commands.call" in message
    assert not trace.exists()
    with path.open("rb") as file:  # the bomb is a real one
        torch.load(file, weights_only=False) if kind != "bare pickle" else pickle.load(file)
    assert trace.exists()


@pytest.mark.parametrize("text", ["", "Weights only load failed. WeightsUnpickler error: \n\nadvice"])
def test_a_refusal_without_a_reason_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def load(*_: object, **__: object) -> None:
        raise pickle.UnpicklingError(text)

    monkeypatch.setattr(torch, "load", load)
    (tmp_path / "model.pth").write_bytes(pickle.dumps({}))
    assert "(torch's loader does not say what it met)" in refusal(tmp_path / "model.pth")


def test_a_compressed_archive_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    path, packed = save(tensors, tmp_path), tmp_path / "packed.pth"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    assert "compressed, wanted a .pth as torch.save writes it" in refusal(packed)


def test_a_directory_holds_exactly_one_checkpoint(tmp_path: Path, tensors: Tensors) -> None:
    assert "found nothing, wanted exactly one" in refusal(tmp_path)
    (tmp_path / "readme.md").touch()
    assert "found readme.md, wanted exactly one" in refusal(tmp_path)
    path = save(tensors, tmp_path)
    assert checkpoint.load(str(tmp_path)).path == path
    save({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path, ".safetensors")
    assert "found model.pth, model.safetensors, wanted exactly one" in refusal(tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "none.pth: found no file" in refusal(tmp_path / "none.pth")


def test_a_vocabulary_beside_a_checkpoint_is_found(tmp_path: Path, tensors: Tensors) -> None:
    path, vocab = save(tensors, tmp_path), tmp_path / "small_vocab_v1.txt"
    vocab.touch()
    assert checkpoint.load(path).vocab == vocab == checkpoint.load(tmp_path).vocab
    (tmp_path / "vocab.txt").touch()
    assert "found small_vocab_v1.txt, vocab.txt beside it, wanted one" in refusal(path)


SIZES = {  # of the published models: layers, width, and the ranks of w, a, v and g
    "0.1b": (12, 768, 64, 64, 32, 128),
    "0.4b": (24, 1024, 64, 64, 32, 128),
    "1.5b": (24, 2048, 96, 96, 64, 256),
    "2.9b": (32, 2560, 96, 96, 64, 320),
    "7.2b": (32, 4096, 128, 128, 96, 480),
    "13.3b": (61, 4096, 192, 192, 128, 384),
}


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_are_read(size: str) -> None:
    layers, width, *ranks = SIZES[size]
    wanted = Config(layers, width, width // 64, 64, 4 * width, 65536, *ranks)
    shapes = published_shapes(wanted)
    assert Config.from_shapes(shapes) == wanted


def published_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint like the tiny one, at another size."""
    named = {128: config.width, 512: config.ffn, 300: config.vocab, 2: config.heads}
    ranks = {"w": config.decay_rank, "a": config.a_rank, "v": config.v_rank, "g": config.gate_rank}
    shapes = {}
    for key, tensor in tiny.tensors(SHAPE).items():
        rank = re.search(r"att\.([wavg])[12]$", key)
        scaled = tuple(ranks[rank[1]] if rank and size != 128 else named.get(size, size) for size in tensor.shape)
        layers = range(1, config.layers) if key.startswith("blocks.1.") else [0]
        shapes |= {key.replace("blocks.1.", f"blocks.{layer}."): scaled for layer in layers}
    return shapes
