"""scattering2d beside kymatio 0.3.0 (torch backend), forward and backward."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.op_cases import Case, Peer, numbers
from cog_rwkv_ops import scattering2d
from cog_rwkv_ops.scattering2d.reference import scattering2d as definition

OPERATORS = ("scattering2d",)
# Images, side, J; L = 8
SIZES = [((128, 3), 32, 2), ((64, 1), 224, 3)]
Transform = Callable[[Tensor], Tensor]


def kymatio(j: int, x: Tensor) -> Transform:
    """The peer's transform, where x is. Raises ImportError where it is not installed."""
    # For its 3-D transform, which is not used here, it imports a name that scipy has dropped since.
    special = importlib.import_module("scipy.special")
    if not hasattr(special, "sph_harm"):
        special.sph_harm = None  # type: ignore[attr-defined]
    made: Transform = importlib.import_module("kymatio.torch").Scattering2D(j, x.shape[-2:], L=8).to(x.device)
    return made


def gradient(transform: Transform, x: Tensor) -> Tensor:
    """Of the sum of the squares of the coefficients; the forward is part of the time."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(transform(given).square().sum(), given)
    return found


def the_pass(backward: bool, transform: Transform) -> Transform:
    """What is measured of a transform."""
    return partial(gradient, transform) if backward else transform


def error(found: Transform, backward: bool, j: int, x: Tensor) -> float:
    """The largest, in shares of the largest value, of the first image against the definition in float64."""
    right = the_pass(backward, partial(definition, J=j))(x[:1].double())
    return float((found(x)[:1] - right).abs().max() / right.abs().max())


def peer(backward: bool, j: int, x: Tensor, bound: float) -> Peer:
    """kymatio's pass."""
    call = the_pass(backward, kymatio(j, x))
    return Peer([partial(call, x)], partial(error, call, backward, j, x), bound)


def cases(op: str) -> Iterator[Case]:
    """Both sizes of the article's comparison. Launches are part of the time."""
    for batch, side, j in SIZES:
        x = numbers(*batch, side, side, dtype=torch.float32, seed=1).abs()
        coefficients = scattering2d(x, j).numel()
        for backward in (False, True):
            call = the_pass(backward, partial(scattering2d, J=j))
            bound = 1e-4 if backward else 1e-5
            yield Case(
                op=op,
                backward=backward,
                dtype=torch.float32,
                shape=f"{batch[0]}x{batch[1]}x{side}x{side} J={j} L=8",
                ours=[partial(call, x)],
                peers={},
                packages={"kymatio": partial(peer, backward, j, x, bound)},
                error=partial(error, call, backward, j, x),
                bound=bound,
                bytes=4 * (x.numel() + coefficients * (2 if backward else 1)),
                graph=False,
            )
