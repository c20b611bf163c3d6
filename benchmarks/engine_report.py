"""The rows of ``benchmarks/engine.py`` as JSON, as a picture and as the table of README.md."""

from collections.abc import Iterable
from pathlib import Path

from benchmarks import marks, result_rows, synth_rwkv7
from benchmarks.engine_cells import GOALS, Cell, cells_of, floor, goal, state_dtypes
from model.config import Config

Row = dict[str, object]
KEY = ("model", "B", "T", "weight_dtype", "state_dtype")
BEGIN, END = "<!-- python benchmarks/engine.py --readme -->", "<!-- end of benchmarks/engine.py -->"


def key(row: Row) -> tuple[object, ...]:
    """What tells a row from others."""
    return tuple(row[name] for name in KEY)


def merge(path: Path, rows: Iterable[Row]) -> None:
    """Put ``rows`` into the file, in the place of those with the same key; large models first, then by cell."""
    found = {key(row): row for row in [*result_rows.read(path), *rows]}
    models = list(GOALS)

    def order(row: Row) -> tuple[object, ...]:
        model = str(row["model"])
        return (models.index(model) if model in models else len(models), *key(row))

    result_rows.write(path, sorted(found.values(), key=order))


def sizes(model: str, vocab: int = 65536) -> Config:
    """The sizes of a generated checkpoint."""
    layers, width, decay, a, v, gate = synth_rwkv7.SIZES[model]
    return Config(layers, width, width // 64, 64, 4 * width, vocab, decay, a, v, gate)


def table(rows: list[Row]) -> str:
    """Every cell that has a goal, as Markdown; a dash where nothing was measured."""
    head = ["model", "B x T", "state", "ours, ms", "peer, ms", "floor, ms", "of the floor"]
    head += ["times as fast as the peer", "goal, ms", "tokens/s"]
    found = {key(row): row for row in rows}
    lines = []
    for model in GOALS:
        for cell in cells_of(model):
            for dtype in state_dtypes(cell):
                row = found.get((model, cell.batch, cell.tokens, "float16", dtype))
                lines.append(_line(model, cell, dtype, row))
    return marks.table(head, lines)


def _line(model: str, cell: Cell, dtype: str, row: Row | None) -> list[str]:
    target = goal(model, cell, dtype)
    least = float(str(row["floor_ms"])) if row else floor(sizes(model), cell, dtype).ms
    start, wanted = [model, str(cell), dtype], "" if target is None else f"{target:g}"
    if row is None:
        return [*start, "-", "-", f"{least:.3g}", "-", "-", wanted, "-"]
    ours = float(str(row["ours_ms"]))
    peer = "-" if row["peer_ms"] is None else f"{row['peer_ms']:g}"
    ratio = "-" if row["peer_ms"] is None else f"{float(str(row['peer_ms'])) / ours:.2f}"
    met = "" if target is None else " (met)" if ours <= target else " (missed)"
    measured = [f"{ours:g}", peer, f"{least:.3g}", f"{least / ours:.0%}", ratio]
    return [*start, *measured, wanted + met, f"{row['tokens_per_s']:,}"]


def write_readme(results: Path, readme: Path) -> None:
    """Replace what stands between the two marks in ``readme``. Raises ValueError where there are no marks."""
    marks.replace(readme, BEGIN, END, table(result_rows.read(results)))


def draw(path: Path) -> None:
    """A picture beside the JSON: time over floor, a panel a model; ours, the peer's and the goal at each cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result_rows.read(path)
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    figure, panels = pyplot.subplots(1, len(models), figsize=(1.5 + 4.5 * len(models), 4.5), squeeze=False, sharey=True)
    for panel, model in zip(panels[0], models, strict=True):
        _draw_model(panel, model, [row for row in rows if row["model"] == model])
    panels[0][0].set_ylabel("time / floor")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)


def _draw_model(panel, model: str, rows: list[Row]) -> None:  # type: ignore[no-untyped-def]  # matplotlib's Axes
    names: list[str] = []
    sides: dict[str, tuple[str, list[tuple[int, float]]]] = {"ours": ("o", []), "peer": ("s", []), "goal": ("_", [])}
    for at, row in enumerate(rows):
        cell, dtype = Cell(int(str(row["B"])), int(str(row["T"]))), str(row["state_dtype"])
        names.append(f"{cell}{' f32' if dtype == 'float32' else ''}")
        times = {"ours": row["ours_ms"], "peer": row["peer_ms"], "goal": goal(model, cell, dtype)}
        for side, ms in times.items():
            if ms is not None:
                sides[side][1].append((at, float(str(ms)) / float(str(row["floor_ms"]))))
    for side, (marker, points) in sides.items():
        if points:
            panel.plot(*zip(*points, strict=True), marker, label=side, markersize=12 if side == "goal" else 6)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_yscale("log")
    panel.set_title(model)
    panel.set_xticks(range(len(names)), names, rotation=60)
    panel.grid(axis="y", which="both", alpha=0.3)
    panel.legend(fontsize=8)
