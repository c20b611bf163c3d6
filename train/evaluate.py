"""Prints what the embedded checkpoint is worth on held-out packages, beside xz and an order-5 byte n-gram model.

    python -m train.evaluate --corpus local/corpus --model weights/rwkv7-python-9m.safetensors

Bits per byte of whole files, each from an empty context and its end included, through the served model
(`model.rwkv7`); `xz -9` of the files end to end; the n-gram model, trained on the same text. All held-out files for the
latter two, and every fourth for all three (--every). Then 200
held-out function heads are completed by both models, with the server's sampler and one procedure, and parsed.
The last line is one JSON object, which --out also writes.
"""

import argparse
import json
import lzma
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model import checkpoint
from model.rwkv7 import RWKV7
from model.sampling import Sampler, SamplingParams
from model.state import StatePool
from model.tokenizer import END, Tokenizer

from .heads import Completion, Tally, choose
from .ngram import ByteNgram
from .vocab import documents

ROWS, CHUNK = 16, 256
SETTINGS = {
    "temperature 1, top_p 0.5": (1.0, 0.5),
    "temperature 0.8, top_p 0.95": (0.8, 0.95),
}  # the server's default first


class Writer(Protocol):
    """A model that continues a batch of texts: logits float32 [B, vocab] for the next id of each row in `rows`."""

    allowed: Tensor

    def begin(self, prompts: list[str]) -> Tensor:
        """Read the prompts, row i the i-th; logits of all rows."""

    def advance(self, ids: list[int], rows: list[int]) -> Tensor:
        """Read one id in each of `rows`; their logits."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of an id; b"" for the one that ends a document."""


class Served:
    """The checkpoint as the server runs it."""

    def __init__(self, path: Path, device: str) -> None:
        loaded = checkpoint.load(path, progress=False)
        self.sha256 = loaded.sha256
        self.model = RWKV7.load(loaded, device, torch.float16 if device == "cuda" else None, progress=False)
        self.tokenizer = Tokenizer(loaded.vocab)
        self.allowed = self.tokenizer.allowed(self.model.vocab_size, device)
        self.bytes_of = self.tokenizer.token_bytes

    def read(self, parts: Sequence[list[int]], rows: list[int], last_only: bool) -> Tensor:
        """Read parts[i] in row rows[i]; logits float32 [B, vocab] after each part, or [N, vocab] after each id."""
        bounds = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
        ids = torch.tensor([i for part in parts for i in part], device=self.model.device)
        where = torch.tensor(rows, device=self.model.device)
        return self.model.forward(ids, self.pool, where, torch.from_numpy(bounds).to(ids.device), last_only)

    def score(self, texts: list[str]) -> list[float]:
        """Nats of each text and its end, from an empty context."""
        ids = [self.tokenizer.encode(text) for text in texts]
        nats = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: -len(ids[i]))
        for begin in range(0, len(order), ROWS):
            group = order[begin : begin + ROWS]
            self.pool = StatePool(self.model.config, len(group), self.model.device)
            for at in range(0, len(ids[group[0]]) + 1, CHUNK):
                rows = [row for row, i in enumerate(group) if len(ids[i]) >= at]
                inputs = [[END, *ids[group[row]]][at : at + CHUNK] for row in rows]
                targets = [[*ids[group[row]], END][at : at + CHUNK] for row in rows]
                logits = self.read(inputs, rows, last_only=False)
                wanted = torch.tensor([t for part in targets for t in part], device=logits.device)
                losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
                for row, loss in zip(rows, losses.split([len(t) for t in targets]), strict=True):
                    nats[group[row]] += float(loss.double().sum())
        return nats

    def begin(self, prompts: list[str]) -> Tensor:
        """Writer.begin: each prompt after the id that ends the document before."""
        self.pool = StatePool(self.model.config, len(prompts), self.model.device)
        return self.read([[END, *self.tokenizer.encode(p)] for p in prompts], list(range(len(prompts))), last_only=True)

    def advance(self, ids: list[int], rows: list[int]) -> Tensor:
        """Writer.advance."""
        return self.read([[i] for i in ids], rows, last_only=True)


class Bytes:
    """The n-gram model: an id is a byte, and the byte 0 ends a document as id 0 does."""

    def __init__(self, ngram: ByteNgram) -> None:
        self.ngram, self.allowed = ngram, torch.ones(256, dtype=torch.bool)

    def begin(self, prompts: list[str]) -> Tensor:
        """Writer.begin; vocab is 256."""
        self.texts = [prompt.encode() for prompt in prompts]
        return self._logits(range(len(prompts)))

    def advance(self, ids: list[int], rows: list[int]) -> Tensor:
        """Writer.advance."""
        for token, row in zip(ids, rows, strict=True):
            self.texts[row] += bytes([token])
        return self._logits(rows)

    def bytes_of(self, token: int) -> bytes:
        """Writer.bytes_of."""
        return bytes([token]) if token else b""

    def _logits(self, rows: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.log(np.stack([self.ngram.next(self.texts[row]) for row in rows]))).float()


def complete(writer: Writer, heads: list[str], temperature: float, top_p: float, limit: int) -> list[Completion]:
    """One completion of each head, all drawn side by side; row i draws with seed i."""
    found = [Completion(head, limit) for head in heads]
    logits, rows = writer.begin(heads), list(range(len(heads)))
    sampler = Sampler(len(writer.allowed), len(heads), logits.device, writer.allowed)
    for row in rows:
        sampler.set_row(row, SamplingParams(temperature=temperature, top_p=top_p, seed=row))
    while rows:
        ids = sampler.sample(logits, torch.tensor(rows, device=logits.device))[0].tolist()
        live = [(i, row) for i, row in zip(ids, rows, strict=True) if not found[row].push(writer.bytes_of(i))]
        rows = [row for _, row in live]
        if rows:
            logits = writer.advance([i for i, _ in live], rows)
    return found


def baselines(ngram: ByteNgram, texts: list[str]) -> dict[str, float]:
    """Bits per byte of `xz -9` over the files end to end, and of the n-gram model, each file's end included."""
    files = [text.encode() for text in texts]
    size = sum(map(len, files))
    packed = len(lzma.compress(b"".join(files), preset=9))  # what the program writes: it is the same library
    nats = ngram.score(b"".join(file + b"\0" for file in files))
    return {"files": len(files), "bytes": size, "xz -9": 8 * packed / size, "order-5 n-gram": nats / math.log(2) / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=4, help="the model scores every n-th held-out file; 1 for all")
    parser.add_argument("--count", type=int, default=200, help="function heads")
    parser.add_argument("--limit", type=int, default=600, help="bytes of one completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    texts = documents(args.corpus / "heldout.bin")
    served, begin = Served(args.model, args.device), time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {line}", flush=True)

    ngram = ByteNgram(args.corpus / "train.bin")
    say("n-gram model trained")
    bits = {"all files": baselines(ngram, texts), "scored files": baselines(ngram, texts[:: args.every])}
    say(f"baselines, bits per byte: {bits}")
    nats = served.score(texts[:: args.every])
    bits["scored files"]["model"] = sum(nats) / math.log(2) / bits["scored files"]["bytes"]
    say(f"model: {bits['scored files']['model']:.4f} bits per byte of the scored files")

    heads = choose(texts, args.count, args.seed)
    parsed: dict[str, dict[str, dict[str, float]]] = {}
    samples: list[str] = []
    for name, (temperature, top_p) in SETTINGS.items():
        parsed[name] = {}
        for label, writer in (("model", served), ("order-5 n-gram", Bytes(ngram))):
            completions = complete(writer, heads, temperature, top_p, args.limit)
            parsed[name][label] = asdict(Tally.of(completions))
            say(f"{name}: {label} {parsed[name][label]}")
            if writer is served and not samples:
                samples = [c.source() for c in completions[:12]]
    result = {"checkpoint_sha256": served.sha256, "device": args.device, "bits_per_byte": bits}
    result |= {"function_heads": len(heads), "parsed": parsed}
    if args.out:
        args.out.write_text(json.dumps(result | {"samples": samples}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
