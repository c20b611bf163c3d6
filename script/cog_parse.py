"""Reads a Cog runner the way the Cog CLI reads it: statically, from the source text, never by importing it.

The CLI (0.23.1; its rules are in pkg/schema of github.com/replicate/cog) keeps only what it can read as a
literal. A bound that is a name or a computation is dropped without a word, adjacent string literals keep the
quotes between them, and escapes stay backslash and letter. `parse` gives what the CLI would make of a file,
and one `Problem` for every place where that is not what Python makes of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from script.cog_literals import MISSING, Literals, number, string

Function = ast.FunctionDef | ast.AsyncFunctionDef
BOUNDS = {"ge": "minimum", "le": "maximum", "min_length": "minLength", "max_length": "maxLength"}
PRIMITIVES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
PRIMITIVES |= {"dict": "object", "Dict": "object", "Any": "object"}
ITERATORS = ("Iterator", "AsyncIterator", "ConcatenateIterator", "AsyncConcatenateIterator")


class SchemaError(Exception):
    """The CLI would refuse this file, or the file uses a form that is not supported here."""


@dataclass(frozen=True)
class Problem:
    """Something the CLI drops or garbles silently: 1-based line, the input's name, what happens."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class InputType:
    """JSON schema of an annotation; `kind` is plain, array or union."""

    schema: dict[str, Any]
    nullable: bool = False
    kind: str = "plain"


@dataclass
class InputField:
    """One input: its type, and the keywords of `Input(...)` under their JSON schema names."""

    name: str
    type: InputType
    default: Any = MISSING
    choices: list[Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runner:
    """What the CLI knows of a runner. `concurrency` is None without `@concurrent`."""

    inputs: list[InputField]
    output: dict[str, Any]
    streaming: bool
    concurrency: int | None
    problems: list[Problem]


def parse(source: str, class_name: str) -> Runner:
    """Read run() (or predict()) of `class_name` in `source`; SchemaError where the CLI would stop."""
    tree = ast.parse(source)
    return _Parser(tree, Literals(source, tree)).runner(class_name)


class _Parser:
    def __init__(self, tree: ast.Module, literals: Literals) -> None:
        self.tree = tree
        self.literals = literals
        self.imports = dict(_imports(tree))
        self.problems: list[Problem] = []

    def runner(self, class_name: str) -> Runner:
        """What the CLI makes of the class: its inputs in order, its output, its decorators."""
        function = _method(self.tree, class_name)
        if function.returns is None:
            raise SchemaError(f"line {function.lineno}: {function.name}() has no return annotation")
        output = _output(function.returns)
        decorators = {self._decorator(node): node for node in function.decorator_list}
        streaming = "streaming" in decorators
        if streaming and "x-cog-array-type" not in output:
            raise SchemaError(f"line {function.lineno}: @streaming needs an iterator as return annotation")
        concurrency = _concurrency(decorators["concurrent"]) if "concurrent" in decorators else None
        if (concurrency or 1) > 1 and not isinstance(function, ast.AsyncFunctionDef):
            raise SchemaError(f"line {function.lineno}: @concurrent(max > 1) needs async def {function.name}")
        inputs = [found for arg, default in self._parameters(function) for found in self._input(arg, default)]
        return Runner(inputs, output, streaming, concurrency, self.problems)

    def _parameters(self, function: Function) -> Iterator[tuple[ast.arg, ast.expr | None]]:
        arguments = function.args
        for star in (arguments.vararg, arguments.kwarg):
            if star is not None:
                self._problem(star, star.arg, "the CLI leaves a starred parameter out")
        positional = [arg for arg in arguments.posonlyargs + arguments.args if arg.arg != "self"]
        required = len(positional) - len(arguments.defaults)
        yield from ((arg, None) for arg in positional[:required])
        yield from zip(positional[required:], arguments.defaults, strict=True)
        yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)

    def _input(self, arg: ast.arg, default: ast.expr | None) -> Iterator[InputField]:
        if arg.annotation is None:
            if default is not None:
                raise SchemaError(f"line {arg.lineno}: {arg.arg} has no type annotation")
            self._problem(arg, arg.arg, "the CLI leaves an input without a type annotation out")
            return
        try:
            result = InputField(arg.arg, input_type(arg.annotation))
        except SchemaError as error:
            raise SchemaError(f"line {arg.lineno}: {arg.arg}: {error}") from None
        if isinstance(default, ast.Call) and self._origin(default.func) == ("cog", "Input"):
            self._read_call(result, default)
        elif default is not None:
            result.default = self._default(result, default)
        if result.default is None and not result.type.nullable:
            self._problem(arg, arg.arg, "default None for a type without None: the CLI makes the input required")
        if result.type.kind == "union" and (result.choices or {*BOUNDS.values(), "pattern"} & set(result.extra)):
            raise SchemaError(f"line {arg.lineno}: {arg.arg}: a union takes no bounds and no choices")
        yield result

    def _default(self, result: InputField, node: ast.expr) -> Any:
        value = self.literals.resolve(node, self.literals.text(node))
        if value is MISSING:
            raise SchemaError(f"line {node.lineno}: {result.name}: the default is not a literal")
        self._check_reading(result, "default", node, value)
        return value

    def _read_call(self, result: InputField, call: ast.Call) -> None:
        for argument in call.args:
            self._problem(argument, result.name, "the CLI drops positional arguments of Input() without a word")
        for keyword in call.keywords:
            if keyword.arg is None:
                self._problem(keyword, result.name, "the CLI drops ** in Input() without a word")
                continue
            text = self.literals.text(keyword)
            value = self._keyword(result, keyword.arg, keyword.value, text)
            if value is MISSING:
                why = f"{keyword.arg}={text} is {_form(keyword.value)}"
                self._problem(keyword, result.name, f"{why}: the CLI drops it without a word; write a literal")
            else:
                self._check_reading(result, keyword.arg, keyword.value, value)

    def _keyword(self, result: InputField, key: str, node: ast.expr, text: str) -> Any:
        """Store what the CLI makes of `key=text` in `result` and return it; MISSING where it drops the keyword."""
        if key == "default":
            value = self.literals.resolve(node, text)
            result.default = None if value is MISSING else value
        elif key == "choices":
            value = result.choices = self.literals.choices(node, text)
            if value is MISSING:
                raise SchemaError(f"line {node.lineno}: {result.name}: choices must be a list of literals")
        elif key in BOUNDS:
            value = _keep(result, BOUNDS[key], number(text))
            if value is not MISSING and "_" in text:
                self._problem(node, result.name, f"{key}={text}: write the digits without underscores for the CLI")
        elif key == "description":
            value = self.literals.resolve(node, text)
            value = _keep(result, key, value if isinstance(value, str) else MISSING)
        elif key == "regex":
            value = _keep(result, "pattern", string(text))
        elif key == "deprecated":
            value = _keep(result, key, {"True": True, "False": False}.get(text, MISSING))
        else:
            raise SchemaError(f"line {node.lineno}: {result.name}: Input({key}=...) is not supported")
        return value

    def _check_reading(self, result: InputField, key: str, node: ast.expr, value: Any) -> None:
        why = self.literals.misread(node, value)
        if why is not None:
            self._problem(node, result.name, f"{key}: {why}: the CLI reads {value!r}; write one plain literal")

    def _origin(self, node: ast.expr) -> tuple[str, str]:
        """The module and the name that an expression such as `Input` or `cog.streaming` stands for."""
        module, _, name = ast.unparse(node).rpartition(".")
        if module:
            return (self.imports.get(module, ("", ""))[0], name)
        return self.imports.get(name, ("cog", "Input") if name == "Input" else ("", name))

    def _decorator(self, node: ast.expr) -> str:
        target = node.func if isinstance(node, ast.Call) else node
        module, name = self._origin(target)
        if name in ("streaming", "concurrent") and module != "cog":
            self._problem(node, name, "not imported from cog at the top of the file: the CLI overlooks it")
            return ""
        return name

    def _problem(self, node: ast.expr | ast.arg | ast.keyword, name: str, text: str) -> None:
        self.problems.append(Problem(node.lineno, name, text))


def input_type(node: ast.expr) -> InputType:
    """The CLI's type of an input's annotation; SchemaError for one that it refuses or that is not supported."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return input_type(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(list(_members(node)))
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer in ("dict", "Dict"):
            return InputType({"type": "object"})
        if outer == "Optional" and len(arguments) == 1:
            return _union([*arguments, ast.Constant(None)])
        if outer == "Union":
            return _union(arguments)
        if outer in ("list", "List") and len(arguments) == 1:
            inner = input_type(arguments[0])
            if inner.kind != "plain" or inner.nullable:
                raise SchemaError(f"{ast.unparse(node)}: a list holds str, int, float, bool or dict")
            return InputType({"type": "array", "items": inner.schema}, kind="array")
    name = ast.unparse(node).rpartition(".")[2]
    if not isinstance(node, ast.Name | ast.Attribute) or name not in PRIMITIVES:
        raise SchemaError(f"type {ast.unparse(node)} is not supported")
    return InputType({"type": PRIMITIVES[name]})


def _union(members: list[ast.expr]) -> InputType:
    types = [input_type(m) for m in members if not (isinstance(m, ast.Constant) and m.value is None)]
    nullable = len(types) < len(members) or any(t.nullable for t in types)
    if len(types) == 1:
        return InputType({**types[0].schema, **({"nullable": True} if nullable else {})}, nullable, types[0].kind)
    if not types or any(t.nullable or t.kind == "union" for t in types):
        raise SchemaError("a union holds plain types, lists and one None")
    variants = [{**t.schema, **({"nullable": True} if nullable else {})} for t in types]
    return InputType({"anyOf": variants, **({"nullable": True} if nullable else {})}, nullable, "union")


def _members(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from _members(node.left)
        yield from _members(node.right)
    else:
        yield node


def _output(node: ast.expr) -> dict[str, Any]:
    outer = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Subscript) else ""
    if not isinstance(node, ast.Subscript) or outer not in ITERATORS:
        plain = input_type(node)
        if plain.nullable or plain.kind == "union":
            raise SchemaError(f"line {node.lineno}: {ast.unparse(node)} is no return type for the CLI")
        return plain.schema
    output = {"type": "array", "items": input_type(node.slice).schema, "x-cog-array-type": "iterator"}
    if "Concatenate" in outer:
        if ast.unparse(node.slice) != "str":
            raise SchemaError(f"line {node.lineno}: {outer} needs str")
        output["x-cog-array-display"] = "concatenate"
    return output


def _method(tree: ast.Module, class_name: str) -> Function:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            functions = [n for n in node.body if isinstance(n, Function) and n.name in ("run", "predict")]
            if len(functions) != 1:
                raise SchemaError(f"line {node.lineno}: {class_name} must define run() or predict(), one of them")
            return functions[0]
    raise SchemaError(f"there is no class {class_name} at the top level of the file")


def _concurrency(node: ast.expr) -> int:
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return 1
    value = node.keywords[0].value if len(node.keywords) == 1 and node.keywords[0].arg == "max" else None
    if node.args or not isinstance(value, ast.Constant) or type(value.value) is not int or value.value < 1:
        raise SchemaError(f"line {node.lineno}: @concurrent takes max= with a literal integer of at least 1")
    return value.value


def _keep(result: InputField, target: str, value: Any) -> Any:
    if value is not MISSING and value is not False:
        result.extra[target] = value
    return value


def _form(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return "a name"
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call | ast.Attribute):
        return "computed"
    return "not a literal that the CLI reads"


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from ((a.asname or a.name, (node.module or "", a.name)) for a in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.asname or a.name, (a.name, a.name)) for a in node.names)
