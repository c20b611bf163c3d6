"""script/predict: one prediction by a server that is started for it. The text goes to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from script import cog_schema
from script.children import exit_on_signals
from script.server import OWN, CogServer, ServerError

Schema = dict[str, Any]
EXAMPLE = 'script/predict -i prompt="def fibonacci(n):" -i max_tokens=100'
STREAM = {"Accept": "text/event-stream"}
INPUT_HELP = (
    "an input; repeats. NAME=@FILE takes the text of a file, NAME=@@TEXT is the text @TEXT. "
    "A list is JSON, or one -i for each item"
)
WORDS = {"true": True, "false": False}


class InputError(ValueError):
    """An input that predict.py does not have or whose value is of another type."""


def inputs(pairs: list[str], document: Schema) -> dict[str, Any]:
    """`name=value` strings as the typed object that the server takes; InputError names what is wrong.

    `name=@file` takes the text of a file, `name=@@text` is "@text". A list is JSON, or the name given several times.
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
        text = _text(name, text)
        schema = known[name]
        for part in schema.get("allOf", []):
            schema = {**schema, **schemas[part["$ref"].rpartition("/")[2]]}
        value = _typed(name, text, schema)
        _check_utf8(name, value)
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


def _text(name: str, text: str) -> str:
    """What `text` stands for: the content of a file after @, a text that begins with @ after @@, else itself."""
    if not text.startswith("@") or text.startswith("@@"):
        return text[1:] if text.startswith("@@") else text
    try:
        return Path(text[1:]).expanduser().read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    except (OSError, ValueError, RuntimeError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise InputError(
        f"input {name!r} cannot be read from {text[1:]!r}: {problem}; a text that begins with @ is @{text}"
    )


def _check_utf8(name: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:  # bytes of the command line that are no text, or half a surrogate pair as \\u
        raise InputError(f"input {name!r} is not UTF-8 text") from None


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
    """A list as JSON, else one item. Text that only looks like JSON is one string where strings are wanted."""
    strings = schema["type"] == "string"
    if text.lstrip().startswith("["):
        try:
            found: list[Any] = json.loads(text)
        except ValueError:
            if not strings:
                raise
        else:
            if strings and not all(isinstance(item, str) for item in found):
                raise ValueError("not all are strings")
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
        call = OWN.stream("POST", f"{url}/predictions", json={"input": values}, headers=headers, timeout=limits)
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


def run(server: CogServer, values: dict[str, Any], *, as_json: bool) -> int:
    """Start the server, predict, stop the server; returns the exit code."""
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
    server = CogServer()
    exit_on_signals(server.child.kill)
    parser = argparse.ArgumentParser(prog="script/predict", description=__doc__, epilog=f"For example: {EXAMPLE}")
    parser.add_argument("-i", dest="inputs", action="append", default=[], metavar="NAME=VALUE", help=INPUT_HELP)
    parser.add_argument("--json", action="store_true", help="print the whole prediction object instead of its text")
    options = parser.parse_args()
    try:
        settings = cog_schema.config()
        document = cog_schema.openapi(cog_schema.load(settings.file, settings.class_name), settings.sdk_version)
        return run(server, inputs(options.inputs, document), as_json=options.json)
    except (InputError, cog_schema.SchemaError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
