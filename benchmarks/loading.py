"""How fast a server starts: the weights from the page cache to the device, and the first token after setup.

    python benchmarks/loading.py --model 7.2b --save benchmarks/results/h200_loading.json

A generated checkpoint is written, so that its file is in the page cache, and loaded as the server does it, float16
matrices on the device, --loads times. Then a service is built from it and the first token of its first requests is
timed, each with another prompt: the first comes after nothing but setup, the later ones are the steady state. The last
line is one JSON object, the row that --save puts in the place of the one of the same model.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

from benchmarks import result_rows, synth_rwkv7  # noqa: E402
from benchmarks.engine import card, commit, say, significant  # noqa: E402
from benchmarks.engine_step import Timer, free  # noqa: E402
from model import checkpoint  # noqa: E402
from model.rwkv7 import RWKV7  # noqa: E402
from model.sampling import SamplingParams  # noqa: E402
from model.service import Service  # noqa: E402
from model.settings import Settings  # noqa: E402

PROMPT = 32  # tokens
Row = dict[str, object]


def write_weights(model: str, folder: Path) -> Path:
    """The generated checkpoint, made where ``folder`` lacks it, and read once so that its pages are in memory."""
    path = folder / f"{model}-65536.pth"
    if not path.exists():
        torch.save(synth_rwkv7.checkpoint(model), path)
        free()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(16 << 20)
        while file.readinto(buffer):
            pass
    return path


def load_once(path: Path, device: torch.device) -> None:
    """Open the checkpoint and move it to the device, as Service.build does."""
    RWKV7.load(checkpoint.load(path), device, torch.float16, progress=False, tuned=True)


def first_tokens(service: Service, count: int) -> list[float]:
    """Milliseconds from the sending of a request to its first token, one request after the other."""
    random, times = torch.Generator().manual_seed(0), []
    for _ in range(count):
        prompt = torch.randint(1, 60000, (PROMPT,), generator=random).tolist()
        handle = service.engine.submit(prompt, SamplingParams(seed=0), 2)
        for _ in handle:
            pass
        if handle.first_token is None:
            raise SystemExit(f"benchmarks/loading.py: a request ended without a token: {handle.error}")
        times.append((handle.first_token - handle.submitted) * 1e3)
    return times


def measure(args: argparse.Namespace, path: Path) -> Row:
    """The row of the model."""
    device, timer, size = torch.device(args.device), Timer(torch.device(args.device)), path.stat().st_size
    seconds = []
    for _ in range(args.loads):
        seconds.append(timer.wall(lambda: load_once(path, device)) / 1e3)
        free()
        say(f"{size / 1e9:.2f} GB in {seconds[-1]:.3f} s: {size / seconds[-1] / 1e9:.1f} GB/s")
    begin = time.perf_counter()
    service = Service.build(Settings(weights=str(path), device=args.device))
    setup = time.perf_counter() - begin
    try:
        first, *later = first_tokens(service, 1 + args.requests)
    finally:
        service.engine.close()
    steady = statistics.median(later)
    say(f"setup {setup:.1f} s; first token after it {first:.2f} ms, then {steady:.2f} ms (at most {max(later):.2f})")
    return {
        "model": args.model,
        "bytes": size,
        "load_s": [significant(one) for one in seconds],
        "gb_per_s": significant(size / statistics.median(seconds) / 1e9),
        "setup_s": significant(setup),
        "first_token_ms": significant(first),
        "steady_first_token_ms": significant(steady),
        "card": card(device),
        "commit": commit(),
    }


def save(row: Row, path: Path) -> None:
    """Put the row into the JSON list of ``path``, in the place of the one of its model and card."""
    rows = result_rows.read(path)
    kept = [one for one in rows if (one["model"], one["card"]) != (row["model"], row["card"])]
    result_rows.write(path, [*kept, row])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=synth_rwkv7.SIZES, required=True, help="size of the generated checkpoint")
    parser.add_argument("--loads", type=int, default=3, help="how often the weights are loaded, at least once")
    parser.add_argument("--requests", type=int, default=20, help="after the first")
    parser.add_argument("--keep", type=Path, help="folder of the checkpoint; default: a temporary one")
    parser.add_argument("--save", type=Path, help="JSON file that the row goes to; default: none")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks/loading.py: no CUDA device; --device cpu goes the same way, with other numbers")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        row = measure(args, write_weights(args.model, folder))
    if args.save:
        save(row, args.save)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
