"""Function heads of held-out files, and whether what a model makes of them is Python."""

import ast
import re
import textwrap
from dataclasses import dataclass

import numpy as np

HEAD_BYTES = 1000
DEDENT = re.compile(r"\n(?=[^\s])")


def heads_of(source: str) -> list[str]:
    """`def` line(s) and docstring, dedented, of each function whose body does more than pass; no newline at the end."""
    lines, found = source.split("\n"), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        documented = ast.get_docstring(node, clean=False) is not None
        rest = node.body[1:] if documented else node.body
        if not rest or isinstance(rest[0], ast.Pass) or _is_ellipsis(rest[0]):
            continue
        last = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : last])).rstrip()
        if len(head.encode()) <= HEAD_BYTES and statements(head + "\n    pass") is not None:
            found.append(head)
    return found


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis


def choose(texts: list[str], count: int, seed: int) -> list[str]:
    """`count` different heads of all files, in a random order that the seed decides."""
    found: dict[str, None] = {}
    for text in texts:
        try:
            found.update(dict.fromkeys(heads_of(text)))
        except SyntaxError:  # a template, or Python of another version
            continue
    heads = list(found)
    return [heads[i] for i in np.random.default_rng(seed).permutation(len(heads))[:count]]


def statements(source: str) -> int | None:
    """How many statements one function's body has beyond a docstring; None where the source is not Python."""
    try:
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError, AttributeError):
        return None
    first = body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return len(body) - documented


@dataclass
class Completion:
    """What a model adds to a head, up to the first line that is not indented, its end, or a limit of bytes."""

    head: str
    limit: int
    added: bytes = b""
    ended: bool = False

    def push(self, piece: bytes) -> bool:
        """Takes the bytes of one token, b"" for the end; True when nothing more is needed."""
        self.added += piece
        self.ended = not piece or DEDENT.search(self.added.decode("utf-8", "replace")) is not None
        return self.ended or len(self.added) >= self.limit

    def source(self) -> str:
        """The function: cut before the first line that is not indented, or, at the limit, after the last whole line."""
        text = self.added.decode("utf-8", "replace")
        if cut := DEDENT.search(text):
            text = text[: cut.start()]
        elif not self.ended:
            text = text[: max(0, text.rfind("\n"))]
        return self.head + text + "\n"


@dataclass(frozen=True)
class Tally:
    """Shares of completions: accepted by ast.parse; accepted and with a statement of their own; begun and ended."""

    accepted: float
    accepted_with_statement: float
    ended: float

    @classmethod
    def of(cls, completions: list[Completion]) -> "Tally":
        """The shares, 0 to 1, of one completion or more."""
        counts = [statements(c.source()) for c in completions]
        total = len(completions)
        accepted = sum(n is not None for n in counts) / total
        return cls(accepted, sum(bool(n) for n in counts) / total, sum(c.ended for c in completions) / total)
