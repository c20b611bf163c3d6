"""What the server takes and what it refuses, through HTTP."""

from typing import Any

import pytest

from model.request import Request
from script.cog_schema import ROOT, config, load, openapi
from tests.serving.orders import order
from tests.serving.server import Server

# Refused by the server itself, from the schema of predict.py: every bound, and every type.
REFUSED = [
    ("prompt", ""), ("prompt", "x" * 2000001), ("prompt", 3), ("prompt", None),
    ("system_prompt", "x" * 2000001), ("system_prompt", 3), ("system_prompt", None),
    ("chat", "yes"), ("chat", 1),
    ("max_tokens", 0), ("max_tokens", 65537), ("max_tokens", "12"), ("max_tokens", 1.5),
    ("temperature", -0.001), ("temperature", 5.001), ("temperature", "1"),
    ("top_p", -0.001), ("top_p", 1.5), ("top_k", -1), ("top_k", 65537),
    ("presence_penalty", -2.1), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", 2.1),
    ("penalty_decay", -0.1), ("penalty_decay", 1.1),
    ("stop", "x"), ("stop", [3]), ("stop", None),
    ("seed", -1), ("seed", 9007199254740992), ("seed", "1"), ("seed", None),
]  # fmt: skip
# Refused by us: what a schema of Cog cannot say.
FAILED = [
    ("stop", [""]), ("stop", ["a", ""]), ("stop", ["x" * 1001]), ("stop", ["x"] * 65), ("system_prompt", "Be brief."),
]  # fmt: skip
TAKEN = [
    ("prompt", "\n"), ("max_tokens", 65536), ("temperature", 5), ("temperature", 0), ("top_p", 1.0), ("top_p", 0),
    ("top_k", 65536), ("presence_penalty", -2), ("frequency_penalty", 2.0), ("penalty_decay", 0), ("penalty_decay", 1),
    ("stop", []), ("stop", ["x" * 1000] * 64), ("seed", 0), ("seed", 9007199254740991), ("chat", True),
]  # fmt: skip


def _names(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{field}-{str(value)[:12]}-{len(str(value))}" for field, value in cases]


@pytest.mark.acceptance(13)
@pytest.mark.acceptance(5)
@pytest.mark.parametrize(("field", "value"), REFUSED, ids=_names(REFUSED))
def test_a_value_past_a_bound_is_a_422_that_names_the_input(stub: Server, field: str, value: Any) -> None:
    response = stub.post({"prompt": order(words=3)} | {field: value})
    assert response.status_code == 422
    (detail,) = response.json()["detail"]
    assert detail["loc"][-1].split("/")[0] == field and detail["msg"]


@pytest.mark.parametrize(("field", "value"), FAILED, ids=_names(FAILED))
def test_what_the_schema_cannot_say_fails_with_a_message_that_names_the_input(
    stub: Server, field: str, value: Any
) -> None:
    for prediction in (
        stub.predict(**{"prompt": "x", field: value}),
        stub.stream(**{"prompt": "x", field: value}).final,
    ):
        assert prediction["status"] == "failed"
        assert f"E200 {field}: " in prediction["error"]


@pytest.mark.parametrize(("field", "value"), TAKEN, ids=_names(TAKEN))
def test_values_on_the_bounds_are_taken(stub: Server, field: str, value: Any) -> None:
    inputs = {"prompt": order(words=3), "max_tokens": 3} | {field: value}
    if inputs["prompt"] != "\n" and field != "chat":
        assert stub.text(**inputs)
    else:
        assert stub.predict(**inputs)["status"] == "succeeded"


def test_the_longest_prompt_is_read(stub: Server) -> None:
    prediction = stub.predict("ab " * 666666 + "ab", max_tokens=1)
    assert prediction["status"] == "succeeded"
    assert prediction["metrics"]["prompt_tokens"] > 600000


def test_a_prompt_is_required(stub: Server) -> None:
    response = stub.post({"max_tokens": 3})
    assert response.status_code == 422
    assert response.json()["detail"] == [
        {"loc": ["body", "input", "prompt"], "msg": "Field required", "type": "value_error.missing"}
    ]


def test_json_knows_no_nan(stub: Server) -> None:
    for value in ("NaN", "Infinity", "1e999"):
        body = f'{{"input": {{"prompt": "x", "temperature": {value}}}}}'
        response = stub.client.post("/predictions", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 422)


def test_unknown_inputs_are_dropped_and_logged(stub: Server) -> None:
    assert stub.predict(order(words=3), max_token=1)["metrics"]["completion_tokens"] > 1
    assert "max_token" in stub.log()


def test_errors_do_not_repeat_the_text(stub: Server) -> None:
    secret = "cancelled, and a secret"
    prediction = stub.predict(secret, system_prompt=secret)
    assert prediction["status"] == "failed" and secret not in prediction["error"]


def test_the_limits_that_clients_see_are_those_of_the_request() -> None:
    """predict.py has to repeat them as literals: here they are kept in step."""
    settings = config(ROOT)
    shown = openapi(load(settings.file, settings.class_name), settings.sdk_version)["components"]["schemas"]["Input"]
    meant = Request.model_json_schema()["properties"]
    assert list(shown["properties"]) == list(meant)
    for name, entry in shown["properties"].items():
        wanted = next((one for one in meant[name].get("anyOf", []) if one["type"] != "null"), meant[name])
        for key in ("type", "minimum", "maximum", "minLength") + (("maxLength",) if name != "stop" else ()):
            assert entry.get(key) == wanted.get(key), f"{name}: {key}"
        assert entry.get("default") == meant[name].get("default"), name


def test_the_server_publishes_its_inputs(stub: Server) -> None:
    document = stub.client.get("/openapi.json").json()
    inputs = document["components"]["schemas"]["Input"]["properties"]
    assert set(inputs) == set(Request.model_fields)
    assert all(entry["description"] for entry in inputs.values())
    assert document["paths"]["/predictions"]["post"]["x-cog-streaming"] is True
