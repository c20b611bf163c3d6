"""What a prompt of stub_runner.py asks of the stages of its reply: a fault, {"stage": "tokenise"}, or to note times."""

import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model.request import Request
from model.sampling import Sampler
from model.service import Reply, Service
from tests.stub_model import StubPool

STAGES = ("tokenise", "submit", "prefill", "step", "sampling", "detokenise", "metrics")  # prefill, step: stub_runner.py
START = 400  # ids of a context that hold the order


class InjectedError(Exception):
    """What a stage raises."""


def raise_at(stage: str, text: str) -> None:
    """Raise where ``text`` is an order for that."""
    if f'"stage": "{stage}"' in text:
        raise InjectedError(f"injected at {stage}")


def install(service: Service, sampler: Sampler, pool: StubPool) -> None:
    """Let the stages that are no model fail when they are told to."""
    decode = service.tokenizer.decode
    _before(service.tokenizer, "encode", lambda text, *_: raise_at("tokenise", text))
    _before(service.engine, "submit", lambda ids, *_: raise_at("submit", decode(ids[:START])))

    def sampling(_: Any, rows: Any) -> None:
        for row in rows.tolist():
            raise_at("sampling", decode(pool.read[row][:START]))

    _before(sampler, "sample", sampling)
    reply = service.reply

    def faulty(request: Request) -> Reply:
        made = reply(request)
        _before(made, "_read", lambda ids: raise_at("detokenise", request.prompt))
        _before(made, "metrics", lambda: raise_at("metrics", request.prompt))
        if found := re.search(r'"pieces": "([^"]+)"', request.prompt):
            made._pieces = functools.partial(_noted, made._pieces, Path(found[1]))  # type: ignore[method-assign]
        return made

    service.reply = faulty  # type: ignore[method-assign]


def _noted(pieces: Callable[[], Iterator[str]], path: Path) -> Iterator[str]:
    """The pieces; the file gets a line with the time of each as it is handed over."""
    for piece in pieces():
        with path.open("a", encoding="ascii") as lines:
            lines.write(f"{time.monotonic()}\n")
        yield piece


def _before(owner: Any, name: str, check: Callable[..., None]) -> None:
    function = getattr(owner, name)

    def checked(*arguments: Any, **named: Any) -> Any:
        check(*arguments)
        return function(*arguments, **named)

    setattr(owner, name, checked)
