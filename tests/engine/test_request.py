"""Inputs: every limit on both of its sides, and what is said of a fault."""

import math

import pytest

from model.errors import RequestError
from model.request import Request

LIMITS = {  # the largest and smallest values that pass, and what lies just outside
    "prompt": (["x", "x" * 2000000, "\n", "\0"], ["", "x" * 2000001]),
    "max_tokens": ([1, 65536], [0, 65537]),
    "temperature": ([0, 0.0, 5.0], [-1, -0.001, 5.001, math.nan, math.inf, -math.inf]),
    "top_p": ([0.0, 1.0], [-0.1, 1.5, math.nan]),
    "top_k": ([0, 65536], [-1, 65537]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, math.nan]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, math.inf]),
    "penalty_decay": ([0.0, 1.0], [-0.1, 1.1, math.nan]),
    "stop": ([[], ["x" * 1000], ["x"] * 64], [[""], ["a", ""], ["x" * 1001], ["x"] * 65]),
    "seed": ([0, 9007199254740991, None], [-1, 9007199254740992]),
}
WRONG_TYPES = [
    ("prompt", 3), ("prompt", None), ("prompt", "\ud800"), ("system_prompt", 3), ("chat", "yes"), ("chat", 1),
    ("max_tokens", "12"), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", "1"), ("top_k", 1.5),
    ("stop", "x"), ("stop", [3]), ("stop", None), ("seed", "1"),
]  # fmt: skip


def _request(field: str, value: object) -> Request:
    return Request.of(**({"prompt": "x"} | {field: value}))


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (good, _) in LIMITS.items() for value in good])
def test_values_within_the_limits_pass(field: str, value: object) -> None:
    assert getattr(_request(field, value), field) == value


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed"])
def test_a_whole_number_may_be_written_with_a_point(field: str) -> None:
    value = getattr(_request(field, 5.0), field)
    assert value == 5 and type(value) is int


@pytest.mark.acceptance(13)
@pytest.mark.acceptance(5)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (_, bad) in LIMITS.items() for value in bad])
def test_values_outside_are_refused_by_name_with_the_limit(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^E200 {field}: .*must be .* (from|of) ") as caught:
        _request(field, value)
    assert caught.value.field == field
    assert len(str(caught.value)) < 120, "the user's text is not repeated"


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES)
def test_wrong_types_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^E200 {field}: .*must be ") as caught:
        _request(field, value)
    assert caught.value.field == field


def test_a_missing_prompt_and_unknown_inputs_are_named() -> None:
    with pytest.raises(RequestError, match="E200 prompt: must be text of 1 to 2,000,000 characters, got nothing"):
        Request.of()
    with pytest.raises(RequestError, match="E200 promt: there is no such input; the inputs are prompt, system_prompt"):
        Request.of(prompt="x", promt="y")


def test_a_system_prompt_needs_chat() -> None:
    for text in ("Be brief.", ""):
        with pytest.raises(RequestError, match=r"E200 system_prompt: .*set chat=true"):
            Request.of(prompt="x", system_prompt=text)
    assert Request.of(prompt="x", system_prompt="Be brief.", chat=True).system_prompt == "Be brief."


def test_a_request_is_frozen_and_seed_0_is_a_seed() -> None:
    request = Request.of(prompt="x", seed=0)
    assert request.seed == 0 and Request.of(prompt="x").seed is None
    with pytest.raises(ValueError, match="frozen"):
        request.seed = 1  # type: ignore[misc]
