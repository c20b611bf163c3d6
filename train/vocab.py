"""Cuts a small vocabulary out of the World vocabulary, and writes the corpus in it.

    python -m train.vocab --corpus local/corpus --vocab weights/python-vocab.txt --tokens local/tokens

A token earns its place by the tokens it saves: its count under greedy longest match, times what it would cost in
shorter ones, less one. Start from all World tokens used, then drop the least useful in rounds, encoding anew each
time. All 256 single bytes stay. The file has the World format, `ID 'literal' LENGTH`, ids 1..n; id 0 is the end.
"""

import argparse
import lzma
from collections import Counter
from pathlib import Path

import numpy as np

from model.tokenizer import Tokenizer

SAMPLE_BYTES = 12_000_000


def table_of(tokenizer: Tokenizer) -> list[bytes]:
    """Token bytes by id; b"" for id 0 (the end of a document) and ids without text."""
    return [tokenizer.token_bytes(i) for i in range(tokenizer.defined[-1] + 1)]


def write_vocab(path: Path, tokens: list[bytes]) -> None:
    """Writes tokens as ids 1..n, the single bytes first, in byte order."""
    lines = []
    for number, token in enumerate(sorted(tokens, key=lambda t: (len(t) > 1, t)), start=1):
        try:
            literal = repr(token.decode("utf-8"))
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{number} {literal} {len(token)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def documents(path: Path) -> list[str]:
    """The texts of a corpus file (each ended by one zero byte)."""
    return [text.decode("utf-8") for text in path.read_bytes().split(b"\0")[:-1]]


def split_cost(token: bytes, known: set[bytes], longest: int) -> int:
    """Tokens that greedy longest match needs for `token` when the token itself is not there."""
    position, count = 0, 0
    while position < len(token):
        for size in range(min(longest, len(token) - position, len(token) - 1), 0, -1):
            if size == 1 or token[position : position + size] in known:
                break
        position, count = position + size, count + 1
    return count


def choose(texts: list[str], size: int, scratch: Path) -> list[bytes]:
    """`size` tokens of the World vocabulary, all single bytes among them, by greedy use on `texts`."""
    kept = [token for token in table_of(Tokenizer()) if token]
    bytes_ = {bytes([b]) for b in range(256)}
    write_vocab(scratch, kept)
    for target in (24_000, 12_000, 8_000, 6_000, 5_000, 4_600, 4_350, size, size):
        tokenizer = Tokenizer(scratch)
        table = table_of(tokenizer)
        counts: Counter[int] = Counter()
        for text in texts:
            counts.update(tokenizer.encode(text))
        known, longest = set(table), max(map(len, table))
        worth = {t: counts[i] * (split_cost(t, known, longest) - 1) for i, t in enumerate(table) if len(t) > 1}
        best = sorted(worth, key=lambda t: (-worth[t], t))[: max(target, size) - len(bytes_)]
        kept = [*bytes_, *best]
        write_vocab(scratch, kept)
        print(
            f"{len(kept):6} tokens; the round before: {sum(map(len, texts)) / counts.total():.3f} characters a token",
            flush=True,
        )
    return kept


def encode(texts: list[str], vocab: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint16, all documents end to end; lengths int32)."""
    tokenizer = Tokenizer(vocab)
    parts = [np.array(tokenizer.encode(text), dtype=np.uint16) for text in texts]
    return np.concatenate(parts), np.array([len(p) for p in parts], dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--size", type=int, default=4095, help="tokens with text; with id 0 the head has one row more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-vocab", action="store_true", help="encode with the vocabulary that is there")
    args = parser.parse_args()
    args.tokens.mkdir(parents=True, exist_ok=True)
    texts = documents(args.corpus / "train.bin")
    if not args.keep_vocab:
        order = np.random.default_rng(args.seed).permutation(len(texts))
        share = SAMPLE_BYTES / sum(map(len, texts))
        sample = [texts[i] for i in order[: max(1, int(share * len(texts)))]]
        write_vocab(args.vocab, choose(sample, args.size, args.tokens / "scratch-vocab.txt"))
    for name, group in (("train", texts), ("heldout", documents(args.corpus / "heldout.bin"))):
        tokens, lengths = encode(group, args.vocab)
        packed = tokens.tobytes() + lengths.tobytes() + np.int64(len(lengths)).tobytes()
        (args.tokens / f"{name}.xz").write_bytes(lzma.compress(packed, preset=4))
        size = sum(len(text.encode()) for text in group)
        print(
            f"{name}: {len(lengths)} documents, {size} bytes, {len(tokens)} tokens, {size / len(tokens):.3f} bytes each"
        )


if __name__ == "__main__":
    main()
