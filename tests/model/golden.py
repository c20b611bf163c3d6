"""Greedy ids that every later version must give, by the sha256 of the checkpoint. ``python -m tests.model.golden`` adds
those of checkpoints that the file does not know yet; it never changes one that is there."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from model import checkpoint
from model.rwkv7 import RWKV7
from model.state import StatePool
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
LENGTH = 48
PROMPT = [0, 17, 300, 42, 99, 5]


def checkpoints(folder: Path) -> list[Path]:
    """The tiny checkpoint, made anew in ``folder``, and the embedded one."""
    return [tiny.write(tiny.Shape(), folder / "tiny.safetensors"), *(ROOT / "weights").glob("*.safetensors")]


def greedy(path: Path) -> tuple[str, list[int]]:
    """sha256 of the checkpoint, and the ids that follow PROMPT on the CPU with float32 arithmetic."""
    loaded = checkpoint.load(path)
    model = RWKV7.load(loaded, "cpu", None, progress=False)
    pool, row, ids, new = StatePool(model.config, 1), torch.tensor([0]), [], PROMPT
    while len(ids) < LENGTH:
        new = [int(model.forward(torch.tensor(new), pool, row, torch.tensor([0, len(new)])).argmax())]
        ids += new
    return loaded.sha256, ids


def main() -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for path in checkpoints(Path(folder)):
            sha, ids = greedy(path)
            if known.setdefault(sha, ids) != ids:
                sys.exit(f"{path.name}: greedy ids differ from those on record; that is a fault, not an update")
    FILE.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
