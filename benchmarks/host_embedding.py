"""A step of the model with its embedding on the device, and with it in pinned host memory (COG_RWKV_HOST_EMBEDDING).

    python benchmarks/host_embedding.py --layers 8 --save benchmarks/results/h200_host_embedding.json

The widths are those of 7.2b; few layers will do, since the embedding is read once a step whatever their number, and a
difference is easier to see beside fewer. Steps are replayed graphs, as on the server, with other tokens in each of
four. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

import cog_rwkv_ops as ops  # noqa: E402
from benchmarks import synth_rwkv7  # noqa: E402
from benchmarks.ops_timing import Timed, side_by_side  # noqa: E402
from model import checkpoint  # noqa: E402
from model.rwkv7 import RWKV7  # noqa: E402
from model.state import StatePool  # noqa: E402

BATCHES = (1, 32, 320)


def draw(model: RWKV7, batch: int, seed: int = 0) -> torch.Tensor:
    """Ids, on the device."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, (batch,), generator=random).to(model.device)


def read(model: RWKV7, batch: int) -> Timed:
    """The rows of ``batch`` tokens and nothing else, in a CUDA graph: what a step loses at most."""
    return Timed([partial(ops.host_gather, model.embedding, draw(model, batch, s)) for s in range(16)], True, 20)


def step(model: RWKV7, batch: int) -> Timed:
    """One token of ``batch`` sequences."""
    pool = StatePool(model.config, batch, model.device)
    rows, ends = torch.arange(batch, device=model.device), torch.arange(batch + 1, device=model.device)
    calls = [partial(model.forward, draw(model, batch, seed), pool, rows, ends) for seed in range(4)]
    return Timed(calls, graph=True, milliseconds=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--save", type=Path, help="write the object there")
    args = parser.parse_args()
    synth_rwkv7.SIZES["measured"] = (args.layers, *synth_rwkv7.SIZES["7.2b"][1:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured.pth")
        torch.save(synth_rwkv7.checkpoint("measured"), path)
        found = checkpoint.load(path)
        models = {
            where: RWKV7.load(found, "cuda", torch.float16, progress=False, host_embedding=where == "host", tuned=True)
            for where in ("device", "host")
        }
    rows = []
    for batch in BATCHES:
        row: dict[str, object] = {"batch": batch}
        for what, timed in (("step", step), ("read", read)):
            times = side_by_side({where: timed(model, batch) for where, model in models.items()}, rounds=7)
            row |= {f"{what}_{where}_ms": float(f"{spent:.4g}") for where, spent in times.items()}
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    result = json.dumps({"card": torch.cuda.get_device_name(), "layers": args.layers, "rows": rows})
    print(result)
    if args.save:
        args.save.write_text(result + "\n")


if __name__ == "__main__":
    main()
