"""Fewer of the configurations that packages written with Triton are tuned over.

flash-linear-attention tries hundreds for one problem, and compiles each: more than an hour of a CPU for each shape.
"""

from collections.abc import Sequence
from typing import Any

MOST_WARPS = 8  # more are hardly ever the best of a kernel with tiles of 64, and take the longest to compile


def spread(configurations: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of them, at equal distances, without those of more than 8 warps where others are left."""
    usual = [c for c in configurations if c.num_warps <= MOST_WARPS] or list(configurations)
    if len(usual) <= most:
        return usual
    return [usual[(2 * i + 1) * len(usual) // (2 * most)] for i in range(most)]


def try_at_most(most: int) -> None:
    """From now on, every kernel that is made with ``triton.autotune`` is tuned over at most so many configurations.

    To be called before the package is imported. Without Triton nothing happens.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    make = Autotuner.__init__

    def fewer(self: Any, fn: Any, names: Any, configurations: Sequence[Any], *rest: Any, **named: Any) -> None:
        make(self, fn, names, spread(configurations, most), *rest, **named)

    Autotuner.__init__ = fewer
