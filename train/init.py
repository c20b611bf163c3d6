"""Start values and parameter groups, after the published RWKV-7 training recipe (arXiv:2503.14456, appendix)."""

import math

import torch
from torch import Tensor, nn

from .model import HEAD, RWKV7, Block


def orthogonal(weight: Tensor, gain: float) -> None:
    """Orthogonal start values of a [D, C] matrix, wider than high or not."""
    nn.init.orthogonal_(weight, gain=gain * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1])))


@torch.no_grad()
def initialise(model: RWKV7) -> None:
    """Sets every parameter; call with a seeded generator state."""
    width, layers = model.shape.width, model.shape.layers
    nn.init.uniform_(model.emb.weight, -1e-4, 1e-4)
    orthogonal(model.head.weight, 0.5)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        _time_mix(block, number, layers, width)
        _channel_mix(block, number, layers, width)


def _time_mix(block: Block, number: int, layers: int, width: int) -> None:
    """Mixes and decays differ by channel and layer, so that heads start with different memories."""
    mix, depth, late = block.att, number / max(1, layers - 1), 1 - number / layers
    channel = torch.arange(width) / width
    for name, power in zip("rwkvag", (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
        getattr(mix, f"x_{name}").copy_((1 - channel ** (power * late)).view(1, 1, -1))
    ramp = torch.arange(width) / (width - 1)
    zigzag = (torch.arange(width) % HEAD - (HEAD - 1) / 2) / ((HEAD - 1) / 2)
    zigzag = zigzag * zigzag.abs()
    mix.w0.copy_((-5.5 + 6 * ramp ** (1 + depth**0.3) + 2.5 * zigzag).view(1, 1, -1))
    mix.a0.copy_((-0.19 + 0.3 * zigzag + 0.4 * (ramp - 0.5)).view(1, 1, -1))
    for name in "wavg":
        if hasattr(mix, f"{name}2"):
            orthogonal(getattr(mix, f"{name}2"), 0.1)
    if hasattr(mix, "v0"):
        mix.v0.copy_((0.73 - 0.4 * (ramp - 0.5)).view(1, 1, -1))
    mix.k_k.copy_((0.71 - 0.1 * (ramp - 0.5)).view(1, 1, -1))
    mix.k_a.fill_(1.02)
    mix.r_k.fill_(-0.04)
    bound = width**-0.5
    for linear, scale in ((mix.receptance, 0.5), (mix.key, 0.05), (mix.value, 0.5), (mix.output, 0.0)):
        nn.init.uniform_(linear.weight, -scale * bound, scale * bound)
    mix.ln_x.weight.fill_(((1 + number) / layers) ** 0.7)


def _channel_mix(block: Block, number: int, layers: int, width: int) -> None:
    late = 1 - number / layers
    block.ffn.x_k.copy_((1 - (torch.arange(width) / width) ** (late**4)).view(1, 1, -1))
    nn.init.uniform_(block.ffn.key.weight, -0.5 * width**-0.5, 0.5 * width**-0.5)
    nn.init.zeros_(block.ffn.value.weight)


def parameter_groups(model: RWKV7, weight_decay: float) -> list[dict]:
    """Adam's groups: matrices decay, vectors and low ranks do not, the decay's bias learns twice as fast."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decays = name.endswith(".weight") and parameter.dim() == 2
        key = (2.0 if name.endswith("att.w0") else 1.0, weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [{"params": ps, "rate_scale": scale, "weight_decay": decay} for (scale, decay), ps in groups.items()]
