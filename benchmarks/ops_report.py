"""The rows of ``benchmarks/ops.py`` as JSON, as a picture and as the tables of ops/README.md."""

from pathlib import Path

from benchmarks import marks, result_rows

Row = dict[str, object]
KEY = ("op", "pass", "dtype", "shape", "peer")
ALONE = "-"  # the peer of a row that has none
BEGIN, END = "<!-- benchmarks/ops.py --readme -->", "<!-- end -->"


def key(row: Row) -> tuple[object, ...]:
    """What the row is of: one place in the results."""
    return tuple(row[name] for name in KEY)


def line(row: Row) -> str:
    """One row for the terminal; of a peer that does not count, why."""
    what = f"{row['op']:>18} {row['pass']:8} {row['dtype']:8} {row['shape']:24}"
    if "why" in row:
        return f"{what} {row['peer']} does not count: {row['why']}"
    ours = f"{what} {row['ours_ms']:>9} ms  {row['share']:>6.1%} of the floor"
    return ours if row["peer"] == ALONE else f"{ours}  x{row['ratio']:<7} {row['peer']} {row['peer_ms']} ms"


def merge(path: Path, rows: list[Row]) -> None:
    """Put ``rows`` into the file, in the place of rows for the same thing; one without a peer is for want of others."""
    found = {key(row): row for row in [*result_rows.read(path), *rows]}
    compared = {place[:-1] for place in found if place[-1] != ALONE}
    kept = [row for place, row in found.items() if place[-1] != ALONE or place[:-1] not in compared]
    order = sorted(kept, key=lambda row: (row["op"], row["pass"] == "backward"))
    result_rows.write(path, order)


def draw(path: Path) -> None:
    """A picture beside the JSON: the share of the floor and the speed over each peer, a row an operator's pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result_rows.read(path)
    names = sorted({(row["op"], row["pass"]) for row in rows}, key=str, reverse=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 1 + 0.33 * len(names)), sharey=True)
    peers = sorted({str(row["peer"]) for row in rows} - {ALONE})
    for row in rows:
        at = names.index((row["op"], row["pass"]))
        left.plot(row["share"], at, "o", color="tab:blue", alpha=0.5)
        if row["peer"] != ALONE:
            right.plot(row["ratio"], at, "o", color=f"C{peers.index(str(row['peer'])) % 10}", alpha=0.6)
    left.set_yticks(range(len(names)), [f"{op} {which}" for op, which in names])
    left.set_xlabel("least possible time / our time")
    left.set_xlim(0, 1.1)
    right.set_xscale("log")
    ratios = [float(str(row["ratio"])) for row in rows if row["peer"] != ALONE] or [1.0]
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(ratios) / 2 <= t <= max(ratios) * 2]
    right.set_xticks(ticks, [str(t) for t in ticks])
    right.set_xticks([], minor=True)
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xlabel("a peer's time / our time")
    for i, peer in enumerate(peers):
        right.plot([], [], "o", color=f"C{i % 10}", label=peer)
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    head = ["operator", "pass", "dtype", "size", "ours, ms", "of the floor", "peer", "peer, ms", "times as fast"]
    cells = []
    for r in rows:
        ours = [f"`{r['op']}`", r["pass"], r["dtype"], r["shape"], r["ours_ms"], f"{r['share']:.0%}"]
        cells.append([ALONE if cell is None else str(cell) for cell in [*ours, r["peer"], r["peer_ms"], r["ratio"]]])
    return marks.table(head, cells)


def write_readme(results: Path, readme: Path) -> None:
    """Replace what stands between the two marks in ``readme``. Raises ValueError where there are no marks."""
    marks.replace(readme, BEGIN, END, table(result_rows.read(results)))
