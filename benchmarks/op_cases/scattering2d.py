"""scattering2d beside kymatio 0.3.0 (torch backend), forward and backward."""

import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.op_cases import Case, numbers
from cog_rwkv_ops import scattering2d

# Images, side, J; L = 8
SIZES = [((128, 3), 32, 2), ((64, 1), 224, 3)]
Transform = Callable[[Tensor], Tensor]


def kymatio(j: int, side: int) -> Transform:
    """The peer's transform, on the GPU."""
    # For its 3-D transform, which is not used here, it imports a name that scipy has dropped since.
    special = importlib.import_module("scipy.special")
    if not hasattr(special, "sph_harm"):
        special.sph_harm = None  # type: ignore[attr-defined]
    made: Transform = importlib.import_module("kymatio.torch").Scattering2D(j, (side, side), L=8).cuda()
    return made


def gradient(transform: Transform, x: Tensor) -> Tensor:
    """Of the sum of the squares of the coefficients; the forward is part of the time."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(transform(given).square().sum(), given)
    return found


def cases() -> Iterator[Case]:
    """Both sizes of the article's comparison. Launches are part of the time."""
    for batch, side, j in SIZES:
        x = numbers(*batch, side, side, dtype=torch.float32, seed=1).abs()
        peer = kymatio(j, side)

        def ours(x: Tensor, j: int = j) -> Tensor:
            return scattering2d(x, j)

        wanted = peer(x)
        pairs: list[tuple[bool, Transform, Transform]] = [
            (False, ours, peer),
            (True, lambda x, f=ours: gradient(f, x), lambda x, f=peer: gradient(f, x)),  # type: ignore[misc]
        ]
        for backward, mine, theirs in pairs:
            right = theirs(x)
            yield Case(
                op="scattering2d",
                backward=backward,
                dtype=torch.float32,
                shape=f"{batch[0]}x{batch[1]}x{side}x{side} J={j} L=8",
                ours=[lambda f=mine, x=x: f(x)],  # type: ignore[misc]
                peers={"kymatio": [lambda f=theirs, x=x: f(x)]},  # type: ignore[misc]
                error=lambda f=mine, x=x, right=right: float((f(x) - right).abs().max() / right.abs().max()),  # type: ignore[misc]
                bound=1e-4 if backward else 1e-5,
                bytes=4 * (x.numel() + wanted.numel() * (2 if backward else 1)),
                graph=False,
            )
