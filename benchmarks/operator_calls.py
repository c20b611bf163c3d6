"""How many operators one step of the model calls: counted on meta tensors, so that it needs no GPU and no weights.

    python benchmarks/operator_calls.py            # the counts beside the recorded ones
    python benchmarks/operator_calls.py --record   # record them: benchmarks/guard/operator_calls.json

A launch costs a small model more than its work, so a step that calls more than before is slower before anybody has
timed it. The counts are of ``LAYERS`` layers; views count too, since the host has to make them.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops")]

import cog_rwkv_ops as ops  # noqa: E402
from benchmarks import synth_rwkv7  # noqa: E402
from model.checkpoint import Checkpoint  # noqa: E402
from model.config import Config  # noqa: E402
from model.rwkv7 import RWKV7  # noqa: E402
from model.state import StatePool  # noqa: E402

RECORDED = Path(__file__).with_name("guard") / "operator_calls.json"
LAYERS, BATCH, TOKENS = 3, 2, 5
Counts = dict[str, int]


class _Counter(TorchDispatchMode):
    """Counts what is dispatched while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def count(tokens: int, decode: bool = False, tuned: bool = False) -> Counts:
    """Calls by operator in a step of BATCH sequences of ``tokens`` tokens.

    ``decode``, ``tuned``: with ``decode_`` or ``forward_``, which take a whole step (both take meta tensors).
    """
    found = _checkpoint()
    model = RWKV7.load(found, "meta", torch.float16, progress=False, tuned=tuned)
    pool = StatePool(found.config, BATCH, "meta")
    ids, rows, ends = (_indices(n) for n in (BATCH * tokens, BATCH, BATCH + 1))
    chosen = ops.can_decode if decode else _never
    with mock.patch.object(ops, "can_decode", chosen), _Counter() as counter:
        model.forward(ids, pool, rows, ends)
    return dict(sorted(counter.calls.items()))


def _never(*_arguments: object) -> bool:
    return False


def _indices(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64, device="meta")


def _checkpoint() -> Checkpoint:
    with mock.patch.dict(synth_rwkv7.SIZES, {"counted": (LAYERS, 128, 32, 32, 32, 64)}):
        tensors = synth_rwkv7.checkpoint("counted", vocab=64)
    config = Config.from_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return Checkpoint(Path("counted.pth"), config, tensors, None)


CASES: dict[str, Callable[[], Counts]] = {
    "decode": lambda: count(1),
    "prefill": lambda: count(TOKENS),
    "decode in one call": lambda: count(1, decode=True),
    "decode, tuned": lambda: count(1, tuned=True),
    "prefill, tuned": lambda: count(TOKENS, tuned=True),
}


def compare(name: str, counts: Counts, recorded: Counts) -> list[str]:
    """What to say where a step calls other operators of ours than recorded, or more of torch's."""
    said = [
        f"{name}: {operator} {counts.get(operator, 0)} times, recorded {recorded.get(operator, 0)}"
        for operator in sorted(set(counts) | set(recorded))
        if operator.startswith("cog_rwkv.") and counts.get(operator, 0) != recorded.get(operator, 0)
    ]
    others, before = (sum(n for o, n in c.items() if not o.startswith("cog_rwkv.")) for c in (counts, recorded))
    if others > before:
        said.append(f"{name}: {others} calls of torch's own operators, recorded {before}")
    return said


def load() -> dict[str, Counts]:
    """The recorded counts."""
    found: dict[str, Counts] = json.loads(RECORDED.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    counts = {name: case() for name, case in CASES.items()}
    if args.record:
        RECORDED.write_text(json.dumps(counts, indent=1) + "\n")
    recorded, said = load(), []
    for name, found in counts.items():
        print(f"{name}: {sum(found.values())} calls, recorded {sum(recorded.get(name, {}).values())}")
        said += compare(name, found, recorded.get(name, {}))
    print("\n".join(said) or "as recorded")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
