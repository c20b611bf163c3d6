"""Writes the OpenAPI schema that Cog's server needs, from the text of predict.py.

In an image the Cog CLI writes this file; outside one nobody does, and without it the server neither checks
inputs nor streams. The result equals the CLI's for the same predict.py. By default it is an error where the
CLI would drop or garble something without a word; --like-cli writes what the CLI writes all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from script.cog_literals import MISSING
from script.cog_parse import InputField, Runner, SchemaError, parse

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path(".cog/openapi_schema.json")  # where the server looks, in its working directory
ENUM = "An enumeration."


@dataclass(frozen=True)
class CogConfig:
    """The two entries of cog.yaml that a schema depends on: `run: "file:class"` and `sdk_version`."""

    file: Path
    class_name: str
    sdk_version: str


def config(root: Path = ROOT) -> CogConfig:
    """Read `root`/cog.yaml."""
    entries = yaml.safe_load((root / "cog.yaml").read_text(encoding="utf-8"))
    file, _, class_name = entries["run"].partition(":")
    return CogConfig(root / file, class_name, entries["build"]["sdk_version"])


def load(path: Path, class_name: str, *, like_cli: bool = False) -> Runner:
    """Parse a runner; without `like_cli`, SchemaError lists what the CLI would drop or garble silently."""
    try:
        runner = parse(path.read_text(encoding="utf-8"), class_name)
    except (SchemaError, SyntaxError) as error:
        raise SchemaError(f"{path.name}: {error}") from None
    if runner.problems and not like_cli:
        raise SchemaError("\n".join(f"{path.name}:{p.line}: {p.name}: {p.text}" for p in runner.problems))
    return runner


def openapi(runner: Runner, version: str) -> dict[str, Any]:
    """The whole OpenAPI document; `version` is the Cog version it names."""
    schemas: dict[str, Any] = {"Input": _input_schema(runner), "Output": {"title": "Output", **runner.output}}
    for entry in runner.inputs:
        if entry.choices:
            kind = entry.type.schema.get("type", "string")
            schemas[entry.name] = {"title": entry.name, "description": ENUM, "enum": entry.choices, "type": kind}
    statuses = ["starting", "processing", "succeeded", "canceled", "failed"]
    schemas["Status"] = {"title": "Status", "description": ENUM, "enum": statuses, "type": "string"}
    schemas["PredictionRequest"] = _object("PredictionRequest", id=_string("Id"), input=_ref("Input"))
    schemas["PredictionResponse"] = _response_schema()
    errors = {"title": "Detail", "type": "array", "items": _ref("ValidationError")}
    schemas["HTTPValidationError"] = _object("HTTPValidationError", detail=errors)
    items = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    location = {"title": "Location", "type": "array", "items": items}
    error = _object("ValidationError", loc=location, msg=_string("Message"), type=_string("Error Type"))
    schemas["ValidationError"] = {**error, "required": ["loc", "msg", "type"]}
    info = {"title": "Cog", "version": version}
    return {"openapi": "3.0.2", "info": info, "paths": _paths(runner), "components": {"schemas": schemas}}


def text(root: Path = ROOT, *, like_cli: bool = False) -> tuple[str, Runner]:
    """The schema of cog.yaml's runner as the file holds it, and the runner."""
    settings = config(root)
    runner = load(settings.file, settings.class_name, like_cli=like_cli)
    return json.dumps(openapi(runner, settings.sdk_version), indent=2) + "\n", runner


def write(root: Path = ROOT, output: Path | None = None, *, like_cli: bool = False) -> Runner:
    """Write the schema of cog.yaml's runner to `output` (default: where the server looks) and return the runner.

    A file that says so already is left alone; another one is replaced at once, for a server may be reading it.
    """
    schema, runner = text(root, like_cli=like_cli)
    output = output or root / OUTPUT
    if output.is_file() and output.read_text(encoding="utf-8") == schema:
        return runner
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        new.write_text(schema, encoding="utf-8")
        new.replace(output)
    finally:
        new.unlink(missing_ok=True)
    return runner


def _input_schema(runner: Runner) -> dict[str, Any]:
    properties = {entry.name: _property(entry, order) for order, entry in enumerate(runner.inputs)}
    schema = {"title": "Input", "type": "object", "properties": properties}
    required = [entry.name for entry in runner.inputs if _is_required(entry)]
    return {**schema, "required": required} if required else schema


def _property(entry: InputField, order: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"x-order": order}
    if entry.choices:
        schema["allOf"] = [_ref(entry.name)]
    else:
        schema |= {"title": _title(entry.name), **entry.type.schema}
    if _has_default(entry):
        schema["default"] = _as_go_writes(entry.default)
    if entry.type.nullable:
        schema["nullable"] = True
    return schema | entry.extra


def _has_default(entry: InputField) -> bool:
    """A default of None counts only where the type has None."""
    return entry.default is not MISSING and (entry.default is not None or entry.type.nullable)


def _is_required(entry: InputField) -> bool:
    return not _has_default(entry) and (not entry.type.nullable or entry.type.kind == "union")


def _as_go_writes(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _title(name: str) -> str:
    return " ".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _string(title: str, **more: str) -> dict[str, Any]:
    return {"title": title, "type": "string", **more}


def _object(title: str, **properties: Any) -> dict[str, Any]:
    return {"title": title, "type": "object", "properties": properties}


def _response_schema() -> dict[str, Any]:
    times = ("created_at", "started_at", "completed_at")
    texts = ("id", "version", "status", "error", "logs")
    properties = {name: _string(_title(name), format="date-time") for name in times}
    properties |= {name: _string(_title(name)) for name in texts}
    metrics = {"title": "Metrics", "type": "object"}
    return _object("PredictionResponse", input=_ref("Input"), output=_ref("Output"), metrics=metrics, **properties)


def _paths(runner: Runner) -> dict[str, Any]:
    ok = _answer("Successful Response", {})
    refused = _answer("Validation Error", _ref("HTTPValidationError"))
    predict: dict[str, Any] = {
        "summary": "Predict",
        "description": "Run a single prediction on the model",
        "operationId": "predict_predictions_post",
        "requestBody": {"content": {"application/json": {"schema": _ref("PredictionRequest")}}},
        "responses": {"200": _answer("Successful Response", _ref("PredictionResponse")), "422": refused},
    }
    if runner.streaming:
        predict["x-cog-streaming"] = True
    cancel = {
        "summary": "Cancel",
        "operationId": "cancel_predictions__prediction_id__cancel_post",
        "parameters": [{"required": True, "schema": _string("Prediction Id"), "name": "prediction_id", "in": "path"}],
        "responses": {"200": ok, "422": refused},
    }
    health = "healthcheck_health_check_get"
    return {
        "/": {"get": {"summary": "Root", "operationId": "root__get", "responses": {"200": ok}}},
        "/health-check": {"get": {"summary": "Healthcheck", "operationId": health, "responses": {"200": ok}}},
        "/predictions": {"post": predict},
        "/predictions/{prediction_id}/cancel": {"post": cancel},
    }


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def main(arguments: list[str] | None = None) -> int:
    """Command line of script/schema."""
    parser = argparse.ArgumentParser(prog="script/schema", description=__doc__.split("\n\n")[0])
    parser.add_argument("--like-cli", action="store_true", help="write what the CLI writes, whatever it garbles")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with cog.yaml (default: this checkout)")
    parser.add_argument("--output", type=Path, help=f"the file to write (default: {OUTPUT} there); - prints it")
    options = parser.parse_args(arguments)
    try:
        root = options.root.resolve()
        if str(options.output) == "-":
            print(text(root, like_cli=options.like_cli)[0], end="")
        else:
            write(root, options.output, like_cli=options.like_cli)
    except (SchemaError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
