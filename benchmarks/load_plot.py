"""Draws the results of load tests: ``python benchmarks/load_plot.py benchmarks/results/h200_load.json``."""

import json
import sys
from pathlib import Path
from typing import Any

INTERVAL = 0.5  # seconds between the points of a throughput curve (load_stats.py)


def draw(results: Path) -> Path:
    """Write a PNG of the JSON list at ``results`` beside it, and return its path."""
    try:
        import matplotlib
    except ImportError:  # requirements-dev.txt has it; where results are made it may be missing
        print(f"no plot: matplotlib is not here; python {Path(__file__).name} {results} draws it", file=sys.stderr)
        return results
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for row in json.loads(results.read_text()):
        _row(axes, row)
    titles = ("time to first token", "time per output token", "output tokens per second")
    for axis, title, below in zip(axes, titles, ("s", "ms", "s since the first request"), strict=True):
        axis.set(title=title, xlabel=below)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    axes[2].set_ylim(bottom=0)
    axes[2].legend(fontsize="small", loc="lower right")
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _row(axes: Any, row: dict[str, Any]) -> None:
    label = f"{row['model']}, {row['streams']} streams over HTTP"
    for axis, name, unit in ((axes[0], "ttft_s", 1), (axes[1], "tpot_s", 1000)):
        values = row["curves"][name]
        shares = [n / (len(values) - 1) for n in range(len(values))]
        axis.plot([value * unit for value in values if value is not None], shares[-len(values) :], label=label)
    curve = row["curves"]["tokens_per_s"]
    (line,) = axes[2].plot([INTERVAL * (n + 0.5) for n in range(len(curve))], curve, label=label)
    axes[2].axvline(row["ramp_up_s"], color=line.get_color(), linestyle=":", label="its ramp-up ends")
    if row["engine_tokens_per_s"]:
        axes[2].axhline(row["engine_tokens_per_s"], color=line.get_color(), linestyle="--", label="the engine alone")


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
