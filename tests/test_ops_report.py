"""What benchmarks/ops.py makes of its rows."""

from pathlib import Path

import pytest

from benchmarks import ops_report, result_rows


def row(op: str, ours: float = 1.0, **change: object) -> ops_report.Row:
    times = {"ours_ms": ours, "peer_ms": 2.0, "ratio": 2.0 / ours, "floor_ms": 0.5, "share": 0.5 / ours}
    return {"op": op, "pass": "forward", "dtype": "float16", "shape": "N=3", "peer": "torch"} | times | change


def test_new_rows_take_the_place_of_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    ops_report.merge(path, [row("b"), row("a"), row("a", **{"pass": "backward"})])
    ops_report.merge(path, [row("a", ours=4.0), row("a", peer="copy")])
    found = [(r["op"], r["pass"], r["peer"], r["ours_ms"]) for r in result_rows.read(path)]
    assert found == [
        ("a", "forward", "torch", 4.0),
        ("a", "forward", "copy", 1.0),
        ("a", "backward", "torch", 1.0),
        ("b", "forward", "torch", 1.0),
    ]


def test_a_row_without_a_peer_stands_until_there_is_one_with(tmp_path: Path) -> None:
    path, readme = tmp_path / "rows.json", tmp_path / "README.md"
    alone = {"peer": ops_report.ALONE, "peer_ms": None, "ratio": None}
    ops_report.merge(path, [row("a", **alone), row("b", **alone)])
    assert "peer" not in ops_report.line(row("a", **alone)) and "50.0% of the floor" in ops_report.line(
        row("a", **alone)
    )
    ops_report.merge(path, [row("a")])
    ops_report.merge(path, [row("a", **alone)])
    assert [(r["op"], r["peer"]) for r in result_rows.read(path)] == [("a", "torch"), ("b", "-")]
    readme.write_text(f"{ops_report.BEGIN}\n{ops_report.END}\n")
    ops_report.write_readme(path, readme)
    assert "| `b` | forward | float16 | N=3 | 1.0 | 50% | - | - | - |" in readme.read_text().splitlines()


def test_the_table_stands_between_the_marks(tmp_path: Path) -> None:
    results, readme = tmp_path / "rows.json", tmp_path / "README.md"
    ops_report.merge(results, [row("swish", ours=0.625)])
    readme.write_text(f"before\n{ops_report.BEGIN}\nold\n{ops_report.END}\nafter\n")
    for _ in range(2):
        ops_report.write_readme(results, readme)
        lines = readme.read_text().splitlines()
        assert lines[:2] == ["before", ops_report.BEGIN]
        assert lines[4:] == [
            "| `swish` | forward | float16 | N=3 | 0.625 | 80% | torch | 2.0 | 3.2 |",
            ops_report.END,
            "after",
        ]
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        ops_report.write_readme(results, readme)


def test_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ops_report.merge(tmp_path / "rows.json", [row("swish"), row("swish", peer="copy"), row("add")])
    ops_report.merge(tmp_path / "rows.json", [row("alone", peer=ops_report.ALONE, peer_ms=None, ratio=None)])
    ops_report.draw(tmp_path / "rows.json")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
