"""Small RWKV-7 checkpoints of random weights in the published layout, the same bytes on every machine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """What a generated checkpoint looks like."""

    layers: int = 2
    width: int = 128
    ranks: tuple[int, int, int, int] = (32, 32, 16, 64)  # decay, in-context rate, value mix, gate
    ffn: int | None = None  # None: 4 * width
    vocab: int = 65536
    seed: int = 7


def tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors by published name. Every parameter is random, so that one which is left out or swapped shows."""
    random = np.random.RandomState(shape.seed)  # its stream is frozen by numpy, unlike default_rng's
    width, ffn = shape.width, shape.ffn or 4 * shape.width
    small = width**-0.5

    def normal(*size: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.from_numpy((random.standard_normal(size) * std + mean).astype(np.float32)).to(dtype)

    def uniform(*size: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.from_numpy(random.uniform(low, high, size).astype(np.float32)).to(dtype)

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(width, std=0.2, mean=1.0), f"{name}.bias": normal(width, std=0.1)}

    out = {"emb.weight": normal(shape.vocab, width, std=0.5), **norm("blocks.0.ln0")}
    for layer in range(shape.layers):
        block = f"blocks.{layer}."
        att, feed = f"{block}att.", f"{block}ffn."
        out |= norm(f"{block}ln1") | norm(f"{block}ln2") | norm(f"{att}ln_x")
        out |= {f"{att}x_{name}": uniform(1, 1, width) for name in "rwkvag"}
        for name, rank in zip("wavg", shape.ranks, strict=True):
            if name == "v" and layer == 0:
                continue
            if name != "g":
                out[f"{att}{name}0"] = normal(1, 1, width)
            out[f"{att}{name}1"] = normal(width, rank, std=small)
            out[f"{att}{name}2"] = normal(rank, width, std=rank**-0.5)
        out |= {f"{att}{name}": uniform(1, 1, width, low=0.5, high=1.5) for name in ("k_k", "k_a")}
        out[f"{att}r_k"] = normal(width // 64, 64, std=0.2)
        out |= {
            f"{att}{name}.weight": normal(width, width, std=small) for name in ("receptance", "key", "value", "output")
        }
        out[f"{feed}x_k"] = uniform(1, 1, width)
        out[f"{feed}key.weight"] = normal(ffn, width, std=small)
        out[f"{feed}value.weight"] = normal(width, ffn, std=ffn**-0.5)
    return out | norm("ln_out") | {"head.weight": normal(shape.vocab, width, std=2 * small)}


def write(shape: Shape, path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint as .pth or .safetensors, by the path's suffix, and return the path."""
    if path.suffix == ".pth":
        torch.save(tensors(shape, dtype), path)
    else:
        from safetensors.torch import save_file

        save_file(tensors(shape, dtype), path)
    return path


def write_byte_vocabulary(path: Path) -> Path:
    """Write a vocabulary of the 256 single bytes, ids 1 to 256, and return the path."""
    path.write_text("".join(f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256)), encoding="ascii")
    return path
