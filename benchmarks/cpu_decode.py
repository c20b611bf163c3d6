"""Decode speed on the CPU, one stream, beside the PyPI ``rwkv`` package: same checkpoint, machine, threads and run.

    python benchmarks/cpu_decode.py            # a generated 0.1b checkpoint and the embedded one

Both sides are timed in turns, a round of ours and a round of the peer's, so that a change of the machine's mood meets
both. No time is printed unless the logits of both agree. The last line is one JSON object; ``--save`` also writes it.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import synth_rwkv7  # noqa: E402
from model import checkpoint  # noqa: E402
from model.rwkv7 import RWKV7  # noqa: E402
from model.state import StatePool  # noqa: E402

IDS = [100 + 7 * i for i in range(33)]
Step = Callable[[int], torch.Tensor]


def ours(path: Path) -> tuple[Step, RWKV7]:
    """A function from one id to its logits, the state going on."""
    model = RWKV7.load(checkpoint.load(path), "cpu", None, progress=False)
    pool, row, ends = StatePool(model.config, 1), torch.tensor([0]), torch.tensor([0, 1])
    return lambda token: model.forward(torch.tensor([token]), pool, row, ends)[0], model


def peer(path: Path) -> Step:
    """The same of the ``rwkv`` package in float32, its fastest precision on a CPU."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    with contextlib.redirect_stdout(sys.stderr):
        from rwkv.model import RWKV

        model = RWKV(str(path.with_suffix("")), "cpu fp32")
    state = None

    def step(token: int) -> torch.Tensor:
        nonlocal state
        logits, state = model.forward([token], state)
        return logits

    return step


def tokens_per_second(step: Step, vocab: int) -> float:
    """Speed of one round: all of IDS, one after the other, by the wall clock."""
    start = time.perf_counter()
    for token in IDS:
        step(token % vocab)
    return len(IDS) / (time.perf_counter() - start)


def weight_bytes(model: RWKV7) -> int:
    """Bytes of the matrices that a token reads when all neurons are active (the embedding is one row)."""
    blocks = [t for b in model.blocks for part in (b.time_mix, b.channel_mix) for t in _matrices(part)]
    return sum(t.numel() * t.element_size() for t in [*blocks, model.head])


def _matrices(part: object) -> list[torch.Tensor]:
    flat = [t for value in vars(part).values() for t in (value if isinstance(value, tuple) else (value,))]
    return [t for t in flat if isinstance(t, torch.Tensor) and t.dim() == 2]


def compare(name: str, path: Path, rounds: int) -> dict[str, object]:
    """One row of the table."""
    our_step, model = ours(path)
    peer_step = peer(path)
    vocab = model.vocab_size
    for token in IDS:
        a, b = our_step(token % vocab), peer_step(token % vocab)
        error = float((a - b).norm() / b.norm())
        if not error < 1e-4:
            raise SystemExit(f"{name}: the logits differ by {error:.1e}; no time is given")
    speeds = [(tokens_per_second(our_step, vocab), tokens_per_second(peer_step, vocab)) for _ in range(rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*speeds, strict=True))
    return {
        "model": name,
        "ours_tokens_per_s": round(mine, 1),
        "peer_tokens_per_s": round(theirs, 1),
        "ratio": round(mine / theirs, 2),
        "spread": [round(min(a for a, _ in speeds), 1), round(max(a for a, _ in speeds), 1)],
        "dense_bytes": weight_bytes(model),
        "logits_error": error,
    }


def embedded(folder: Path) -> Path:
    """The embedded checkpoint as the .pth that the peer reads."""
    from safetensors.torch import load_file

    path = folder / "embedded.pth"
    torch.save(load_file(next((ROOT / "weights").glob("*.safetensors"))), path)
    return path


def generated(folder: Path, size: str) -> Path:
    """A checkpoint of random weights, of a published size ("0.1b"), as .pth in `folder`."""
    path = folder / f"{size}.pth"
    torch.save(synth_rwkv7.checkpoint(size), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    print(f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}; median tokens per second, one stream")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = [
            compare("0.1b (generated)", generated(folder, "0.1b"), args.rounds),
            compare("embedded", embedded(folder), args.rounds),
        ]
    for row in rows:
        print("{model:18} ours {ours_tokens_per_s:8}  rwkv fp32 {peer_tokens_per_s:8}  ratio {ratio}".format(**row))
    result = {"cpu": cpu, "threads": torch.get_num_threads(), "peer": "rwkv 0.8.32 cpu fp32", "rows": rows}
    line = json.dumps(result)
    if args.save:
        args.save.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
