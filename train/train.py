"""Trains the embedded checkpoint for a given number of seconds.

    python -m train.train --tokens local/tokens --out local/run --seconds 510

The learning rate follows the clock, so the run ends cleanly whatever the machine's speed. On a GPU the blocks are
compiled and one whole step is a CUDA graph. Writes model.safetensors (bfloat16, published layout; in parts of at most
15 MiB where larger) and log.json.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from .init import initialise, parameter_groups
from .model import RWKV7, Shape
from .stream import Stream, pack, pack_rows, read_tokens

PART = 15 << 20


def learning_rate(progress: float, peak: float, warm_up: float) -> float:
    """Warm-up, then a cosine to zero; progress is elapsed time over the whole, 0..1."""
    if progress < warm_up:
        return peak * (0.01 + 0.99 * progress / warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the positions that have a target."""
    return F.cross_entropy((hidden @ head.T).float().flatten(0, 1), targets.flatten(), ignore_index=-100)


class Trainer:
    """One model, its optimiser and its place in the stream; `step` is what the CUDA graph records."""

    def __init__(self, model: RWKV7, stream: Stream, device: torch.device, compiled: bool) -> None:
        self.model, self.stream, self.device = model, stream, device
        self.state = model.zero_state(stream.batch)
        self.loss, self.norm = torch.zeros((), device=device), torch.zeros((), device=device)
        groups = parameter_groups(model, weight_decay=0.1)
        on_gpu = device.type == "cuda"
        self.rates = [torch.zeros((), device=device) for _ in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-15, fused=on_gpu, capturable=on_gpu)
        self.loss_function = torch.compile(token_loss) if compiled else token_loss
        if compiled:
            for block in model.blocks:
                block.compile()

    def forward(
        self, window: tuple[Tensor, Tensor, Tensor], state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(mean loss of a window (ids, targets, starts), the state after it)."""
        ids, targets, starts = window
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden, state = self.model(ids, state, starts)
            return self.loss_function(hidden, self.model.head.weight, targets), state

    def step(self) -> None:
        """One window forward, back, clipped, applied; the state goes on to the next window."""
        loss, state = self.forward(self.stream.next(), self.state)
        loss.backward()
        self.norm.copy_(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.loss.copy_(loss.detach())
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new.detach())

    def rewind(self) -> None:
        """Back to the stream's start, with zero states."""
        self.stream.position.zero_()
        for part in self.state:
            part.zero_()

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step, times each group's own scale."""
        for group, tensor in zip(self.optimiser.param_groups, self.rates, strict=True):
            tensor.fill_(rate * group["rate_scale"])

    def recorded(self) -> Callable[[], None]:
        """`step` as a CUDA graph; warm-up steps at rate 0 build what it needs."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.rewind()
        return graph.replay

    @torch.no_grad()
    def evaluate(self, stream: Stream) -> float:
        """Mean loss in nats a token over a stream of `pack_rows`."""
        stream.position.zero_()
        state, total, count = self.model.zero_state(stream.batch), 0.0, 0
        with torch.compiler.set_stance("force_eager"):  # not worth compiling once more without gradients
            for _ in range(stream.windows):
                window = stream.next()
                if scored := int((window[1] >= 0).sum()):
                    loss, state = self.forward(window, state)
                    total, count = total + loss.item() * scored, count + scored
        return total / count


def export(model: RWKV7, path: Path) -> None:
    """Writes bfloat16 tensors in the published layout; larger files also in numbered parts."""
    save_file({name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.state_dict().items()}, path)
    data = path.read_bytes()
    if len(data) > PART:
        for number, begin in enumerate(range(0, len(data), PART)):
            path.with_suffix(f".part{number}").write_bytes(data[begin : begin + PART])


def train(
    trainer: Trainer,
    advance: Callable[[], None],
    held: Stream,
    epochs: Callable[[int], np.ndarray],
    args: argparse.Namespace,
) -> list[dict]:
    """The loop: time-based rate, epochs in new orders prepared beside it, a log line every few seconds."""
    log, steps, begin = [], 0, time.monotonic()
    due_log, due_save = 0.0, args.save_every
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(epochs, 1)
        while (elapsed := time.monotonic() - begin) < args.seconds:
            if steps and steps % trainer.stream.windows == 0:
                trainer.stream.refill(upcoming.result())
                trainer.rewind()
                upcoming = pool.submit(epochs, steps // trainer.stream.windows + 1)
            trainer.set_rate(learning_rate(elapsed / args.seconds, args.rate, args.warm_up))
            advance()
            steps += 1
            if steps % 16 == 0:  # the host may run this far ahead of the device
                loss, norm = trainer.loss.item(), trainer.norm.item()
                if not math.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss} after {steps} steps")
                if elapsed >= due_log:
                    log.append(
                        {"seconds": round(elapsed, 1), "step": steps, "loss": round(loss, 4), "norm": round(norm, 3)}
                    )
                    print(log[-1], flush=True)
                    due_log = elapsed + args.seconds / 50
            if elapsed >= due_save:
                export(trainer.model, args.out / "model.safetensors")
                due_save += args.save_every
    spent, tokens = time.monotonic() - begin, steps * trainer.stream.batch * trainer.stream.length
    last = {"steps": steps, "tokens": tokens, "seconds": round(spent, 1), "tokens_per_second": round(tokens / spent)}
    last["epochs"] = round(steps / trainer.stream.windows, 2)
    last["heldout_nats_per_token"] = trainer.evaluate(held)
    return [*log, last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=510)
    parser.add_argument("--save-every", type=float, default=120)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=float, default=0.03, help="share of the time")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)

    tokens, lengths = read_tokens(args.tokens / "train.xz")
    held_tokens, held_lengths = read_tokens(args.tokens / "heldout.xz")

    def epochs(number: int) -> np.ndarray:
        return pack(tokens, lengths, np.random.default_rng([args.seed, number]).permutation(len(lengths)))

    model = RWKV7(Shape(layers=args.layers, width=args.width, vocab=args.vocab))
    initialise(model)
    model.to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters on {device}, {len(tokens) / 1e6:.1f} M tokens", flush=True)
    trainer = Trainer(model, Stream(epochs(0), args.batch, args.length, device), device, args.compile)
    held = Stream(pack_rows(held_tokens, held_lengths, args.batch, args.length), args.batch, args.length, device)
    advance = trainer.recorded() if args.graph else trainer.step
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    log = train(trainer, advance, held, epochs, args)
    export(model, args.out / "model.safetensors")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    (args.out / "log.json").write_text(
        json.dumps({"settings": settings, "peak_bytes": peak, "log": log}, indent=1) + "\n"
    )
    print({**log[-1], "peak_bytes": peak}, flush=True)


if __name__ == "__main__":
    main()
