"""Sessions through the real server: conversations, crashes, full disks, damaged files, and two requests at once."""

import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from model.tokenizer import Tokenizer
from tests.serving.orders import order, words
from tests.serving.server import PRODUCT, Server, Streamed, was_cancelled

Launch = Callable[..., Server]
GREEDY = {"temperature": 0.0}
NEXT = "\x1e"  # what follows it is a new order to the stub, within the context of a session


def turns(server: Server, name: str, **inputs: Any) -> int:
    """How many turns a session has, asked by one that fails: so it stays as it is."""
    prediction = server.predict(NEXT + order(fail="error", at=0), session=name, **inputs)
    assert prediction["status"] == "failed" and "injected failure" in prediction["error"], prediction
    return int(prediction["metrics"]["session_turns"])


def say(server: Server, name: str, text: str, **inputs: Any) -> dict[str, Any]:
    """One turn with the stub, which has to succeed."""
    prediction = server.predict(NEXT + order(say=text), session=name, **inputs)
    assert prediction["status"] == "succeeded", prediction
    assert "".join(prediction["output"]) == text
    return prediction["metrics"]


def _cold(first: str, reply: str, second: str) -> bool:
    """Whether the ids of the three parts are those of the whole text."""
    encode = Tokenizer(None).encode
    return encode(first) + encode(reply) + encode(second) == encode(first + reply + second)


def test_a_conversation_goes_on_as_one_long_run_would(product: Server) -> None:
    compared = 0
    for n, first in enumerate(
        ["def add(a, b):\n", "import os\n\n\ndef main():\n", "class Point:\n", "for i in range(10):\n"]
    ):
        begun = product.predict(first, session=f"long-{n}", max_tokens=40, **GREEDY)
        reply = "".join(begun["output"])
        for second in ("\n\ndef sub(", "\n\nclass ", "\n\nimport "):
            if not _cold(first, reply, second):
                continue
            if begun["metrics"]["session_tokens"] != 1 + len(Tokenizer(None).encode(first + reply)):
                continue  # the model wrote its text in other tokens than those of the text
            gone_on = product.predict(second, session=f"long-{n}", max_tokens=40, **GREEDY)
            assert "".join(gone_on["output"]) == product.text(first + reply + second, max_tokens=40, **GREEDY)
            assert gone_on["metrics"]["session_turns"] == 2
            assert gone_on["metrics"]["prompt_tokens"] == len(Tokenizer(None).encode(second))
            compared += 1
            break
    assert compared, "at least one of them could be compared"


def test_streams_and_plain_requests_share_sessions(product: Server) -> None:
    plain = [product.text(text, session="plain", max_tokens=20, **GREEDY) for text in ("x = [", "\n\ny = (", "\n\nz")]
    streamed = [
        product.stream(text, session="streamed", max_tokens=20, **GREEDY).text
        for text in ("x = [", "\n\ny = (", "\n\nz")
    ]
    assert plain == streamed
    assert plain[0] == product.text("x = [", max_tokens=20, **GREEDY)


def test_bad_names_are_refused(stub: Server) -> None:
    for name in ("", "x" * 257):
        assert stub.post({"prompt": "x", "session": name}).status_code == 422
    for name in ("../../etc/passwd", "x" * 256, "🦩", "'; --", "\0"):
        assert say(stub, name, "fine")["session_turns"] == 1
    assert say(stub, "../../etc/passwd", "again")["session_turns"] == 2


@pytest.mark.acceptance(3)
def test_a_stop_string_ends_what_the_session_holds(stub: Server) -> None:
    encode = Tokenizer(None).encode
    prompt = NEXT + order(say="one two STOP three")
    prediction = stub.predict(prompt, session="stopped", stop=["wo STOP"])
    assert "".join(prediction["output"]) == "one t"
    assert prediction["metrics"]["session_tokens"] == 1 + len(encode(prompt)) + len(encode("one") + encode(" t"))


def test_a_system_prompt_belongs_to_the_first_turn(stub: Server) -> None:
    first = stub.predict("Hi", session="system", chat=True, system_prompt="Be brief.", max_tokens=3)
    assert first["status"] == "succeeded"
    second = stub.predict("Hi", session="system", chat=True, system_prompt="Be brief.", max_tokens=3)
    assert second["status"] == "failed" and "E200 system_prompt: belongs before the first turn" in second["error"]
    assert second["metrics"]["session_turns"] == 1


def test_failed_and_cancelled_turns_leave_a_session_as_it_was(stub: Server) -> None:
    tokens = say(stub, "kept", "hello")["session_tokens"]
    assert turns(stub, "kept") == 1
    with stub.open_stream(NEXT + order(words=60000), id="in-session", session="kept", max_tokens=60000) as events:
        next(event for event in events if event.name == "output")
        assert stub.cancel("in-session") == 200
        final = Streamed(list(events)).final
    assert final["status"] == "canceled"
    assert (final["metrics"]["session_turns"], final["metrics"]["session_tokens"]) == (1, tokens)
    with stub.open_stream(NEXT + order(words=60000), session="kept", max_tokens=60000) as events:
        next(event for event in events if event.name == "output")
    with pytest.raises(httpx.ReadTimeout):
        stub.post({"prompt": NEXT + order(words=60000), "session": "kept", "max_tokens": 60000}, timeout=0.5)
    metrics = say(stub, "kept", "still here")
    assert metrics["session_turns"] == 2


def test_a_second_request_waits_and_goes_on_from_the_first(stub: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: say(stub, "together", words(20 + n), max_tokens=500), range(8)))
    assert sorted(one["session_turns"] for one in found) == list(range(1, 9))
    tokens = [one["session_tokens"] for one in sorted(found, key=lambda one: one["session_turns"])]
    assert tokens == sorted(set(tokens))


def test_a_session_that_stays_busy_is_refused_by_name(launch: Launch) -> None:
    server = launch(COG_RWKV_SESSION_WAIT="0.3")
    with server.open_stream(NEXT + order(words=3000, delay=0.002), session="busy", max_tokens=60000) as events:
        next(event for event in events if event.name == "output")
        began = time.monotonic()
        refused = server.predict(NEXT + order(say="x"), session="busy")
        assert refused["status"] == "failed" and "E410 session: another request has it" in refused["error"]
        assert time.monotonic() - began < 3
        assert say(server, "other", "free")["session_turns"] == 1
    assert say(server, "busy", "now")["session_turns"] == 1, "the reader left, so the session was free in time"


def test_a_waiting_request_can_be_cancelled(stub: Server) -> None:
    with stub.open_stream(NEXT + order(words=60000), session="held", max_tokens=60000) as events:
        next(event for event in events if event.name == "output")
        with stub.open_stream(NEXT + order(say="x"), id="waits", session="held") as waiting:
            assert next(waiting).name == "start"
            time.sleep(0.5)
            assert stub.cancel("waits") == 200
            began = time.monotonic()
            assert was_cancelled(Streamed(list(waiting)).final)
            assert time.monotonic() - began < 5, "less than the wait for a session"


def test_a_restart_goes_on_with_what_was_there(launch: Launch, tmp_path: Path) -> None:
    settings = {"COG_RWKV_SESSION_DATABASE": str(tmp_path / "sessions.db"), "COG_RWKV_DEVICE": "cpu"}
    server = launch(runner=PRODUCT, **settings)
    texts = ["a = 1\n", "\nb = a", "\nc = b"]
    whole = [server.text(text, session="whole", max_tokens=15, **GREEDY) for text in texts]
    halves = [server.text(text, session="halves", max_tokens=15, **GREEDY) for text in texts[:2]]
    server.stop()
    assert {file.name for file in tmp_path.iterdir()} == {"sessions.db"}, "closed in good order"
    server = launch(runner=PRODUCT, **settings)
    halves.append(server.text(texts[2], session="halves", max_tokens=15, **GREEDY))
    assert whole == halves
    server.stop()
    server = launch(runner=PRODUCT, COG_RWKV_STATE_DTYPE="float16", **settings)
    refused = server.predict("x", session="halves", max_tokens=1)
    assert refused["status"] == "failed"
    assert "E420 session: it was made with state_dtype float32, and this server has float16" in refused["error"]


def _worker(server: Server) -> psutil.Process:
    return server.processes()[-1]


def _kill_in_the_middle(launch: Launch, tmp_path: Path, rounds: int) -> None:
    """Two sessions that take turns without a pause, until everything is killed: what completed is there afterwards."""
    settings = {"COG_RWKV_SESSION_DATABASE": str(tmp_path / "sessions.db"), "COG_RWKV_SESSION_DURABLE": "1"}
    done = {"a": 0, "b": 0}

    def talk(server: Server, name: str) -> None:
        while True:
            try:
                metrics = say(server, name, words(5))
            except (httpx.HTTPError, AssertionError):
                return
            assert metrics["session_turns"] == done[name] + 1
            done[name] = metrics["session_turns"]

    for round in range(rounds):
        server = launch(**settings)
        server.defaults = GREEDY
        for name, count in done.items():
            found = turns(server, name)
            assert found in (count, count + 1), "all that was acknowledged, and at most the turn that nobody heard of"
            done[name] = found
        threads = [threading.Thread(target=talk, args=(server, name)) for name in done]
        for thread in threads:
            thread.start()
        time.sleep(0.5 + 0.037 * round)
        server.cog.child.kill()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "clients get an end"
    assert all(count > rounds for count in done.values())
    assert not list(tmp_path.glob("*damaged*"))


def test_kill_9_loses_nothing_that_was_acknowledged(launch: Launch, tmp_path: Path) -> None:
    _kill_in_the_middle(launch, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_9_loses_nothing_that_was_acknowledged_often(launch: Launch, tmp_path: Path) -> None:
    _kill_in_the_middle(launch, tmp_path, 40)


def test_the_worker_killed_mid_stream(launch: Launch, tmp_path: Path) -> None:
    """The client gets an end, the server tells the truth, and a restart serves the session as it was."""
    settings = {"COG_RWKV_SESSION_DATABASE": str(tmp_path / "sessions.db"), "COG_RWKV_SESSION_DURABLE": "1"}
    server = launch(**settings)
    say(server, "kept", "hello", **GREEDY)
    with server.open_stream(NEXT + order(words=9000), session="kept", max_tokens=60000, **GREEDY) as events:
        next(event for event in events if event.name == "output")
        _worker(server).kill()
        final = Streamed(list(events)).final
    assert final["status"] == "failed" and "crashed" in final["error"]
    until = time.monotonic() + 10
    while server.health()["status"] == "READY" and time.monotonic() < until:
        time.sleep(0.05)
    assert server.health()["status"] in ("DEFUNCT", "UNHEALTHY", "SETUP_FAILED")
    server.stop()
    server = launch(**settings)
    assert turns(server, "kept", **GREEDY) == 1
    assert say(server, "kept", "on", **GREEDY)["session_turns"] == 2


@pytest.mark.parametrize("durable", ["0", "1"])
def test_a_full_disk(launch: Launch, tmp_path: Path, durable: str) -> None:
    """No file of the worker may grow, as on a full disk; then there is room again."""
    path = tmp_path / "sessions.db"
    server = launch(COG_RWKV_SESSION_DATABASE=str(path), COG_RWKV_SESSION_DURABLE=durable)
    server.defaults = GREEDY
    say(server, "a", "before")
    pid = _worker(server).pid
    largest = max(file.stat().st_size for file in tmp_path.iterdir())
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest, limits[1]))
    last = server.predict(NEXT + order(say="meanwhile"), session="a", max_tokens=5000)
    if durable == "1":
        assert last["status"] == "failed"
        assert "E430 session: cannot be written to sessions.db" in last["error"]
        assert last["metrics"]["finish_reason"] == "error"
        assert turns(server, "a") == 1
    else:
        assert last["status"] == "succeeded" and turns(server, "a") == 2
        assert "sessions_cannot_be_written" in _soon(server, "sessions_cannot_be_written")
    assert server.health()["status"] == "READY"
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    count = turns(server, "a")
    assert say(server, "a", "after")["session_turns"] == count + 1
    server.stop()
    again = launch(COG_RWKV_SESSION_DATABASE=str(path))
    assert turns(again, "a", **GREEDY) == count + 1


def _soon(server: Server, text: str) -> str:
    until = time.monotonic() + 5
    while text not in server.log() and time.monotonic() < until:
        time.sleep(0.05)
    return server.log()


def test_a_damaged_database_is_set_aside_at_setup(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.write_bytes(damage := os.urandom(50000))
    server = launch(COG_RWKV_SESSION_DATABASE=str(path))
    assert say(server, "a", "new", **GREEDY)["session_turns"] == 1
    (aside,) = tmp_path.glob("sessions.db.damaged-*")
    assert aside.read_bytes() == damage
    assert "session_database_damaged" in server.log() and str(aside) in server.log()


def test_a_path_that_cannot_be_used_fails_the_setup(launch: Launch, tmp_path: Path) -> None:
    server = launch(expect="SETUP_FAILED", COG_RWKV_SESSION_DATABASE=str(tmp_path / "none" / "sessions.db"))
    assert "E130 COG_RWKV_SESSION_DATABASE: " in server.log() and "No such file or directory" in server.log()


def test_logs_hold_neither_names_nor_texts(launch: Launch, tmp_path: Path) -> None:
    server = launch(COG_RWKV_SESSION_DATABASE=str(tmp_path / "sessions.db"), COG_RWKV_SESSION_LIMIT="1")
    for n in range(3):
        say(server, f"confidential-{n}", "whispered", **GREEDY)
    log = _soon(server, "session_deleted")
    assert "session_deleted" in log and "confidential" not in log and "whispered" not in log
