"""From a request to text, over a stub model and without a server."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from model.engine import Engine, EngineError
from model.request import Request
from model.sampling import Sampler
from model.service import Service
from model.settings import Settings
from model.text import CHAT_STOP, chat_prompt
from model.tokenizer import Tokenizer
from tests.stub_model import Script, StubModel, StubPool

VOCAB = 65536
TOKENIZER = Tokenizer(None)


class Stubbed:
    """A service whose model replies what ``script`` says, and that model."""

    def __init__(self, script: Script, delay: float = 0.0, **settings: object) -> None:
        chosen = Settings(**settings)
        self.model = StubModel(script, VOCAB, delay)
        sampler = Sampler(VOCAB, 4, "cpu", TOKENIZER.allowed(VOCAB))
        self.engine = Engine(self.model, sampler, StubPool(4), 512, max_queue=chosen.max_queue)
        self.service = Service(self.engine, TOKENIZER, chosen)

    def read(self, **inputs: object) -> list[int]:
        """The ids that the model has read before it drew the first one."""
        list(self.service.reply(Request.of(max_tokens=1, **inputs)))
        return self.model.steps[-1].ids[0]


Say = Callable[..., Stubbed]


@pytest.fixture
def say() -> Iterator[Say]:
    """``say(text, **settings)``: a service whose model says the text, then ends."""
    made: list[Stubbed] = []

    def say(text: str, **settings: object) -> Stubbed:
        ids = TOKENIZER.encode(text)
        start: list[int] = []

        def script(read: list[int]) -> int:
            start[:] = start or [len(read)]
            drawn = len(read) - start[0]
            return ids[drawn] if drawn < len(ids) else 0

        made.append(Stubbed(script, **settings))
        return made[-1]

    yield say
    for one in made:
        one.engine.close()


def _reply(stubbed: Stubbed, **inputs: object) -> tuple[list[str], dict[str, object]]:
    reply = stubbed.service.reply(Request.of(prompt="x", temperature=0.0, **inputs))
    return list(reply), reply.metrics()


@pytest.mark.acceptance(4)
def test_a_context_starts_with_id_0_and_the_prompt_as_it_is(say: Say) -> None:
    raw = "a\r\n\r\n\r\nb  \0"
    assert say("hi").read(prompt=raw) == [0, *TOKENIZER.encode(raw)]
    assert say("hi", start_token=False).read(prompt=raw) == TOKENIZER.encode(raw)


@pytest.mark.acceptance(4)
def test_a_chat_is_formatted_for_the_model(say: Say) -> None:
    raw = "a\r\n\r\n\r\nb  "
    assert say("hi").read(prompt=raw, chat=True) == [0, *TOKENIZER.encode("User: a\nb\n\nAssistant:")]
    system = say("hi").read(prompt=raw, chat=True, system_prompt="Be brief.")
    assert system == [0, *TOKENIZER.encode(chat_prompt(raw, "Be brief."))]


@pytest.mark.acceptance(4)
def test_a_chat_ends_at_the_next_turn_and_loses_one_space(say: Say) -> None:
    pieces, metrics = _reply(say(f"  I see.{CHAT_STOP} and"), chat=True)
    assert "".join(pieces) == " I see."
    assert metrics["finish_reason"] == "stop"
    pieces, _ = _reply(say(f" I see.{CHAT_STOP} and"))
    assert "".join(pieces) == f" I see.{CHAT_STOP} and", "a raw prompt has no stop of its own"


@pytest.mark.acceptance(3)
def test_what_was_held_back_comes_at_the_end(say: Say) -> None:
    pieces, metrics = _reply(say("one\n\nUse"), stop=["\n\nUser:"])
    assert "".join(pieces) == "one\n\nUse"
    assert all(pieces)
    assert metrics["finish_reason"] == "stop"


def test_a_stop_counts_what_was_drawn_up_to_it(say: Say) -> None:
    stubbed = say("abc" * 3 + "STOP" + "word " * 5000, delay=0.001)
    pieces, metrics = _reply(stubbed, stop=["STOP"], max_tokens=10000)
    assert "".join(pieces) == "abc" * 3
    assert len(stubbed.model.steps) < 1000, "the engine has been told"
    while stubbed.engine.last_step_age():
        time.sleep(0.01)
    assert len(stubbed.model.steps) < 1000
    assert metrics["completion_tokens"] <= len(TOKENIZER.encode("abc" * 3 + "STOP")) + 1


def test_cancelling_before_and_while_it_is_read(say: Say) -> None:
    stubbed = say("word " * 1000)
    early = stubbed.service.reply(Request.of(prompt="x"))
    early.cancel()
    assert (list(early), early.finish_reason) == ([], "cancelled")
    later = stubbed.service.reply(Request.of(prompt="x", max_tokens=1000))
    pieces = iter(later)
    assert next(pieces)
    threading.Timer(0.02, later.cancel).start()
    assert len("".join(pieces)) < 4900
    assert later.metrics()["finish_reason"] == "cancelled"


def test_a_failure_is_an_error_with_its_message() -> None:
    def script(read: list[int]) -> int:
        if len(read) > 5:
            raise ValueError("broken")
        return 98

    stubbed = Stubbed(script)
    reply = stubbed.service.reply(Request.of(prompt="x"))
    with pytest.raises(EngineError, match="E300 ValueError: broken"):
        list(reply)
    assert reply.metrics()["finish_reason"] == "error"
    stubbed.engine.close()


def test_text_is_grouped_in_time(say: Say) -> None:
    stubbed = say("word " * 300, delay=0.002, text_interval=0.1)
    began = time.monotonic()
    pieces, metrics = _reply(stubbed, max_tokens=300)
    took = time.monotonic() - began
    assert 1 < len(pieces) <= took / 0.1 + 2
    assert len(pieces[0]) < 300, "the first comes at once"
    assert metrics["completion_tokens"] == 300 and "".join(pieces) == ("word " * 300)[: len("".join(pieces))]


def test_metrics_tell_times_and_tokens(say: Say) -> None:
    _, metrics = _reply(say("word " * 30, delay=0.002), max_tokens=20)
    assert (metrics["prompt_tokens"], metrics["prefill_tokens"], metrics["cached_tokens"]) == (1, 2, 0)
    assert 0 <= metrics["queue_time"] < metrics["time_to_first_token"]
    assert metrics["time_per_output_token"] >= 0.002
    assert metrics["time_per_output_token"] * metrics["tokens_per_second"] == pytest.approx(1)


def test_a_full_queue_fails_at_once_with_its_limit() -> None:
    stubbed = Stubbed(lambda read: 98, delay=0.002, max_queue=1)
    running = [stubbed.service.reply(Request.of(prompt="x", max_tokens=10000)) for _ in range(5)]
    threads = [threading.Thread(target=list, args=(reply,)) for reply in running]
    for thread in threads:
        thread.start()
    while stubbed.engine._held < 5:
        time.sleep(0.001)
    began = time.monotonic()
    refused = stubbed.service.reply(Request.of(prompt="x"))
    with pytest.raises(EngineError, match="E310 the queue is full: 1 requests wait already"):
        list(refused)
    assert time.monotonic() - began < 1 and refused.metrics()["finish_reason"] == "error"
    assert stubbed.engine.counters()["requests_refused"] == 1
    for reply in running:
        reply.cancel()
    for thread in threads:
        thread.join()
    while stubbed.engine._held:
        time.sleep(0.001)
    assert list(stubbed.service.reply(Request.of(prompt="x", max_tokens=2)))
    stubbed.engine.close()


def test_metrics_without_a_token(say: Say) -> None:
    pieces, metrics = _reply(say(""))
    assert pieces == []
    assert (metrics["prompt_tokens"], metrics["completion_tokens"], metrics["finish_reason"]) == (1, 0, "stop")
    assert "tokens_per_second" not in metrics and "time_to_first_token" not in metrics


def test_a_warm_up_that_fails_fails_the_setup() -> None:
    stubbed = Stubbed(lambda read: StubModel.NAN_LOGITS)
    with pytest.raises(EngineError, match=r"the first step failed: .*not finite"):
        stubbed.service.warm_up()
    stubbed.engine.close()
