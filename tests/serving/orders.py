"""What the stub model of stub_runner.py is to reply, written as a prompt."""

import json
from typing import Any


def order(**parts: Any) -> str:
    """A prompt that is an order: say=, ids=, words=, delay=, trace=, fail=, at= as in stub_runner.py."""
    return json.dumps(parts)


def words(count: int) -> str:
    """The text of ``order(words=count)``: that many different words."""
    return " ".join(f"w{n}" for n in range(count))
