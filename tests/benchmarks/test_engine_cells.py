"""The least time of a step, against figures that were worked out apart from this code."""

import pytest

from benchmarks import synth_rwkv7
from benchmarks.engine_cells import GOALS, Cell, cells_of, floor, goal, state_dtypes
from model.config import Config

# model, cell, milliseconds as printed, and with the state's traffic not hidden
FLOORS = [
    ("7.2b", "1x1", "2.30", None),
    ("7.2b", "8x1", "2.87", None),
    ("7.2b", "32x1", "3.39", None),
    ("7.2b", "128x1", "4.17", None),
    ("7.2b", "320x1", "6.54", "9.06"),
    ("7.2b", "960x1", "19.6", "27.2"),
    ("7.2b", "1x512", "10.1", None),
    ("7.2b", "1x1024", "20.1", None),
    ("7.2b", "1x4096", "80.5", None),
    ("7.2b", "16x256", "80.5", None),
    ("1.5b", "1x1", "0.48", None),
    ("1.5b", "32x1", "0.73", None),
    ("1.5b", "512x1", "2.15", "3.62"),
    ("1.5b", "1x4096", "15.2", None),
    ("0.4b", "1x1", "0.14", None),
    ("0.4b", "32x1", "0.22", None),
    ("0.4b", "512x1", "0.93", "1.34"),
    ("0.4b", "1x4096", "3.8", None),
]


def config(model: str) -> Config:
    layers, width, decay, a, v, gate = synth_rwkv7.SIZES[model]
    return Config(layers, width, width // 64, 64, 4 * width, 65536, decay, a, v, gate)


def printed(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize(("model", "cell", "want", "serial"), FLOORS)
def test_floor(model: str, cell: str, want: str, serial: str | None) -> None:
    found = floor(config(model), Cell.parse(cell))
    assert printed(found.ms, want) == want
    if serial is not None:
        assert printed(found.serial_ms, serial) == serial


def test_a_float32_state_is_twice_the_traffic() -> None:
    half, full = (floor(config("0.4b"), Cell(512, 1), dtype) for dtype in ("float16", "float32"))
    assert full.state_ms == 2 * half.state_ms
    assert full.bytes_ms == pytest.approx(half.bytes_ms + half.state_ms)
    assert full.flop_ms == half.flop_ms


def test_every_floor_is_of_a_cell_with_a_goal_above_it() -> None:
    assert {(model, cell) for model, cell, *_ in FLOORS} == {(m, str(c)) for m in GOALS for c in cells_of(m)}
    for model in GOALS:
        for cell in cells_of(model):
            for dtype in state_dtypes(cell):
                target = goal(model, cell, dtype)
                assert target is not None and target > floor(config(model), cell, dtype).ms


@pytest.mark.parametrize("text", ["8", "x1", "8x", "0x1", "1x0", "-1x1", "1x1x1", "ax1"])
def test_cells_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"cells: '{text}'"):
        Cell.parse(text)


def test_a_model_without_cells() -> None:
    with pytest.raises(ValueError, match="has no cells"):
        cells_of("9b")
