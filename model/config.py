"""The sizes of an RWKV-7 model, read from the shapes of its tensors and checked against every one of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from model.errors import CheckpointError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

HEAD_SIZE = 64

# Keys by which a checkpoint shows what it is; the first that matches counts. The versions up to 6 name their decay
# "time_decay" and differ in what stands beside it.
_SIGNS = (
    (r"ffn\.s_emb", "RWKV-7 with DeepEmbed (7a or 7b)"),
    (r"att\.(r_k|k_k|x_[rwkvag])$", "RWKV-7"),
    (r"att\.time_maa_", "RWKV-6"),
    (r"att\.(time_faaaa|gate\.weight|time_mix_g|ln_x\.weight)$", "RWKV-5"),
    (r"att\.time_(first|decay|mix_k)$", "RWKV-4"),
    (r"lora_[AB]\b|\.lora\.", "a LoRA adapter"),
    (r"^model\.(layers|embeddings|embed_tokens)\.", "a checkpoint in the layout of Hugging Face transformers"),
    (r"^(state_dict|model|module|optimizer)$", "a training state"),
)


@dataclass(frozen=True)
class Config:
    """Sizes of a model. The four ranks are those of the low-rank projections w1/w2, a1/a2, v1/v2 and g1/g2."""

    layers: int
    width: int
    heads: int
    head_size: int
    ffn: int
    vocab: int
    decay_rank: int
    a_rank: int
    v_rank: int
    gate_rank: int

    @classmethod
    def from_shapes(cls, shapes: Shapes) -> "Config":
        """Sizes from ``shapes`` (published names: ``blocks.N.att.*``, ``blocks.N.ffn.*``), all of which are checked.

        Vectors may be [C] or, as published, [1, 1, C]; ``blocks.0.att.v0..v2`` may be there or not, nothing reads
        them. Raises CheckpointError for the first key that is missing, unknown or of a wrong shape.
        """
        version = guess_version(shapes)
        if version != "RWKV-7":
            raise _not_rwkv7(shapes, version)
        config = _sizes(shapes)
        known = set()
        for key, shape in _layout(config):
            known.add(key)
            if key in shapes and not _fits(shapes[key], shape):
                raise _mismatch(key, shapes[key], shape)
            if key not in shapes and key not in _OPTIONAL:
                raise _mismatch(key, None, shape)
        unknown = next((key for key in shapes if key not in known), None)
        if unknown is not None:
            raise _mismatch(unknown, shapes[unknown], None)
        return config


def guess_version(shapes: Shapes) -> str:
    """What the keys look like, in words."""
    for pattern, version in _SIGNS:
        if any(re.search(pattern, key) for key in shapes):
            return version
    return "no version of RWKV"


_OPTIONAL = frozenset(f"blocks.0.att.v{i}" for i in range(3))


def _sizes(shapes: Shapes) -> Config:
    vocab, width = _matrix(shapes, "emb.weight", "[vocabulary, width]")
    heads, head_size = _matrix(shapes, "blocks.0.att.r_k", "[width / 64, 64]")
    if head_size != HEAD_SIZE or heads * head_size != width:
        raise _mismatch(
            "blocks.0.att.r_k", (heads, head_size), (width // HEAD_SIZE, HEAD_SIZE), "; only head size 64 is supported"
        )
    layers = 1 + max(int(key.split(".")[1]) for key in shapes if re.match(r"blocks\.\d+\.", key))
    value = "blocks.1.att.v1" if layers > 1 else "blocks.0.att.v1"
    return Config(
        layers=layers,
        width=width,
        heads=heads,
        head_size=head_size,
        ffn=_matrix(shapes, "blocks.0.ffn.key.weight", "[ffn, width]")[0],
        vocab=vocab,
        decay_rank=_matrix(shapes, "blocks.0.att.w1", "[width, rank]")[1],
        a_rank=_matrix(shapes, "blocks.0.att.a1", "[width, rank]")[1],
        v_rank=_matrix(shapes, value, "[width, rank]")[1] if layers > 1 or value in shapes else 0,
        gate_rank=_matrix(shapes, "blocks.0.att.g1", "[width, rank]")[1],
    )


def _matrix(shapes: Shapes, key: str, wanted: str) -> Shape:
    shape = shapes.get(key)
    if shape is None or len(shape) != 2 or 0 in shape:
        raise _mismatch(key, shape, wanted)
    return shape


def _layout(config: Config) -> Iterator[tuple[str, Shape]]:
    """Every key of a checkpoint and its shape, in the order in which they are published."""
    width = config.width
    yield "emb.weight", (config.vocab, width)
    yield from _norm("blocks.0.ln0", width)
    for layer in range(config.layers):
        yield from _block(f"blocks.{layer}.", config)
    yield from _norm("ln_out", width)
    yield "head.weight", (config.vocab, width)


def _block(name: str, config: Config) -> Iterator[tuple[str, Shape]]:
    att, ffn, width = f"{name}att.", f"{name}ffn.", config.width
    ranks = {"w": config.decay_rank, "a": config.a_rank, "v": config.v_rank, "g": config.gate_rank}
    yield from _norm(f"{name}ln1", width)
    yield from _norm(f"{name}ln2", width)
    for key in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a"):
        yield f"{att}{key}", (width,)
    for key, rank in ranks.items():
        yield f"{att}{key}1", (width, rank)
        yield f"{att}{key}2", (rank, width)
    yield f"{att}r_k", (config.heads, config.head_size)
    for key in ("receptance", "key", "value", "output"):
        yield f"{att}{key}.weight", (width, width)
    yield from _norm(f"{att}ln_x", width)
    yield f"{ffn}x_k", (width,)
    yield f"{ffn}key.weight", (config.ffn, width)
    yield f"{ffn}value.weight", (width, config.ffn)


def _norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _fits(found: Shape, wanted: Shape) -> bool:
    return found == wanted or (len(wanted) == 1 and found == (1, 1, *wanted))


def _mismatch(key: str, found: Shape | None, wanted: Shape | str | None, why: str = "") -> CheckpointError:
    def words(shape: Shape | str | None) -> str:
        return shape if isinstance(shape, str) else "no such tensor" if shape is None else str(list(shape))

    return CheckpointError(
        f"{key}: found {words(found)}, wanted {words(wanted)}{why} (the checkpoint looks like RWKV-7)"
    )


def _not_rwkv7(shapes: Shapes, version: str) -> CheckpointError:
    if not shapes:
        return CheckpointError(
            "emb.weight: found no tensor at all, wanted [vocabulary, width] (the file holds no model)"
        )
    pattern = next((pattern for pattern, name in _SIGNS if name == version), "")
    key = next(key for key in shapes if re.search(pattern, key))
    return CheckpointError(
        f"{key}: found {list(shapes[key])}, wanted no such tensor (the checkpoint looks like {version}; "
        "only RWKV-7 runs here, take an RWKV-7 .pth or .safetensors)"
    )
