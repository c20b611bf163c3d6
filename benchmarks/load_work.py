"""The requests of a load test: which there are, in which order, is a matter of one seed."""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from model.tokenizer import Tokenizer

WORD = re.compile(rb" [a-z]{2,}")
Range = tuple[int, int]


@dataclass(frozen=True)
class Work:
    """Request ``number`` of ``stream``, for any of them, the same in every process.

    A prompt has ``prompt_tokens`` and a reply at most ``output_tokens`` tokens, drawn evenly from these ranges; prompts
    are words of the vocabulary. With ``distinct`` all requests come from a set of so many.
    """

    seed: int
    prompt_tokens: Range
    output_tokens: Range
    temperature: float
    vocab: Path | None
    distinct: int | None = None

    def key(self, stream: int, number: int) -> str:
        """What decides on the request, and names it."""
        if self.distinct is None:
            return f"{stream}-{number}"
        return str(random.Random(f"{self.seed} which {stream}-{number}").randrange(self.distinct))

    def all_keys(self) -> list[str]:
        """All keys there are, where the set is finite."""
        return [str(n) for n in range(self.distinct or 0)]

    def inputs(self, key: str) -> dict[str, Any]:
        """The inputs of the request with this key."""
        draw = random.Random(f"{self.seed} {key}")
        return {
            "prompt": self._prompt(draw, draw.randint(*self.prompt_tokens)),
            "max_tokens": draw.randint(*self.output_tokens),
            "temperature": self.temperature,
            "seed": draw.randrange(2**32),
        }

    def _prompt(self, draw: random.Random, tokens: int) -> str:
        """Words that the tokenizer reads as ``tokens`` ids, the few of a start token not counted."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        ids = draw.choices(self._words, k=tokens)
        for _ in range(20):  # neighbours may become one token, or be cut in another place
            ids = encode(decode(ids))[:tokens]
            if len(ids) == tokens == len(encode(decode(ids))):
                break
            ids += draw.choices(self._words, k=tokens - len(ids))
        return decode(ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model under test."""
        return Tokenizer(self.vocab)

    @cached_property
    def _words(self) -> list[int]:
        return [token for token in self.tokenizer.defined if WORD.fullmatch(self.tokenizer.token_bytes(token))]

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: not the tokenizer."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}
