"""Which of a package's configurations are tried where not all are."""

import itertools
from dataclasses import dataclass

import pytest

from benchmarks.triton_tuning import spread


@dataclass(frozen=True)
class Configuration:
    number: int
    num_warps: int = 4


@pytest.mark.parametrize("most", (1, 3, 8))
def test_so_many_at_equal_distances(most: int) -> None:
    numbers = [c.number for c in spread([Configuration(i) for i in range(24)], most)]
    assert len(numbers) == most
    assert {b - a for a, b in itertools.pairwise(numbers)} <= {24 // most}
    assert numbers[0] == 23 - numbers[-1] or numbers[0] == 24 - numbers[-1]


def test_all_where_there_are_no_more() -> None:
    few = [Configuration(i) for i in range(3)]
    assert spread(few, 3) == few


def test_many_warps_are_left_out_unless_there_is_nothing_else() -> None:
    wide = [Configuration(i, 16) for i in range(4)]
    assert all(c.num_warps == 4 for c in spread([*wide, Configuration(9)], 8))
    assert spread(wide, 8) == wide
