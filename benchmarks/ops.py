"""Every operator on the GPU beside its peers, and beside the least time that its bytes or operations take.

    python benchmarks/ops.py --only swish,host_gather                      # a table
    python benchmarks/ops.py --save benchmarks/results/h200_ops.json       # all of them; also draws the .png
    python benchmarks/ops.py --readme                                      # the table of ops/README.md from the JSON

What is measured stands in ``benchmarks/op_cases``. Both sides run in turns on the same inputs; no time is given unless
the result agrees with a reference. ``--save`` replaces the rows of the operators that ran and keeps the others.
"""

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from benchmarks import op_cases, ops_report  # noqa: E402
from benchmarks.op_cases import Case  # noqa: E402
from benchmarks.ops_timing import Timed, ceilings, side_by_side  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200_ops.json"
Row = dict[str, object]


def floor(case: Case, limits: dict[str, float]) -> float:
    """The least milliseconds that the case can take: its bytes, or its operations, at the card's best."""
    needs = [(case.bytes, "bytes"), (case.bus_bytes, "bus_bytes"), (case.flops, case.rate)]
    return max(amount / limits[name] for amount, name in needs if amount) * 1e3


def measure(case: Case, limits: dict[str, float], rounds: int, milliseconds: float) -> Iterator[Row]:
    """One row a peer. Raises SystemExit where the result is wrong."""
    name = f"{case.op} {'backward' if case.backward else 'forward'} {case.dtype} {case.shape}"
    error = case.error()
    if not error <= case.bound:
        raise SystemExit(f"{name}: the error is {error:.2e}, over {case.bound:.1e}; no time is given")
    sides = {"ours": Timed(case.ours, case.graph, milliseconds)}
    for peer, calls in case.peers.items():
        sides[peer] = Timed(calls, case.graph, milliseconds)
    times = side_by_side(sides, rounds)
    ours, least = times.pop("ours"), floor(case, limits)
    for peer, theirs in times.items():
        yield {
            "op": case.op,
            "pass": "backward" if case.backward else "forward",
            "dtype": str(case.dtype).removeprefix("torch."),
            "shape": case.shape,
            "ours_ms": _significant(ours),
            "peer": peer,
            "peer_ms": _significant(theirs),
            "ratio": round(theirs / ours, 3),
            "floor_ms": _significant(least),
            "share": round(least / ours, 3),
        }


def _significant(x: float) -> float:
    return float(f"{x:.4g}")


def all_cases(only: set[str], modules: set[str]) -> Iterator[Case]:
    """The cases of every file of ``op_cases``; ``only`` names operators, ``modules`` files, empty means all."""
    for found in pkgutil.iter_modules(op_cases.__path__):
        if modules and found.name not in modules:
            continue
        for case in importlib.import_module(f"benchmarks.op_cases.{found.name}").cases():
            if not only or case.op in only:
                yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators, with commas between")
    parser.add_argument("--cases", default="", help="files of op_cases, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a round of one side")
    parser.add_argument("--save", type=Path, help="merge the rows into this JSON file, and draw it beside")
    parser.add_argument("--readme", action="store_true", help="write the tables of ops/README.md and measure nothing")
    args = parser.parse_args()
    if args.readme:
        ops_report.write_readme(RESULTS, ROOT / "ops" / "README.md")
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/ops.py needs a CUDA device")
    limits = ceilings()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__};", {k: f"{v:.3g}/s" for k, v in limits.items()})
    rows: list[Row] = []
    for case in all_cases(set(filter(None, args.only.split(","))), set(filter(None, args.cases.split(",")))):
        for row in measure(case, limits, args.rounds, args.milliseconds):
            print(ops_report.line(row), flush=True)
            rows.append(row)
            if args.save:
                ops_report.merge(args.save, [row])
        del case
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    if args.save:
        ops_report.draw(args.save)
    print(json.dumps({"card": torch.cuda.get_device_name(), "rows": len(rows)}))


if __name__ == "__main__":
    main()
