"""A load test of the server: many clients at once over HTTP, and the engine's own speed beside it.

    python benchmarks/load.py --model embedded --streams 64 --seconds 600 --check --flat 0.01   # the soak, on a CPU
    python benchmarks/load.py --model 7.2b --streams 256 --engine                       # on a GPU
    python benchmarks/load.py --url http://localhost:5000 --rate 4                      # an open loop

Starts the real Cog server on this checkout, or uses the one at --url. In the closed loop each stream sends its next
request when one has ended; with --rate requests come at random, whatever has become of those before. Prompts, lengths
and seeds are drawn from --seed. --engine also sends the same requests to the engine without HTTP, before, in the same
run. --check asks for greedy replies, first each alone and then under load, and counts every other text as an error.
What is measured when: benchmarks/load_stats.py. The last line is one JSON object; --save puts it into a list of such,
in place of one of the same device, model and number of streams, and draws the list as a PNG beside it.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import load_client, load_engine, load_plot, result_rows, synth_rwkv7  # noqa: E402
from benchmarks.load_memory import Memory  # noqa: E402
from benchmarks.load_stats import Record, Window, summary  # noqa: E402
from benchmarks.load_work import Range, Work  # noqa: E402
from model import checkpoint  # noqa: E402
from model.settings import EMBEDDED_WEIGHTS  # noqa: E402
from script.server import CogServer  # noqa: E402

DISTINCT = 48  # different requests of --check
SETTINGS = r"COG_RWKV_(?!WEIGHTS|CACHE|CUDA)"
T = TypeVar("T")


def generate(size: str, path: Path) -> None:
    """Write a checkpoint of random weights, of a published size."""
    torch.save(synth_rwkv7.checkpoint(size), path)


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call it in a process of its own, which takes the memory of the device with it when it is gone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def over_http(options: argparse.Namespace, work: Work, url: str) -> tuple[list[Record], Window]:
    """The clients against the server at ``url``."""
    expected = load_client.single_runs(url, work) if options.check else {}
    return load_client.run(
        url,
        work,
        expected,
        streams=options.streams,
        rate=options.rate,
        seconds=options.seconds,
        processes=options.processes,
    )


def measure(options: argparse.Namespace, weights: Path) -> dict[str, Any]:
    """One row: the engine alone where that is asked for, then the server."""
    os.environ["COG_RWKV_WEIGHTS"] = str(weights)
    os.environ.setdefault("COG_RWKV_MAX_BATCH", str(options.streams))
    work = Work(
        options.seed,
        options.prompt_tokens,
        options.output_tokens,
        0.0 if options.check else options.temperature,
        checkpoint.load(weights, progress=False).vocab,
        DISTINCT if options.check else None,
    )
    row: dict[str, Any] = {"device": device_name(), "model": options.model, "streams": options.streams}
    engine = None
    if options.engine:
        records, window = apart(load_engine.run, work, options.streams, options.seconds)
        engine = summary(records, window)
        say(f"the engine alone: {engine['http_tokens_per_s']} tokens/s")
    if options.url:
        records, window = over_http(options, work, options.url)
        memory: dict[str, Any] = {}
    else:
        with CogServer() as server, Memory(server.pid) as watch:
            records, window = over_http(options, work, server.url)
        memory = watch.summary(window)
    for error in sorted({record.error for record in records if record.error})[:5]:
        say(f"error: {error[:300]}")
    return row | combined(summary(records, window), engine) | {"memory_mb": memory, **conditions(options)}


def combined(http: dict[str, Any], engine: dict[str, Any] | None) -> dict[str, Any]:
    """The numbers over HTTP with those of the engine beside them."""
    own = engine["http_tokens_per_s"] if engine else None
    share = round(http["http_tokens_per_s"] / own, 3) if own else None
    return http | {
        "engine_tokens_per_s": own,
        "http_share": share,
        "engine_errors": engine["errors"] if engine else None,
        "engine_ramp_up_s": engine["ramp_up_s"] if engine else None,
    }


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What else has to be known to make the row again."""
    loop = f"open, {options.rate} requests/s" if options.rate else "closed"
    return {
        "loop": loop,
        "checked": options.check,
        "seed": options.seed,
        "ramp_up": "until every stream has had its first token; not measured",
        "settings": {name: value for name, value in os.environ.items() if re.match(SETTINGS, name)},
    }


def device_name() -> str:
    """The card that the engine runs on, or the processor."""
    if torch.cuda.is_available() and os.environ.get("COG_RWKV_DEVICE") != "cpu":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "CPU")
    return f"{name}, {os.cpu_count()} cores"


@contextmanager
def weights_of(options: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint to serve: made, where its name is a size."""
    if options.model not in synth_rwkv7.SIZES:
        yield EMBEDDED_WEIGHTS if options.model == "embedded" else Path(options.model)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / f"{options.model}.pth"
        begin = time.monotonic()
        apart(generate, options.model, path)
        say(f"made {path} in {time.monotonic() - begin:.0f} s")
        yield path


def save(row: dict[str, Any], path: Path) -> None:
    """Put the row into the list at ``path``, and draw it."""
    rows = result_rows.read(path)
    same = ("device", "model", "streams")
    rows = [one for one in rows if any(one[name] != row[name] for name in same)]
    rows.append(row)
    result_rows.write(path, rows)
    load_plot.draw(path)


def say(text: str) -> None:
    """Print it for whoever waits; standard output has the result alone."""
    print(text, file=sys.stderr, flush=True)


def span(text: str) -> Range:
    """ "512" or "64-512" as a range."""
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ", ".join(synth_rwkv7.SIZES)
    parser.add_argument("--model", default="embedded", help=f"embedded, a path, or a size to generate: {sizes}")
    parser.add_argument("--url", help="a server that runs already, with the model given by --model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests a second of an open loop; without it the loop is closed")
    parser.add_argument("--prompt-tokens", type=span, default=(512, 512), metavar="N[-N]")
    parser.add_argument("--output-tokens", type=span, default=(256, 256), metavar="N[-N]")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="what is measured, after the ramp-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="of clients")
    parser.add_argument("--engine", action="store_true", help="also the engine without HTTP")
    parser.add_argument("--check", action="store_true", help="greedy replies, equal to their single runs")
    parser.add_argument(
        "--flat", type=float, metavar="SHARE", help="fail where the last half adds more memory than that"
    )
    parser.add_argument("--folder", help="where generated checkpoints lie while they are needed")
    parser.add_argument("--save", type=Path, help="a JSON list of results; its plot is made beside it")
    options = parser.parse_args()
    if options.rate and options.engine:
        parser.error("--engine goes with the closed loop")
    if options.url and options.flat is not None:
        parser.error("--flat looks at a server that is started here, not at the one at --url")
    return options


def main() -> int:
    options = parse()
    with weights_of(options) as weights:
        row = measure(options, weights)
    if options.save:
        save(row, options.save)
    say(", ".join(f"{name} {value}" for name, value in row.items() if name not in ("curves", "settings", "memory_mb")))
    say(f"memory in MB: {row['memory_mb']}")
    print(json.dumps(row))
    growing = options.flat is not None and row["memory_mb"].get("late_growth", 1.0) > options.flat
    if growing:
        say(f"the memory is not flat: the last half of the time has added more than {options.flat:.1%}")
    return 1 if row["errors"] or row["engine_errors"] or growing else 0


if __name__ == "__main__":
    sys.exit(main())
