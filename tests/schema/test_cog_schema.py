"""The schema generator reads predict.py as the Cog CLI does, and says where that is not what Python reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from script import cog_schema
from script.cog_parse import Runner, SchemaError, parse

HERE = Path(__file__).parent
HEAD = """from cog import BaseRunner, ConcatenateIterator, Input, concurrent, streaming
LIMIT = 8
TEXT = "from a constant"
MODES = ["a", "b"]
class Runner(BaseRunner):
"""


def runner(parameter: str, *, decorators: str = "", returns: str = "str", head: str = HEAD) -> Runner:
    return parse(f"{head}{decorators}    async def run(self, {parameter}) -> {returns}:\n        pass\n", "Runner")


def properties(parsed: Runner) -> dict[str, Any]:
    return cog_schema.openapi(parsed, "0.23.1")["components"]["schemas"]["Input"]["properties"]


def test_like_cli_is_what_the_real_cli_wrote(tmp_path: Path) -> None:
    """Both samples are from the CLI 0.23.1 itself: sample_predict.py is what it was given."""
    (tmp_path / "cog.yaml").write_text('build:\n  sdk_version: "0.23.1"\nrun: "sample_predict.py:Runner"\n')
    (tmp_path / "sample_predict.py").write_text((HERE / "sample_predict.py").read_text())
    assert cog_schema.main(["--root", str(tmp_path), "--like-cli"]) == 0
    written = json.loads((tmp_path / ".cog/openapi_schema.json").read_text())
    assert written == json.loads((HERE / "sample_openapi_schema.json").read_text())


def test_strict_names_what_the_cli_garbles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cog.yaml").write_text('build:\n  sdk_version: "0.23.1"\nrun: "sample_predict.py:Runner"\n')
    (tmp_path / "sample_predict.py").write_text((HERE / "sample_predict.py").read_text())
    assert cog_schema.main(["--root", str(tmp_path)]) == 1
    assert not (tmp_path / ".cog").exists()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["sample_predict.py:21", "named_limit"],
        ["sample_predict.py:22", "computed_limit"],
        ["sample_predict.py:23", "joined"],
    ]
    assert "le=LIMIT is a name" in lines[0]
    assert "le=2**31 - 1 is computed" in lines[1]
    assert "joined strings keep the quotes" in lines[2]


def test_our_predict_py_is_clean(tmp_path: Path) -> None:
    """What the CLI writes for predict.py is what predict.py says: no bound dropped, no text garbled."""
    strict, like_cli = tmp_path / "strict.json", tmp_path / "cli.json"
    assert cog_schema.main(["--output", str(strict)]) == 0
    assert cog_schema.main(["--output", str(like_cli), "--like-cli"]) == 0
    assert strict.read_text() == like_cli.read_text()


@pytest.mark.parametrize(
    ("parameter", "dropped"),
    [
        ("n: int = Input(default=1, le=LIMIT)", "le"),
        ("n: int = Input(default=1, le=2**31 - 1)", "le"),
        ("n: int = Input(default=1, ge=- 5)", "ge"),
        ("n: int = Input(default=1, le=0x10)", "le"),
        ("n: int = Input(default=1, le=(5))", "le"),
        ("n: str = Input(default='', max_length=LIMIT)", "max_length"),
        ("n: str = Input(default='', regex=TEXT)", "regex"),
        ("n: str = Input(default='', description=f'{LIMIT}')", "description"),
        ("n: str = Input(default='', description=('a' 'b'))", "description"),
        ("n: str = Input(default='', description=LIMIT)", "description"),
        ("n: str = Input(default=str())", "default"),
        ("n: list[str] = Input(default=[  # nothing\n])", "default"),
        ("n: str = Input(default='', deprecated=LIMIT)", "deprecated"),
    ],
)
def test_dropped_keywords_are_named(parameter: str, dropped: str) -> None:
    parsed = runner(parameter)
    texts = [problem.text for problem in parsed.problems if problem.name == "n"]
    assert any(text.startswith(f"{dropped}=") and "drops it without a word" in text for text in texts)
    names = {"le": "maximum", "ge": "minimum", "max_length": "maxLength", "regex": "pattern"}
    assert names.get(dropped, dropped) not in properties(parsed)["n"]


@pytest.mark.parametrize(
    ("parameter", "key", "reading", "why"),
    [
        (r'n: str = Input(default="a\n")', "default", r"a\n", "escapes"),
        (r'n: str = "a\tb"', "default", r"a\tb", "escapes"),
        (r'n: str = Input(default="", description="one\ttwo")', "description", r"one\ttwo", "escapes"),
        (r'n: list[str] = Input(default=["\n\n", "b"])', "default", [r"\n\n", "b"], "escapes"),
        ("n: str = Input(default='a' 'b')", "default", "a' 'b", "joined strings"),
        ("n: str = Input(default='', description='a' 'b')", "description", "a' 'b", "joined strings"),
        ('n: str = Input(default="", description=r"""a""")', "description", '""a""', "misread"),
    ],
)
def test_garbled_text_is_named(parameter: str, key: str, reading: Any, why: str) -> None:
    parsed = runner(parameter)
    assert properties(parsed)["n"][key] == reading
    assert [why in problem.text and problem.text.startswith(key) for problem in parsed.problems] == [True]


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("n: int", {"type": "integer"}),
        ("n: int = 4", {"type": "integer", "default": 4}),
        (
            "n: float = Input(default=-1.5, ge=-2, le=1e2)",
            {"type": "number", "default": -1.5, "minimum": -2, "maximum": 100},
        ),
        ("n: str = Input(default=TEXT)", {"type": "string", "default": "from a constant"}),
        ("n: str = Input(description=TEXT)", {"type": "string", "description": "from a constant"}),
        ("n: str = Input(default=r'\\d', regex=r'^\\d$')", {"type": "string", "default": r"\d", "pattern": r"^\d$"}),
        ("n: str = Input(default='', deprecated=True)", {"type": "string", "default": "", "deprecated": True}),
        ("n: list[str] = Input(default=MODES)", {"type": "array", "items": {"type": "string"}, "default": ["a", "b"]}),
        ("n: 'bool | None' = None", {"type": "boolean", "nullable": True, "default": None}),
        ("n: dict = Input(default={'a': 1})", {"type": "object", "default": {"a": 1}}),
        ("n: dict[str, int]", {"type": "object"}),
        ("n: int | str", {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ("*, n: bool = False", {"type": "boolean", "default": False}),
    ],
)
def test_clean_inputs(parameter: str, expected: dict[str, Any]) -> None:
    parsed = runner(parameter)
    assert parsed.problems == []
    assert properties(parsed)["n"] == {"title": "N", "x-order": 0, **expected}


def test_choices_may_be_names_and_sums() -> None:
    parsed = runner("n: str = Input(default='a', choices=MODES + ['c'])")
    assert parsed.problems == []
    assert cog_schema.openapi(parsed, "0")["components"]["schemas"]["n"]["enum"] == ["a", "b", "c"]


def test_left_out_inputs_are_named() -> None:
    parsed = runner("prompt, n: int = Input(3, ge=1), *rest: int, seed: int = Input(default=None)")
    assert {problem.name for problem in parsed.problems} == {"prompt", "n", "rest", "seed"}


@pytest.mark.parametrize(
    "parameter",
    [
        "n: list[list[str]]",
        "n: complex",
        "n: list",
        "n=4",
        "n: str = str()",
        "n: str = Input(default='a', choices=sorted(MODES))",
        "n: str = Input(default_factory=str)",
        "n: int | str = Input(default=1, ge=0)",
    ],
)
def test_what_the_cli_refuses_is_an_error(parameter: str) -> None:
    with pytest.raises(SchemaError, match="line 6: "):
        runner(parameter)


@pytest.mark.parametrize(("decorator", "slots"), [("concurrent(max=64)", 64), ("concurrent", 1), ("concurrent()", 1)])
def test_concurrency_is_read(decorator: str, slots: int) -> None:
    assert runner("n: int", decorators=f"    @{decorator}\n").concurrency == slots


@pytest.mark.parametrize("arguments", ["max=LIMIT", "max=2**9", "64", "max=0", "max='64'", "max=64, min=1"])
def test_concurrency_must_be_a_literal(arguments: str) -> None:
    with pytest.raises(SchemaError, match="@concurrent takes max= with a literal integer"):
        runner("n: int", decorators=f"    @concurrent({arguments})\n")


def test_concurrency_needs_async() -> None:
    with pytest.raises(SchemaError, match="needs async def"):
        parse(f"{HEAD}    @concurrent(max=2)\n    def run(self) -> str: ...\n", "Runner")


def test_streaming_is_seen_only_when_imported_from_cog() -> None:
    stream = {"decorators": "    @streaming\n", "returns": "ConcatenateIterator[str]"}
    assert runner("n: int", **stream).streaming
    other = runner("n: int", **stream, head=HEAD.replace(", streaming", "\nfrom other import streaming"))
    assert not other.streaming
    assert [problem.name for problem in other.problems] == ["streaming"]
    with pytest.raises(SchemaError, match="needs an iterator"):
        runner("n: int", decorators="    @streaming\n")


def test_a_return_annotation_is_needed() -> None:
    with pytest.raises(SchemaError, match="no return annotation"):
        parse(f"{HEAD}    def run(self): ...\n", "Runner")
    with pytest.raises(SchemaError, match="no class Other"):
        parse(HEAD + "    def run(self) -> str: ...\n", "Other")
