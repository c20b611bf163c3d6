"""Every operator on the GPU beside its peers, and beside the least time that its bytes or operations take.

    python benchmarks/ops.py --only swish,host_gather                      # a table
    python benchmarks/ops.py --cases wkv --peers rwkv-ops,rwkvserve        # beside these packages alone
    python benchmarks/ops.py --save benchmarks/results/h200_ops.json       # all of them; also draws the .png
    python benchmarks/ops.py --skip-measured --budget 130 --save ...       # on with what that file does not have
    python benchmarks/ops.py --only wkv7 --peers flash-linear-attention --configurations 8   # it is tuned over hundreds
    python benchmarks/ops.py --readme                                      # the table of ops/README.md from the JSON

What is measured stands in ``benchmarks/op_cases``. Both sides run in turns on the same inputs; no time is given unless
the result agrees with a reference. ``--save`` replaces the rows of what was measured and keeps the others.

Peers are made, and those of other packages checked, in the same run, each within ``--seconds``; one that is missing,
wrong or too slow to make gets a line and a place in ``not_counted`` of the last line, and the run goes on; where none
is left, ours has a row alone. Only what breaks the CUDA context itself ends the run; the rows before it are saved.
script/bench-peers gets the packages.
"""

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from benchmarks import op_cases, ops_report, result_rows, triton_tuning  # noqa: E402
from benchmarks.op_cases import Case, Missing, Peer  # noqa: E402
from benchmarks.ops_timing import Timed, ceilings, side_by_side, time_limit  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200_ops.json"
Row = dict[str, object]


def floor(case: Case, limits: dict[str, float]) -> float:
    """The least milliseconds that the case can take: its bytes, or its operations, at the card's best."""
    needs = [(case.bytes, "bytes"), (case.bus_bytes, "bus_bytes"), (case.flops, case.rate)]
    return max(amount / limits[name] for amount, name in needs if amount) * 1e3


def measure(
    case: Case, limits: dict[str, float], options: argparse.Namespace, skip: Callable[[Row], bool] = lambda row: False
) -> Iterator[Row]:
    """One row a peer, or one without; of a peer that does not count, why. Raises SystemExit where ours is wrong.

    Nothing where ``skip`` leaves none of the peers: it sees the row as far as it is known.
    """
    what: Row = {
        "op": case.op,
        "pass": "backward" if case.backward else "forward",
        "dtype": str(case.dtype).removeprefix("torch."),
        "shape": case.shape,
    }
    makers = {peer: make for peer, make in chosen_peers(case, options).items() if not skip(what | {"peer": peer})}
    if not makers and (case.peers or case.packages):
        return
    name = f"{case.op} {'backward' if case.backward else 'forward'} {case.dtype} {case.shape}"
    error = case.error()
    if not error <= case.bound:
        raise SystemExit(f"{name}: the error is {error:.2e}, over {case.bound:.1e}; no time is given")
    sides = {"ours": Timed(case.ours, case.graph, options.milliseconds)}
    for peer, make in makers.items():
        try:
            with time_limit(options.seconds):
                sides[peer] = make()
        except Exception as reason:  # whatever a peer raises is the peer's, and does not stop the run
            yield what | {"peer": peer, "why": why(reason)}
            torch.cuda.synchronize()
    times = side_by_side(sides, options.rounds)
    ours, least = times.pop("ours"), floor(case, limits)
    for peer, theirs in times.items() or [(ops_report.ALONE, None)]:
        yield what | {
            "ours_ms": _significant(ours),
            "peer": peer,
            "peer_ms": theirs and _significant(theirs),
            "ratio": theirs and round(theirs / ours, 3),
            "floor_ms": _significant(least),
            "share": round(least / ours, 3),
        }


def chosen_peers(case: Case, options: argparse.Namespace) -> dict[str, Callable[[], Timed]]:
    """What makes each peer of the case that ``--peers`` leaves, ready to be timed."""
    plain = {name: partial(Timed, calls, case.graph, options.milliseconds) for name, calls in case.peers.items()}
    packages = {name: partial(checked, make, case, options) for name, make in case.packages.items()}
    wanted = names(options.peers)
    return {name: make for name, make in (plain | packages).items() if not wanted or name in wanted}


def checked(make: Callable[[], Peer], case: Case, options: argparse.Namespace) -> Timed:
    """A package's kernels, ready to be timed. Raises what they raise, or ArithmeticError: wrong."""
    peer = make()
    error = peer.error()
    if not error <= peer.bound:
        raise ArithmeticError(f"its error is {error:.2e}, over {peer.bound:.1e}")
    return Timed(peer.calls, case.graph, options.milliseconds)


def why(reason: Exception) -> str:
    """Why a peer does not count, in a line."""
    if isinstance(reason, ImportError):
        reason = Missing(f"not installed: {reason}")
    return (str(reason) if isinstance(reason, Missing) else f"{type(reason).__name__}: {reason}").splitlines()[0]


class Skipped:
    """The peers that a run passes over: where their rows are known, and after one time that took too long."""

    def __init__(self, known: list[Row]) -> None:
        self._known = {ops_report.key(row) for row in known}
        self._late: set[tuple[object, object]] = set()

    def __call__(self, row: Row) -> bool:
        """Whether to pass over the peer of this row."""
        return ops_report.key(row) in self._known or (row["op"], row["peer"]) in self._late

    def note(self, row: Row) -> None:
        """A row that the run has made: what was not made within its time, is not begun anew at another size."""
        if str(row.get("why", "")).startswith(TimeoutError.__name__):
            self._late.add((row["op"], row["peer"]))


def names(given: str) -> set[str]:
    """Of an argument with commas between; none mean all."""
    return set(filter(None, given.split(",")))


def _significant(x: float) -> float:
    return float(f"{x:.4g}")


def all_cases(only: set[str], modules: set[str]) -> Iterator[Case]:
    """The cases of every file of ``op_cases``; ``only`` names operators, ``modules`` files, empty means all.

    Those of other operators are not made.
    """
    for found in pkgutil.iter_modules(op_cases.__path__):
        if not modules or found.name in modules:
            module = importlib.import_module(f"benchmarks.op_cases.{found.name}")
            for op in module.OPERATORS:
                if not only or op in only:
                    yield from module.cases(op)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators, with commas between")
    parser.add_argument("--cases", default="", help="files of op_cases, with commas between")
    parser.add_argument("--peers", default="", help="names of peers, with commas between; else all")
    parser.add_argument("--seconds", type=float, default=60.0, help="to make and check one peer")
    parser.add_argument("--configurations", type=int, help="that Triton kernels of peers try, at most; else all")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no other case begins")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a round of one side")
    parser.add_argument("--save", type=Path, help="merge the rows into this JSON file, and draw it beside")
    parser.add_argument("--skip-measured", action="store_true", help="pass over the peers whose rows that file has")
    parser.add_argument("--readme", action="store_true", help="write the tables of ops/README.md and measure nothing")
    args = parser.parse_args()
    if args.skip_measured and not args.save:
        parser.error("--skip-measured needs the file of --save")
    if args.readme:
        ops_report.write_readme(RESULTS, ROOT / "ops" / "README.md")
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/ops.py needs a CUDA device")
    if args.configurations:
        triton_tuning.try_at_most(args.configurations)
    begin, limits = time.monotonic(), ceilings()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__};", {k: f"{v:.3g}/s" for k, v in limits.items()})
    rows: list[Row] = []
    passed_over: list[Row] = []
    skip = Skipped(result_rows.read(args.save) if args.skip_measured else [])
    for case in all_cases(names(args.only), names(args.cases)):
        if time.monotonic() - begin > args.budget:
            print(f"{args.budget:.0f} s are over: not measured from {case.op} {case.shape} on")
            break
        for row in measure(case, limits, args, skip):
            print(ops_report.line(row), flush=True)
            skip.note(row)
            if "why" in row:
                passed_over.append(row)
                continue
            rows.append(row)
            if args.save:
                ops_report.merge(args.save, [row])
        del case
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    if args.save:
        ops_report.draw(args.save)
    print(json.dumps({"card": torch.cuda.get_device_name(), "rows": len(rows), "not_counted": passed_over}))


if __name__ == "__main__":
    main()
