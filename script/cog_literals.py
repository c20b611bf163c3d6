"""How the Cog CLI (0.23.1) reads a literal: by the text it is written in, not by what Python makes of it."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

MISSING: Any = object()  # no reading: the CLI drops the value or stops, depending on where it stands
INT64 = 2**63


def number(text: str) -> Any:
    """A bound: decimal, an integer where it is whole (JSON of Go writes 5.0 as 5)."""
    try:
        value = float(text)
    except ValueError:
        return MISSING
    return int(value) if value.is_integer() and abs(value) < 1e21 else value


def integer_or_number(text: str) -> Any:
    """A default: integers in any base within 64 bits, else a decimal."""
    try:
        value = int(text, 0)
    except ValueError:
        return number(text)
    return value if -INT64 <= value < INT64 and " " not in text else MISSING


def string(text: str) -> Any:
    """What stands between the outer quotes, with escapes and any quotes between left as they are."""
    for prefix in ('"""', "'''", '"', "'"):
        if text.startswith(prefix):
            return text[len(prefix) : -len(prefix)]
    return text[2:-1] if text.startswith(('r"', "r'")) else MISSING


def plain(value: Any) -> Any:
    """A Python literal as JSON would hold it: tuples and sets become lists."""
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain(item) for key, item in value.items()}
    return value


def tokens(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of an expression's text."""
    return list(tokenize.generate_tokens(io.StringIO(f"({text}\n)").readline))[1:]


def has_comment_or_parenthesis(text: str) -> bool:
    """Whether a list's text has what the CLI does not read as one of its items."""
    return any(t.type == tokenize.COMMENT or t.string == "(" for t in tokens(text))


class Literals:
    """Literals of one source file, and the module constants that the CLI follows by name."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self.source = source
        self.constants: dict[str, tuple[Any, ast.expr]] = {}
        for statement in tree.body:
            self._collect(statement)

    def text(self, node: ast.AST) -> str:
        """The source text of a node. Of a keyword or an assignment, what stands after the "="."""
        text = ast.get_source_segment(self.source, node) or ""
        if isinstance(node, ast.keyword | ast.Assign | ast.AnnAssign):
            return text.partition("=")[2].strip()
        return text

    def resolve(self, node: ast.expr, text: str) -> Any:
        """A literal or the name of a module constant; MISSING for anything else."""
        value = self.literal(node, text)
        if value is MISSING and text in self.constants:
            return self.constants[text][0]
        return value

    def literal(self, node: ast.expr, text: str) -> Any:
        """The CLI's reading of a literal; MISSING where it has none. `text` shows parentheses that ast drops."""
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
            return node.value if text == str(node.value) else MISSING
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return string(text)
        if isinstance(node, ast.Constant | ast.UnaryOp):
            return integer_or_number(text)
        if isinstance(node, ast.List | ast.Set | ast.Tuple | ast.Dict):
            return self._container(node, text)
        return MISSING

    def choices(self, node: ast.expr, text: str) -> Any:
        """A list, the name of one, or a sum of those; MISSING for anything else."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = (self.choices(side, self.text(side)) for side in (node.left, node.right))
            return MISSING if MISSING in (left, right) else left + right
        value = self.resolve(node, text)
        return value if isinstance(value, list) else MISSING

    def misread(self, node: ast.expr, value: Any) -> str | None:
        """Why the CLI's reading `value` of `node` is not Python's; None where both agree."""
        if isinstance(node, ast.Name):
            node = self.constants[node.id][1]
        if isinstance(node, ast.BinOp):
            sides = (self.misread(side, self.choices(side, self.text(side))) for side in (node.left, node.right))
            return next((why for why in sides if why), None)
        if plain(ast.literal_eval(node)) == value:
            return None
        strings = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        for text in (self.text(part) for part in strings):
            if sum(token.type == tokenize.STRING for token in tokens(text)) > 1:
                return "joined strings keep the quotes between them"
            if "\\" in text:
                return "escapes stay backslash and letter"
        return "this spelling is misread"

    def _container(self, node: ast.List | ast.Set | ast.Tuple | ast.Dict, text: str) -> Any:
        if not isinstance(node, ast.Tuple) and has_comment_or_parenthesis(text):
            return MISSING
        if isinstance(node, ast.Dict):
            pairs = [(self._item(k), self._item(v)) for k, v in zip(node.keys, node.values, strict=True) if k]
            return {k if isinstance(k, str) else str(k): v for k, v in pairs if MISSING not in (k, v)}
        items = [self._item(item) for item in node.elts]
        if isinstance(node, ast.Tuple):
            return [item for item in items if item is not MISSING]
        return MISSING if MISSING in items else items

    def _item(self, node: ast.expr) -> Any:
        return self.literal(node, self.text(node))

    def _collect(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target: ast.expr = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target = statement.target
        else:
            return
        if isinstance(target, ast.Name) and statement.value is not None:
            value = self.literal(statement.value, self.text(statement))
            if value is not MISSING:
                self.constants[target.id] = (value, statement.value)
