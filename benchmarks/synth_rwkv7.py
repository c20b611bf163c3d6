"""Write an RWKV-7 checkpoint of random weights in the published .pth layout, of a published size.

Speed does not depend on the values, save for one thing: engines that skip the zeros of relu(x)^2 in channel mix need a
realistic share of zeros, so ln2.bias pushes the keys negative until about ``--active`` of them stay positive.
"""

import argparse
import math

import torch
from torch import Tensor

SIZES = {  # layers, width, low ranks of decay, in-context rate, value mix, gate
    "0.1b": (12, 768, 64, 64, 32, 128),
    "0.4b": (24, 1024, 64, 64, 32, 128),
    "1.5b": (24, 2048, 96, 96, 64, 256),
    "2.9b": (32, 2560, 96, 96, 64, 320),
    "7.2b": (32, 4096, 128, 128, 96, 480),
    "13.3b": (61, 4096, 192, 192, 128, 384),
}
LN2_BIAS = 0.5


class Draw:
    """Random bfloat16 tensors from one seed, drawn on the GPU where there is one."""

    def __init__(self, seed: int = 0) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.random = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """N(0, std^2), of `shape`, on the CPU."""
        drawn = torch.randn(*shape, generator=self.random, device=self.device)
        return (drawn * std).to(torch.bfloat16).cpu()

    def uniform(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), of `shape`, on the CPU."""
        return torch.rand(*shape, generator=self.random, device=self.device).to(torch.bfloat16).cpu()

    def channel_key(self, width: int, active: float) -> Tensor:
        """Keys that are N(-m, 1) before the ReLU, so that P(key > 0) = active, independently for each neuron."""
        m = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - 2 * active)))
        w = torch.randn(4 * width, width, generator=self.random, device=self.device) / math.sqrt(width)
        # Without this the bias of ln2 gives every neuron an offset of its own, and rows share their active neurons.
        w -= w.mean(1, keepdim=True)
        return (w - m / (LN2_BIAS * width)).to(torch.bfloat16).cpu()


def ones(width: int) -> Tensor:
    """bfloat16 [width], all 1."""
    return torch.ones(width, dtype=torch.bfloat16)


def norm(name: str, width: int, bias: float = 0.0) -> dict[str, Tensor]:
    """Weight 1 and the one `bias` of a layer norm or group norm, bfloat16 [width] each, by published name."""
    return {f"{name}.weight": ones(width), f"{name}.bias": ones(width) * bias}


def time_mix(draw: Draw, att: str, width: int, ranks: tuple[int, ...], first: bool) -> dict[str, Tensor]:
    """The ``att.`` tensors of one layer."""
    std = 1 / math.sqrt(width)
    out = {f"{att}x_{name}": draw.uniform(1, 1, width) for name in "rwkvag"}
    for name, rank in zip("wavg", ranks, strict=True):
        if name == "v" and first:
            continue
        if name != "g":
            out[f"{att}{name}0"] = draw.normal(1, 1, width, std=1.0 if name == "w" else 0.5) - (3 if name == "w" else 0)
        out[f"{att}{name}1"] = draw.normal(width, rank, std=std)
        out[f"{att}{name}2"] = draw.normal(rank, width, std=0.1)
    out[f"{att}k_k"], out[f"{att}k_a"] = draw.uniform(1, 1, width) + 0.5, draw.uniform(1, 1, width)
    out[f"{att}r_k"] = draw.normal(width // 64, 64, std=0.1)
    for name in ("receptance", "key", "value", "output"):
        out[f"{att}{name}.weight"] = draw.normal(width, width, std=std)
    return out | norm(f"{att}ln_x", width)


def checkpoint(size: str, active: float = 0.12, vocab: int = 65536) -> dict[str, Tensor]:
    """All tensors of a checkpoint of ``size``, by published name."""
    layers, width, *ranks = SIZES[size]
    draw = Draw()
    out = {"emb.weight": draw.normal(vocab, width, std=0.02), **norm("blocks.0.ln0", width)}
    for layer in range(layers):
        block = f"blocks.{layer}."
        out |= norm(f"{block}ln1", width) | norm(f"{block}ln2", width, bias=LN2_BIAS)
        out |= time_mix(draw, f"{block}att.", width, tuple(ranks), first=layer == 0)
        out[f"{block}ffn.x_k"] = torch.zeros(1, 1, width, dtype=torch.bfloat16)
        out[f"{block}ffn.key.weight"] = draw.channel_key(width, active)
        out[f"{block}ffn.value.weight"] = draw.normal(width, 4 * width, std=0.5 / math.sqrt(width))
    return out | norm("ln_out", width) | {"head.weight": draw.normal(vocab, width, std=1 / math.sqrt(width))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out")
    parser.add_argument("--active", type=float, default=0.12, help="share of channel-mix neurons active for a token")
    parser.add_argument("--vocab", type=int, default=65536)
    args = parser.parse_args()
    tensors = checkpoint(args.size, args.active, args.vocab)
    torch.save(tensors, args.out)
    print(f"{args.size}: {sum(t.numel() for t in tensors.values()):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
