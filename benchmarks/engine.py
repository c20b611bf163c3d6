"""The model's speed on a GPU, cell by cell, beside the fastest public engine and the least time that is possible.

    python benchmarks/engine.py --model 1.5b                             # all cells, ours and the peer's
    python benchmarks/engine.py --model 1.5b --cells 1x1,32x1 --no-peer  # a few of them, ours only
    python benchmarks/engine.py --readme                                 # the table of README.md from the JSON

One step is one forward of B sequences x T tokens, from ids to the logits of the last tokens, with a generated
checkpoint in float16: the median of 20 or more replays of a CUDA graph. No time is given unless the logits of the same
cell agree with a float64 forward (see engine_gate.py). Rows go into benchmarks/results/h200.json, in the place of rows
of the same cell. The exit code is 1 where a gate is red, or where a step launches more than the row before it said.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from benchmarks import engine_peer, engine_report, result_rows, synth_rwkv7  # noqa: E402
from benchmarks.engine_cells import Cell, cells_of, floor, state_dtypes  # noqa: E402
from benchmarks.engine_gate import Gated, cut  # noqa: E402
from benchmarks.engine_step import Repeated, Step, Timer, free, measure  # noqa: E402
from model import checkpoint  # noqa: E402
from model.checkpoint import Checkpoint  # noqa: E402
from model.rwkv7 import RWKV7  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
WEIGHT_DTYPE = torch.float16
FULL_DEPTH = (Cell(1, 1), Cell(1, 512))
PEER_SECONDS = 30.0  # less than that is not worth starting the peer for
Row = engine_report.Row


def say(line: str) -> None:
    """To stderr at once: the last line of stdout is a JSON object."""
    print(line, file=sys.stderr, flush=True)


class Clock:
    """What is left of the time that the command may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once it is over."""
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Work:
    """What is measured: one model, its cells, and how."""

    model: str
    cells: list[Cell]
    device: torch.device
    tuned: bool
    vocab: int
    commit: str


def write_weights(work: Work, folder: Path) -> Path:
    """The generated checkpoint, which is made where ``folder`` lacks it."""
    path = folder / f"{work.model}-{work.vocab}.pth"
    if not path.exists():
        begin = time.monotonic()
        torch.save(synth_rwkv7.checkpoint(work.model, vocab=work.vocab), path)
        say(f"made {path.name}: {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s")
    return path


def load_model(work: Work, found: Checkpoint) -> RWKV7:
    """The checkpoint on the device."""
    options = {"tuned": True} if work.tuned else {}
    return RWKV7.load(found, work.device, WEIGHT_DTYPE, progress=False, **options)


def time_setup(work: Work, path: Path) -> tuple[RWKV7, dict[str, float]]:
    """The model, with the speed of loading it from the page cache, and its first step beside later ones."""
    timer, loaded = Timer(work.device), []
    load = timer.wall(lambda: loaded.append(load_model(work, checkpoint.load(path))))
    step = Step(loaded[0], Cell(1, 1), torch.float32)
    first, *others = [timer.wall(step.run) for _ in range(6)]
    found = {"load_gb_per_s": path.stat().st_size / load / 1e6, "first_ms": first, "steady_ms": sorted(others)[2]}
    say(
        f"weights loaded with {found['load_gb_per_s']:.2f} GB/s ({load / 1e3:.2f} s); first step after setup "
        f"{first:.2f} ms, later ones {found['steady_ms']:.2f} ms, launched one by one, by the host's clock"
    )
    return loaded[0], found


def measure_cell(work: Work, model: RWKV7, small: Gated, cell: Cell, state: str) -> Row | None:
    """The row of a cell without the peer; None where the gate is red, which is said."""
    dtype, name = getattr(torch, state), f"{work.model} {cell} {state}"
    gate = small.check(cell, dtype)
    free()
    if not gate.ok:
        say(f"{name}: {gate}; no time is given")
        return None
    step = Step(model, cell, dtype)
    repeated = Repeated(step)
    if repeated.problem:
        say(f"{name}: no graph, timed as it is launched: {repeated.problem}")
    step.begin()
    repeated.poison()
    if not torch.isfinite(repeated()).all():
        say(f"{name}: logits that are not finite; no time is given")
        return None
    times, least = measure(repeated, Timer(work.device)), floor(model.config, cell, state)
    serial = f" (serial {least.serial_ms:.3g})" if least.serial_ms > 1.01 * least.ms else ""
    say(
        f"{name}: {times.ms:.4g} ms, spread {times.spread:.1%} of {times.count}, floor {least.ms:.3g}{serial}, "
        f"{least.ms / times.ms:.0%} of it, {repeated.launches} launches; {gate}"
    )
    return {
        "model": work.model,
        "B": cell.batch,
        "T": cell.tokens,
        "weight_dtype": "float16",
        "act_dtype": "float16" if work.tuned else "float32",  # between the operators
        "state_dtype": state,
        "ours_ms": significant(times.ms),
        "spread": significant(times.spread),
        "peer": None,
        "peer_ms": None,
        "peer_state_dtype": None,
        "floor_ms": significant(least.ms),
        "tokens_per_s": round(cell.size / times.ms * 1e3),
        "launches": repeated.launches,
        "gate": {"error": significant(gate.error), "plain_error": significant(gate.plain_error), "ok": gate.ok},
        "commit": work.commit,
    }


def significant(x: float) -> float:
    """Four digits."""
    return float(f"{x:.4g}")


def commit() -> str:
    """The commit of this checkout, with a + where files differ from it; unknown where git knows none."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure_ours(work: Work, path: Path, clock: Clock) -> Iterator[Row | None]:
    """A row a cell and precision of the state; None for one whose gate is red."""
    found = checkpoint.load(path)
    model, _ = time_setup(work, path)
    whole = Gated(found, model)
    for cell in FULL_DEPTH:
        gate = whole.check(cell, torch.float16)
        say(f"{work.model} {cell} at full depth: {gate}")
        if not gate.ok:
            yield None
            return
    del whole
    free()
    found = cut(found)
    small = Gated(found, load_model(work, found))
    for cell in work.cells:
        for state in state_dtypes(cell):
            if clock.left < 0:
                say(f"{work.model} {cell} {state}: left out, the time is over")
                continue
            yield measure_cell(work, model, small, cell, state)
            free()


def more_launches(row: Row, before: list[Row]) -> str | None:
    """What to say where a cell launches more than the row ``before`` said; None where it does not."""
    old = {engine_report.key(one): one["launches"] for one in before}.get(engine_report.key(row))
    if isinstance(row["launches"], int) and isinstance(old, int) and row["launches"] > old:
        return f"{row['model']} {row['B']}x{row['T']} {row['state_dtype']}: {row['launches']} launches, before {old}"
    return None


def add_peer(rows: list[Row], peer: engine_peer.Peer, path: Path, variants: list[str], clock: Clock) -> None:
    """Put the peer's times into ``rows``."""
    if problem := peer.compiled(clock.left):
        say(problem)
        return
    cells = list(dict.fromkeys(Cell(int(str(row["B"])), int(str(row["T"]))) for row in rows))
    runs = []
    for variant in variants:
        if clock.left < PEER_SECONDS:
            say(f"peer ({variant}): left out, the time is over")
            continue
        runs.append(peer.run(path, cells, variant, clock.left))
        say(f"peer ({variant}): " + ", ".join(f"{cell} {ms:.4g} ms" for cell, ms in runs[-1].items()))
    times = engine_peer.best(runs)
    for row in rows:
        ms = times.get(Cell(int(str(row["B"])), int(str(row["T"]))))
        if ms is not None:
            named = {"peer": engine_peer.name(peer.folder), "peer_state_dtype": engine_peer.STATE_DTYPE}
            row |= {**named, "peer_ms": significant(ms)}


def run(args: argparse.Namespace) -> int:
    """Measure and report; the exit code."""
    clock, device = Clock(args.seconds), torch.device(args.device)
    work = Work(args.model, args.cells, device, args.kernels == "tuned", args.vocab, args.commit or commit())
    folder = None if args.no_peer else engine_peer.find(args.peer_folder)
    if folder is None and not args.no_peer:
        say(engine_peer.HOW_TO_GET)
    say(f"{card(device)}, torch {torch.__version__}, {args.kernels} kernels, commit {work.commit}")
    with tempfile.TemporaryDirectory() as temporary:
        keep = args.keep or Path(temporary)
        keep.mkdir(parents=True, exist_ok=True)
        peer = None if folder is None else engine_peer.Peer(folder, keep / "peer-kernels")
        try:
            if peer is not None:
                peer.start_compiling()  # on the CPU, beside our own part
            path = write_weights(work, keep)
            free()
            rows, wrong = ours_and_peer(args, work, path, peer, clock)
        finally:
            if peer is not None:
                peer.stop()
    for line in wrong:
        say(f"FAILED: {line}")
    print(json.dumps({"card": card(device), "kernels": args.kernels, "rows": rows, "failed": wrong}))
    return int(bool(wrong))


def ours_and_peer(
    args: argparse.Namespace, work: Work, path: Path, peer: engine_peer.Peer | None, clock: Clock
) -> tuple[list[Row], list[str]]:
    """The rows, saved as they come, and what went wrong. A row with more launches than before is not saved."""
    save = where_to_save(args, card(work.device))
    before = result_rows.read(save) if save else []
    rows: list[Row] = []
    wrong: list[str] = []
    for row in measure_ours(work, path, clock):
        more = None if row is None or args.more_launches else more_launches(row, before)
        if row is None:
            wrong.append("a gate is red")
        elif more is not None:
            wrong.append(f"{more}; --more-launches takes it")
        else:
            rows.append(row)
            if save:
                engine_report.merge(save, [row])
    free()
    if peer is not None and rows:
        add_peer(rows, peer, path, args.peer_variants.split(","), clock)
    if rows and save:
        engine_report.merge(save, rows)
        engine_report.draw(save)
    return rows, wrong


def where_to_save(args: argparse.Namespace, name: str) -> Path | None:
    """The file of rows: the one that was named, or that of the card."""
    if args.no_save or args.save is not None:
        return None if args.no_save else args.save
    if "H200" in name:
        return RESULTS
    say(f"nothing is saved: {RESULTS.name} is for another card than {name}; name a file with --save")
    return None


def card(device: torch.device) -> str:
    """What the device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=synth_rwkv7.SIZES, help="size of the generated checkpoint")
    parser.add_argument("--cells", default="", help="BxT, with commas between; default: those that have goals")
    parser.add_argument("--kernels", choices=("plain", "tuned"), default="tuned", help="of our side")
    parser.add_argument("--no-peer", action="store_true", help="measure our side only")
    parser.add_argument("--peer-folder", type=Path, help=f"where {engine_peer.SCRIPT} is; default: where pip put it")
    parser.add_argument("--peer-variants", default=",".join(engine_peer.VARIANTS), help="of these the better counts")
    parser.add_argument("--seconds", type=float, default=520, help="begin nothing new after this time")
    parser.add_argument("--keep", type=Path, help="folder for weights and the peer's kernels; default: a temporary one")
    parser.add_argument("--save", type=Path, help="merge the rows into this JSON file and draw it; default: the card's")
    parser.add_argument("--no-save", action="store_true", help="write no file")
    parser.add_argument("--more-launches", action="store_true", help="take rows that launch more than those before")
    parser.add_argument("--commit", help="what the rows call the state of the code; default: git's word for it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--readme", action="store_true", help="write the table of README.md and measure nothing")
    args = parser.parse_args(arguments)
    if not args.readme and args.model is None:
        parser.error("--model is needed")
    try:
        if not args.readme:
            args.cells = [Cell.parse(text) for text in args.cells.split(",")] if args.cells else cells_of(args.model)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.peer_variants.split(",")) - set(engine_peer.VARIANTS):
        parser.error(f"--peer-variants: {', '.join(sorted(unknown))} is none of {', '.join(engine_peer.VARIANTS)}")
    return args


def main() -> int:
    args = parse()
    if args.readme:
        engine_report.write_readme(RESULTS, ROOT / "README.md")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/engine.py: no CUDA device; --device cpu goes the same way, with other numbers")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
