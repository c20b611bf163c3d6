"""Measures wkv4 to wkv7, forward and backward, beside other packages' kernels on the same card in one run.

    python benchmarks/ops_wkv.py [--ops wkv6,wkv7] [--cache FOLDER] [--out rows.json]

Inputs are bfloat16, made from a seed; times are medians over launches, by CUDA events. Before a peer counts, its y is
compared with ours. The floor is the bytes of arguments and results, each moved once, at the bandwidth measured on an
H200. The last line is the rows as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import cog_rwkv_ops
from benchmarks import wkv_peers
from benchmarks.wkv_peers import Arguments, Missing
from cog_rwkv_ops._library import operator

SHAPES = [(1, 4096, 64), (16, 256, 64), (8, 4096, 32)]
BANDWIDTH = 4388e9  # bytes a second
LIMIT = 0.05  # what a peer's y may be off, relative to ours, and still count


def make(op: str, batch: int, tokens: int, heads: int) -> Arguments:
    """Arguments of an operator as a model makes them."""
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    shape, half = (batch, tokens, heads, 64), torch.bfloat16
    if op == "wkv4":
        c = heads * 64
        state = torch.zeros(batch, 3, c, device="cuda")
        state[:, 2] = -1e38
        k, v = (normal(batch, tokens, c).to(half) for _ in range(2))
        return {"w": normal(c) - 1, "u": normal(c), "k": k, "v": v, "state": state}
    given = {name: normal(*shape).to(half) for name in "rwkv"} | {"state": normal(batch, heads, 64, 64)}
    if op == "wkv7":
        kk = torch.nn.functional.normalize(normal(*shape), dim=-1)
        rate = torch.sigmoid(normal(*shape))
        r, w, k, v, state = (given[name] for name in ("r", "w", "k", "v", "state"))
        return {"r": r, "w": w, "k": k, "v": v, "a": (-kk).to(half), "b": (kk * rate).to(half), "state": state}
    w = normal(heads, 64) - 1.5 if op == "wkv5" else given["w"] - 1.5
    return {"r": given["r"], "w": w, "k": given["k"], "v": given["v"], "u": normal(heads, 64), "state": given["state"]}


def milliseconds(call: Callable[[], Any], repeats: int = 11) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def size(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def peers(op: str, given: Arguments, cache: Path | None) -> dict[tuple[str, str], Callable[[], Any] | str]:
    """Of (name, pass): what to call, or why it is missing."""
    found: dict[tuple[str, str], Callable[[], Any] | str] = {}
    makers: dict[str, Callable[[], Any]] = {}
    if op in ("wkv5", "wkv6", "wkv7"):
        makers["rwkv"] = lambda: (wkv_peers.rwkv(op, given, cache),)
    if op == "wkv7":
        makers["rwkv-ops"] = lambda: wkv_peers.rwkv_ops(op, given, cache)
        makers["rwkvserve"] = lambda: wkv_peers.rwkvserve(op, given, cache)
    if op in ("wkv6", "wkv7"):
        makers["flash-linear-attention"] = lambda: wkv_peers.flash_linear_attention(op, given)
    for name, maker in makers.items():
        try:
            for which, call in zip(("forward", "backward"), maker(), strict=False):
                found[name, which] = call
        except Missing as reason:
            found[name, "forward"] = str(reason)
    return found


def measure(op: str, shape: tuple[int, int, int], cache: Path | None) -> list[dict[str, Any]]:
    """The rows of one operator and shape."""
    given = make(op, *shape)
    function = getattr(cog_rwkv_ops, op)
    backward = operator(f"{op}_backward")
    y, end = function(**given)
    gradients = torch.randn_like(y), torch.randn_like(end)
    moved = size(*given.values(), y, end)
    ours = {
        "forward": (milliseconds(lambda: function(**given)), moved),
        "backward": (milliseconds(lambda: backward(*gradients, *given.values()), 5), moved + size(*given.values())),
    }
    rows: list[dict[str, Any]] = []
    for which, (time, count) in ours.items():
        floor = count / BANDWIDTH * 1e3
        row = {"op": op, "pass": which, "dtype": "bfloat16", "shape": list(shape), "ours_ms": round(time, 4)}
        rows.append(row | {"peer": None, "peer_ms": None, "ratio": None, "floor_ms": round(floor, 4)})
        rows[-1]["share"] = round(floor / time, 3)
    for (name, which), call in peers(op, given, cache).items():
        if isinstance(call, str):
            print(f"{op} {name}: {call}")
            continue
        if which == "forward":
            off = float((call().float() - y.float()).norm() / y.float().norm())
            if name != "rwkvserve" and not off <= LIMIT:  # which starts from nothing
                print(f"{op} {shape} {name}: y is off by {off:.2g}: not counted")
                continue
        time = milliseconds(call, 5)
        base = next(row for row in rows if row["pass"] == which)
        rows.append(base | {"peer": name, "peer_ms": round(time, 4), "ratio": round(time / base["ours_ms"], 2)})
    for row in rows:
        print(*(f"{row[key]}" for key in ("op", "pass", "shape", "ours_ms", "peer", "peer_ms", "ratio", "share")))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="wkv4,wkv5,wkv6,wkv7", help="which operators")
    parser.add_argument("--cache", type=Path, help="keep compiled peers in this folder")
    parser.add_argument("--out", type=Path, help="write the rows to this file as well")
    options = parser.parse_args()
    print(torch.cuda.get_device_name())
    rows = []
    for op in options.ops.split(","):
        for shape in SHAPES:
            rows += measure(op, shape, options.cache)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
