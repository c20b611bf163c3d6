"""script/predict's -i name=value: typed by the schema, refused by name."""

from pathlib import Path
from typing import Any

import pytest

from script import cog_schema
from script.client import InputError, inputs
from script.cog_parse import parse

RUNNER = """from cog import BaseRunner, Input
class Runner(BaseRunner):
    def run(
        self,
        prompt: str,
        chat: bool = False,
        max_tokens: int = Input(default=4, ge=1, le=100),
        temperature: float = Input(default=1.0, ge=0.0),
        mode: str = Input(default="fast", choices=["fast", "exact"]),
        stop: list[str] = [],
        ids: list[int] = [],
        seed: int | None = None,
        more: dict = {},
    ) -> str: ...
"""
DOCUMENT = cog_schema.openapi(parse(RUNNER, "Runner"), "0.23.1")


@pytest.mark.parametrize(
    ("pairs", "name", "value"),
    [
        (["prompt=a=b"], "prompt", "a=b"),
        (["prompt="], "prompt", ""),
        (["prompt=12"], "prompt", "12"),
        (["chat=true"], "chat", True),
        (["chat=False"], "chat", False),
        (["max_tokens=100"], "max_tokens", 100),
        (["temperature=0"], "temperature", 0.0),
        (["mode=exact"], "mode", "exact"),
        (["stop=a", "stop=b c"], "stop", ["a", "b c"]),
        (['stop=["a", "b\\n"]', "stop=c"], "stop", ["a", "b\n", "c"]),
        (["stop=["], "stop", ["["]),
        (['stop=["a"'], "stop", ['["a"']),
        (["prompt=@@property"], "prompt", "@property"),
        (["prompt=@@@a"], "prompt", "@@a"),
        (["ids=1", "ids=[2, 3]"], "ids", [1, 2, 3]),
        (["seed=7"], "seed", 7),
        (['more={"a": 1}'], "more", {"a": 1}),
    ],
)
def test_values_have_the_type_of_the_schema(pairs: list[str], name: str, value: Any) -> None:
    found = inputs(pairs if name == "prompt" else ["prompt=x", *pairs], DOCUMENT)[name]
    assert found == value
    assert type(found) is type(value)


def test_what_is_not_given_is_not_sent() -> None:
    assert inputs(["prompt=x"], DOCUMENT) == {"prompt": "x"}


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("two\r\nlínes\n".encode())
    assert inputs([f"prompt=@{tmp_path}/prompt.txt"], DOCUMENT) == {"prompt": "two\r\nlínes\n"}


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"input 'prompt' cannot be read from '.*/prompt\.bin': it is not UTF-8"):
        inputs([f"prompt=@{tmp_path}/prompt.bin"], DOCUMENT)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("tokens=5", "no input 'tokens'; the inputs are: prompt, chat, max_tokens, temperature, mode, stop"),
        ("max_tokens=many", "'max_tokens' takes integer from 1 up to 100, not 'many'"),
        ("max_tokens=1.5", "'max_tokens' takes integer"),
        ("max_tokens=0", "'max_tokens' takes integer from 1"),
        ("max_tokens=101", "'max_tokens' takes integer from 1 up to 100"),
        ("temperature=nan?", "'temperature' takes number from 0"),
        ("temperature=nan", "'temperature' takes number from 0"),
        ("chat=maybe", "'chat' takes true or false"),
        ("mode=slow", "'mode' takes one of fast, exact"),
        ("ids=x", "'ids' takes a list of integer"),
        ("stop=[1]", "'stop' takes a list of string"),
        ("ids=[1", "'ids' takes a list of integer"),
        ("seed=caf\udce9", "'seed' takes integer"),
        ("stop=caf\udce9", "input 'stop' is not UTF-8 text"),
        ('stop=["\\ud800"]', "input 'stop' is not UTF-8 text"),
        (
            "stop=@/no/such",
            "input 'stop' cannot be read from '/no/such': No such file or directory; a text that begins",
        ),
        ("stop=@/no/such", "begins with @ is @@/no/such"),
        ("stop=@/", "input 'stop' cannot be read from '/': Is a directory"),
        ("chat", "written name=value"),
        ("prompt=again", "'prompt' is given twice"),
    ],
)
def test_wrong_inputs_are_named(pair: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        inputs(["prompt=x", pair], DOCUMENT)
    assert message in str(caught.value)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(InputError, match="'prompt' is missing"):
        inputs(["chat=true"], DOCUMENT)
