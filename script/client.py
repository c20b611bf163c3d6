"""script/predict: one prediction by a server that is started for it. The text goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from script import cog_schema
from script.server import CogServer, ServerError

Schema = dict[str, Any]
EXAMPLE = 'script/predict -i prompt="def fibonacci(n):" -i max_tokens=100'
STREAM = {"Accept": "text/event-stream"}
WORDS = {"true": True, "false": False}


class InputError(ValueError):
    """An input that predict.py does not have or whose value is of another type."""


def inputs(pairs: list[str], document: Schema) -> dict[str, Any]:
    """`name=value` strings as the typed object that the server takes; InputError names what is wrong.

    `name=@file` takes the text of a file. A list is JSON, or the name given several times.
    """
    schemas = document["components"]["schemas"]
    known: Schema = schemas["Input"]["properties"]
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"-i {pair}: inputs are written name=value")
        if name not in known:
            raise InputError(f"there is no input {name!r}; the inputs are: {', '.join(known)}")
        if text.startswith("@"):
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        schema = known[name]
        for part in schema.get("allOf", []):
            schema = {**schema, **schemas[part["$ref"].rpartition("/")[2]]}
        value = _typed(name, text, schema)
        if schema.get("type") == "array":
            values.setdefault(name, []).extend(value)
        elif name in values:
            raise InputError(f"input {name!r} is given twice")
        else:
            values[name] = value
    missing = [name for name in schemas["Input"].get("required", []) if name not in values]
    if missing:
        raise InputError(f"input {', '.join(map(repr, missing))} is missing; for example: {EXAMPLE}")
    return values


def _typed(name: str, text: str, schema: Schema) -> Any:
    kind = schema.get("type", "string")
    try:
        if kind == "array":
            return _items(text, schema["items"])
        value = _scalar(text, kind)
    except (KeyError, ValueError):
        raise InputError(f"input {name!r} takes {_words(schema)}, not {text!r}") from None
    # Written so that NaN is out of range too.
    below = "minimum" in schema and not value >= schema["minimum"]
    above = "maximum" in schema and not value <= schema["maximum"]
    if below or above or ("enum" in schema and value not in schema["enum"]):
        raise InputError(f"input {name!r} takes {_words(schema)}, not {text!r}")
    return value


def _items(text: str, schema: Schema) -> list[Any]:
    if text.lstrip().startswith("["):
        found = json.loads(text)
        if isinstance(found, list):
            return found
    return [_scalar(text, schema["type"])]


def _scalar(text: str, kind: str) -> Any:
    if kind == "integer":
        return int(text)
    if kind == "number":
        return float(text)
    if kind == "boolean":
        return WORDS[text.lower()]
    return json.loads(text) if kind == "object" else text


def _words(schema: Schema) -> str:
    words = str(schema.get("type", "string"))
    if words == "array":
        return f"a list of {schema['items']['type']}, as JSON or one -i for each"
    if words == "boolean":
        return "true or false"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "minimum" in schema:
        words += f" from {schema['minimum']}"
    if "maximum" in schema:
        words += f" up to {schema['maximum']}"
    return words


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """The (event, data) pairs of a server-sent event stream; data is parsed JSON."""
    name = "message"
    data: list[str] = []
    for line in response.iter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield name, json.loads("\n".join(data))
            name, data = "message", []


def predict(url: str, values: dict[str, Any], *, stream: bool, tries: int = 20) -> dict[str, Any]:
    """Run one prediction; with `stream` its text goes to stdout as it comes. Returns the prediction object.

    A server may answer "at capacity" (409) while places are free: such a request is sent again.
    """
    limits = httpx.Timeout(10, read=None)
    headers = STREAM if stream else {}
    for attempt in range(tries):
        call = httpx.stream("POST", f"{url}/predictions", json={"input": values}, headers=headers, timeout=limits)
        with call as response:
            if response.status_code == 409 and attempt + 1 < tries:
                time.sleep(0.02 * (attempt + 1))
                continue
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                return _answer(response)
            for event, data in events(response):
                if event == "output":
                    print(data["chunk"], end="", flush=True)
                elif event == "completed":
                    return dict(data)
            return {"status": "failed", "error": "the stream ended before the prediction was complete"}
    raise AssertionError("unreachable")


def _answer(response: httpx.Response) -> dict[str, Any]:
    response.read()
    try:
        answer = dict(response.json())
    except ValueError:
        answer = {"error": response.text}
    if response.is_error:
        details = answer.get("detail", [])
        lines = [f"{'.'.join(map(str, d['loc'][2:]))}: {d['msg']}" for d in details] or [answer.get("error", "")]
        return {"status": "failed", "error": f"HTTP {response.status_code}: {'; '.join(lines)}"}
    return answer


class Progress:
    """One line on stderr that is written over on a terminal, and every ten seconds elsewhere."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.next = 0.0
        self.terminal = sys.stderr.isatty()

    def __call__(self, seconds: float) -> None:
        if seconds >= self.next:
            self.next = seconds + (0.5 if self.terminal else 10)
            start, end = ("\r", "") if self.terminal else ("", "\n")
            print(f"{start}{self.what}: {seconds:.0f} s", end=end, file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        """Print the last line, over the others on a terminal."""
        print(f"\r{text}" if self.terminal else text, file=sys.stderr, flush=True)


def report(prediction: dict[str, Any]) -> int:
    """Print metrics or the error to stderr; returns the exit code."""
    metrics = prediction.get("metrics", {})
    for name, value in metrics.items():
        print(f"{name}: {f'{value:.3f}' if isinstance(value, float) else value}", file=sys.stderr)
    if prediction.get("status") == "succeeded":
        return 0
    print(f"prediction {prediction.get('status')}: {prediction.get('error', '')}", file=sys.stderr)
    return 1


def run(values: dict[str, Any], *, as_json: bool) -> int:
    """Start a server, predict, stop the server; returns the exit code."""
    server = CogServer()
    progress = Progress("starting the server")
    begin = time.monotonic()
    try:
        server.start()
        server.wait(progress=progress)
        progress.done(f"ready after {time.monotonic() - begin:.1f} s")
        prediction = predict(server.url, values, stream=not as_json)
    except (ServerError, httpx.HTTPError) as error:
        print(f"\n{error}" if isinstance(error, ServerError) else f"\n{error}\n{server.tail()}", file=sys.stderr)
        return 1
    finally:
        server.stop()
    if as_json:
        print(json.dumps(prediction, indent=2, ensure_ascii=False))
    else:
        print(file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
    return report(prediction)


def main() -> int:
    """Command line of script/predict."""
    parser = argparse.ArgumentParser(prog="script/predict", description=__doc__, epilog=f"For example: {EXAMPLE}")
    parser.add_argument(
        "-i", dest="inputs", action="append", default=[], metavar="NAME=VALUE", help="an input; repeats"
    )
    parser.add_argument("--json", action="store_true", help="print the whole prediction object instead of its text")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        settings = cog_schema.config()
        document = cog_schema.openapi(cog_schema.load(settings.file, settings.class_name), settings.sdk_version)
        values = inputs(options.inputs, document)
        return run(values, as_json=options.json)
    except (InputError, cog_schema.SchemaError, OSError, UnicodeDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
