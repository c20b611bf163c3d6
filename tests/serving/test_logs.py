"""What an operator reads in the log, and what is not in it."""

import re
import time
from collections.abc import Callable

import pytest

from model.settings import Settings, SettingsError
from tests.serving.orders import order
from tests.serving.server import Server


def _lines(server: Server, part: str, count: int = 1) -> list[str]:
    """The lines with ``part``, once there are so many: they come a moment after their cause."""
    until = time.monotonic() + 10
    while len(found := [line for line in server.log().splitlines() if part in line]) < count:
        assert time.monotonic() < until, server.log()[-2000:]
        time.sleep(0.05)
    return found


def test_each_reply_has_a_line_without_its_text(stub: Server) -> None:
    # By what only these replies have: the lines of those before them may still be on their way.
    length, memory = "completion_tokens=37 finish_reason=length", "finish_reason=error"
    before, failures = len(_lines(stub, length, 0)), len(_lines(stub, memory, 0))
    secret = "a secret of whoever asks"
    text = stub.text(secret, max_tokens=37)
    line = _lines(stub, length, before + 1)[-1]
    for part in ("event=reply", "level=info", "time_to_first_token=0.", "queue_time="):
        assert part in line
    assert stub.predict(order(words=9, fail="oom", at=3))["status"] == "failed"
    assert any("out of memory" in one for one in _lines(stub, memory, failures + 1)[failures:])
    assert secret not in stub.log() and text[:12] not in stub.log()


def test_a_reply_whose_reader_left_has_its_line_too(stub: Server) -> None:
    before = len(_lines(stub, "finish_reason=cancelled", 0))
    with stub.open_stream(order(words=5000), max_tokens=60000) as events:
        next(event for event in events if event.name == "output")
    _lines(stub, "finish_reason=cancelled", before + 1)


def test_clients_do_not_see_the_log(stub: Server) -> None:
    streamed = stub.stream(order(words=5))
    assert not streamed.named("log") and streamed.final["logs"] == ""


def test_counters_and_texts_where_they_are_asked_for(launch: Callable[..., Server]) -> None:
    server = launch(concurrency=4, COG_RWKV_LOG_INTERVAL="0.3", COG_RWKV_LOG_TEXT="1")
    before = _lines(server, "event=counters")[-1]
    server.text(order(say="what was said"), temperature=0.0)
    assert "what was said" in _lines(server, "event=reply")[-1]
    server.predict(order(words=30, fail="error", at=2), temperature=0.0)
    time.sleep(0.7)
    after = _lines(server, "event=counters")[-1]
    for name in ("requests_stop", "requests_error", "steps_failed"):
        assert _number(name, after) == _number(name, before) + 1
    assert _number("rows_busy", after) == _number("queue_depth", after) == 0
    count = len(_lines(server, "event=counters"))
    time.sleep(0.8)
    assert len(_lines(server, "event=counters")) == count, "nothing has changed"


def _number(name: str, line: str) -> float:
    found = re.search(rf"\b{name}=([-\d.e]+)", line)
    assert found, line
    return float(found[1])


@pytest.mark.parametrize(("name", "value"), [("LOG_INTERVAL", "-1"), ("LOG_INTERVAL", "x"), ("LOG_TEXT", "maybe")])
def test_settings_of_the_log_are_checked(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"COG_RWKV_{name}", value)
    with pytest.raises(SettingsError, match=f"COG_RWKV_{name}"):
        Settings.read()
