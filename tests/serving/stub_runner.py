"""The product's Runner over a stub model. What it replies is written in the prompt, as JSON:

{"say": "text"} or {"ids": [1, 2]}: the reply. {"words": 300}: that many different words. {"delay": 0.1}: seconds before
each token. {"trace": "path"}: a file that gets a line with the time (``time.monotonic()``) at which each step for this
order begins. {"fail": "error" | "oom" | "nan" | "exit" | "hang", "at": 5}: what happens instead of token 5.
{"stage": "sampling"}: an exception at this stage of the reply (stages.py). {"pieces": "path"}: a file that gets a line
with the time at which each piece of the text is handed to the server. STUB_CLOCK_JUMPS=1: the clock on the wall
jumps by up to a day, back or forth, whenever somebody looks.
With sessions the last part of the context that begins with "\\x1e" counts, without that character.
Any other prompt gets printable characters that depend on its length and its end.
"""

import functools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

import cancellation
from model.engine import Engine
from model.sampling import Sampler
from model.service import Service
from model.settings import Settings
from model.tokenizer import Tokenizer
from predict import Runner as Product
from tests.serving import stages
from tests.serving.orders import words
from tests.stub_model import StubModel, StubStatePool, mixed

VOCAB = 65536
SEPARATOR = 0x1E + 1  # the id of that byte
SEARCHED = 5000  # ids


class Runner(Product):
    """As in production, from the HTTP server to the engine's thread."""

    def setup(self) -> None:  # type: ignore[override]
        cancellation.install()
        settings, tokenizer = Settings.read(), Tokenizer(None)
        delay = float(os.environ.get("STUB_DELAY", "0.0005"))
        model = StubModel(Script(tokenizer), VOCAB, delay, recording=False)
        rows = settings.rows("cpu")
        sampler = Sampler(VOCAB, rows, model.device, tokenizer.allowed(VOCAB))
        if "STUB_CLOCK_JUMPS" in os.environ:
            _let_the_clock_jump()
        stalled_after = float(os.environ.get("STUB_STALLED_AFTER", "30"))
        pool = StubStatePool(rows)
        engine = Engine(model, sampler, pool, settings.chunk("cpu"), stalled_after, max_queue=settings.max_queue)
        self.service = Service(engine, tokenizer, settings)
        self.service.warm_up()
        stages.install(self.service, sampler, pool)


class Script:
    """The next id after all that a row has read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._encode = functools.lru_cache(maxsize=256)(tokenizer.encode)

    def __call__(self, ids: list[int]) -> int:
        tail = ids[-SEARCHED:]
        if SEPARATOR in tail:
            ids = tail[len(tail) - tail[::-1].index(SEPARATOR) :]
        order, prompt = self._order(ids)
        if order is None:
            return 33 + mixed([len(ids), *ids[-300:]], 90)
        if "trace" in order:
            with Path(order["trace"]).open("a", encoding="ascii") as trace:
                trace.write(f"{time.monotonic()}\n")
        time.sleep(order.get("delay", 0))
        drawn = len(ids) - prompt
        if drawn in (0, 3) and "stage" in order:
            stages.raise_at("step" if drawn else "prefill", json.dumps(order))
        if drawn == order.get("at"):
            return _fault(order["fail"])
        reply = order.get("ids") or self._encode(order.get("say") or words(order.get("words", 1)))
        return reply[drawn] if drawn < len(reply) else 0

    def _order(self, ids: list[int]) -> tuple[dict[str, Any] | None, int]:
        """The order at the beginning of a context and how many ids it takes; None where there is none, or none yet."""
        text = b""
        for index, token in enumerate(ids[:400]):
            text += self.tokenizer.token_bytes(token)
            if text and not text.startswith(b"{"):
                break
            if text.endswith(b"}"):
                try:
                    return json.loads(text), index + 1
                except ValueError:
                    continue
        return None, 0


def _let_the_clock_jump() -> None:
    clock = time.time
    time.time = lambda: clock() + random.uniform(-86400, 86400)


def _fault(kind: str) -> int:
    if kind == "error":
        raise ValueError("injected failure")
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "exit":
        raise SystemExit("the driver thread dies")
    if kind == "hang":
        time.sleep(3)
        return 0
    return StubModel.NAN_LOGITS
