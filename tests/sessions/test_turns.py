"""What a session holds after a turn: the state after exactly the text that was delivered."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import checkpoint
from model.engine import Engine, EngineError
from model.errors import RequestError, SessionNotKeptError
from model.request import Request
from model.rwkv7 import RWKV7
from model.sampling import Sampler, SamplingParams
from model.service import Service
from model.settings import Settings
from model.state import StatePool
from model.text import ReplyText, chat_prompt, ids_of_text
from model.tokenizer import Tokenizer
from tests.stub_model import StubModel, StubStatePool, ids_in

VOCAB = 65536
TOKENIZER = Tokenizer(None)
encode, decode = TOKENIZER.encode, TOKENIZER.decode
GREEDY = SamplingParams(temperature=0.0)

Conversation = Callable[..., "Talk"]


class Talk:
    """A service whose model replies with ``next``, and then ends; and what its sessions hold."""

    def __init__(self, **options: object) -> None:
        self.next: list[int] = []
        self.delay, self.fail_at = 0.0, -1
        self._prompt = 0
        self.model = StubModel(self._script, VOCAB)
        sampler = Sampler(VOCAB, 4, "cpu", TOKENIZER.allowed(VOCAB))
        self.engine = Engine(self.model, sampler, StubStatePool(4), 512)
        self.service = Service(self.engine, TOKENIZER, Settings(**options))

    def say(self, reply: str | list[int], prompt: str = "go", session: str = "s", **inputs: object) -> str:
        self.next = encode(reply) if isinstance(reply, str) else reply
        self._prompt = 0
        inputs = {"temperature": 0.0, "session": session} | inputs
        self.reply = self.service.reply(Request.of(prompt=prompt, **inputs))
        return "".join(self.reply)

    def _script(self, read: list[int]) -> int:
        self._prompt = self._prompt or len(read)
        time.sleep(self.delay)
        drawn = len(read) - self._prompt
        if drawn == self.fail_at:
            raise ValueError("broken")
        return self.next[drawn] if 0 <= drawn < len(self.next) else 0

    def held(self, session: str = "s") -> list[int]:
        with self.service.sessions.turn(session) as turn:
            assert turn is not None
            assert turn.tokens == len(ids_in(turn.start))
            return ids_in(turn.start)


@pytest.fixture
def talk() -> Iterator[Conversation]:
    """``talk(**settings)`` gives a Talk."""
    made: list[Talk] = []

    def talk(**options: object) -> Talk:
        made.append(Talk(**options))
        return made[-1]

    yield talk
    for one in made:
        one.engine.close()
        one.service.sessions.close()


def test_the_prompt_and_the_reply_are_read_as_they_were(talk: Conversation) -> None:
    one = talk()
    assert one.say(" hello there", prompt="say:") == " hello there"
    assert one.held() == [0, *encode("say:"), *encode(" hello there")]
    assert one.reply.metrics()["session_tokens"] == len(one.held()) and one.reply.metrics()["session_turns"] == 1
    one.say("\nfine", prompt=" and?")
    assert one.held() == [0, *encode("say:"), *encode(" hello there"), *encode(" and?"), *encode("\nfine")]
    assert one.reply.metrics()["session_turns"] == 2
    assert one.reply.metrics()["prompt_tokens"] == len(encode(" and?")), "of this turn"


def test_without_a_start_token_there_is_none(talk: Conversation) -> None:
    one = talk(start_token=False)
    one.say("x", prompt="go"), one.say("y", prompt="on")
    assert one.held() == [*encode("go"), *encode("x"), *encode("on"), *encode("y")]


def test_the_last_token_allowed_is_read(talk: Conversation) -> None:
    one = talk()
    assert one.say([98, 99, 100], max_tokens=2) == "ab"
    assert one.held() == [0, *encode("go"), 98, 99]


@pytest.mark.parametrize(
    ("ids", "stop", "kept"),
    [
        ([4571, 261, 24281, 59], "\nUser:", [4571, *encode("\n")]),  # "\n\n" is one token: cut inside
        ([4571, 3328, 24281, 59], "\nUser:", [4571, *encode("\n\n")]),
        ([4571, 261, 24281, 59], "\n\nUser:", [4571]),
        ([98, 99, *encode(" wonderful")], "onder", [98, 99, *encode(" w")]),
        ([98, 99, 100], "a", []),
        ([33155, 3319, 167, 170, 28334], "🔥", [33155, 3319, 167, 170]),  # "Hello🦩🔥" in part of characters
    ],
)
def test_a_stop_string_and_what_came_after_are_not_read(
    talk: Conversation, ids: list[int], stop: str, kept: list[int]
) -> None:
    one = talk()
    text = one.say([*ids, 98, 98, 98], stop=[stop])
    assert stop not in text
    assert one.held() == [0, *encode("go"), *kept]
    assert decode(kept) == text


def test_a_character_that_was_cut_off_is_read_as_it_was_shown(talk: Conversation) -> None:
    one = talk()
    assert one.say([33155, 3319, 167], max_tokens=3) == "Hello\ufffd"
    assert decode(one.held()[2:]) == decode([33155, 3319, 167])


def test_chat_turns_follow_each_other(talk: Conversation) -> None:
    one = talk()
    first = chat_prompt("Hi", "Be brief.")
    assert one.say(" Hello.\n\nUser: no", prompt="Hi ", system_prompt="Be brief.", chat=True) == "Hello."
    assert one.held() == [0, *encode(first), *encode(" Hello.")], "with the space, which stands after the colon"
    assert one.say(" Yes.", prompt="Sure?", chat=True) == "Yes."
    later = "\n\nUser: Sure?\n\nAssistant:"
    assert one.held() == [0, *encode(first), *encode(" Hello."), *encode(later), *encode(" Yes.")]
    one.say("z", prompt="raw")
    assert one.held()[-2:] == [*encode("raw"), *encode("z")]


def test_a_system_prompt_later_is_refused_by_name(talk: Conversation) -> None:
    one = talk()
    one.say("x", prompt="Hi", chat=True)
    before = one.held()
    with pytest.raises(
        RequestError, match=r"^E200 system_prompt: belongs before the first turn, and this session has 1"
    ):
        one.say("y", prompt="Hi", chat=True, system_prompt="Be rude.")
    assert one.held() == before and one.reply.finish_reason == "error"


def test_a_failed_turn_leaves_the_session_as_it_was(talk: Conversation) -> None:
    one = talk()
    one.say("abc")
    before, one.fail_at = one.held(), 2
    with pytest.raises(EngineError, match="broken"):
        one.say("defgh")
    one.fail_at = -1
    assert one.held() == before
    metrics = one.reply.metrics()
    assert (metrics["finish_reason"], metrics["session_turns"]) == ("error", 1)
    with pytest.raises(EngineError, match="broken"):
        one.fail_at = 0
        one.say("abc", session="new")
    assert one.held("new") == []


def test_a_cancelled_turn_leaves_the_session_as_it_was(talk: Conversation) -> None:
    one = talk()
    one.say("abc")
    before, one.delay = one.held(), 0.01
    threading.Timer(0.15, lambda: one.reply.cancel()).start()
    one.say([98] * 1000, max_tokens=1000)
    assert one.reply.finish_reason == "cancelled" and one.held() == before
    assert one.reply.metrics()["session_turns"] == 1


def test_a_reader_that_leaves_frees_the_session(talk: Conversation) -> None:
    one = talk(text_interval=0.0)
    one.say("abc")
    before, one.next, one._prompt, one.delay = one.held(), [98] * 1000, 0, 0.005
    pieces = iter(one.service.reply(Request.of(prompt="go", temperature=0.0, session="s", max_tokens=1000)))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert one.held() == before


def test_a_turn_that_is_cancelled_while_it_is_read_for_the_session_is_cancelled(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = talk()
    one.say("abc")
    before, read = one.held(), one.engine.read

    def cancelled(*arguments: object) -> object:
        one.reply.cancel()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(one.engine, "read", cancelled)
    assert one.say("def") == "def"
    assert one.reply.finish_reason == "cancelled" and one.held() == before


def test_cancelling_when_the_state_has_been_read_is_too_late(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = talk()
    keep = one.service.sessions.keep

    def cancelled(*arguments: object) -> None:
        one.reply.cancel()
        keep(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(one.service.sessions, "keep", cancelled)
    assert one.say("def") == "def"
    assert one.reply.finish_reason == "stop" and one.held() == [0, *encode("go"), *encode("def")]


def test_a_turn_that_cannot_be_kept_fails(talk: Conversation, tmp_path: Path) -> None:
    one = talk(session_database=tmp_path / "sessions.db", session_durable=True)
    one.say("abc")
    before = one.held()
    database = one.service.sessions._database
    assert database is not None
    pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
    database._connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(SessionNotKeptError, match="full"):
        one.say("def", prompt="x" * 50000 + "word " * 9000)
    assert one.reply.finish_reason == "error" and one.held() == before
    database._connection.execute("PRAGMA max_page_count=100000")
    assert one.say("def") == "def"


@pytest.mark.gpu
def test_on_cuda_it_does_not_show_where_a_session_lay(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def talk(turns: int, service: Service) -> list[str]:
        requests = [
            Request.of(prompt=f"turn {n} " * 40, session="s", temperature=0.0, max_tokens=30) for n in range(turns)
        ]
        return ["".join(service.reply(one)) for one in requests]

    def build(**options: object) -> Service:
        return Service.build(Settings(weights=str(tiny_checkpoint), device="cuda", max_batch=4, **options))

    def end(service: Service) -> dict[str, int]:
        service.engine.close()
        service.sessions.close()
        return service.sessions.counters()

    on_device = build(session_device=64, session_host=64)
    wanted = talk(4, on_device)
    assert end(on_device)["session_device_hits"] == 3
    on_host = build(session_device=0, session_host=64)
    assert talk(4, on_host) == wanted
    assert end(on_host)["session_host_hits"] == 3
    path = tmp_path / "sessions.db"
    on_disk = build(session_device=0, session_host=0, session_database=path)
    assert talk(4, on_disk) == wanted
    assert end(on_disk)["session_device_hits"] == 0
    first = build(session_database=path.with_name("other.db"))
    assert talk(2, first) == wanted[:2]
    end(first)
    again = build(session_database=path.with_name("other.db"))
    texts = [
        "".join(again.reply(Request.of(prompt=f"turn {n} " * 40, session="s", temperature=0.0, max_tokens=30)))
        for n in (2, 3)
    ]
    assert texts == wanted[2:]
    assert end(again)["session_disk_hits"] == 1


TOKENS = st.lists(st.one_of(st.integers(1, 257), st.sampled_from(TOKENIZER.defined[1:])), max_size=12)


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.integers(0, 40))
def test_ids_of_a_text_are_its_text(ids: list[int], length: int) -> None:
    text = decode(ids)
    found = ids_of_text(TOKENIZER, ids, min(length, len(text)))
    assert decode(found) == text[:length]
    if length >= len(text) and not text.endswith("\ufffd"):
        assert found == ids


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.lists(st.text(min_size=1, max_size=3), max_size=2), st.booleans())
def test_the_length_of_a_reply_is_that_of_what_was_sent(ids: list[int], stops: list[str], strip: bool) -> None:
    reply, sent = ReplyText(TOKENIZER, stops, strip), ""
    for token in ids:
        sent += reply.push(token)
    sent += reply.finish()
    text = decode(ids)[: reply.length]
    assert sent == (text.removeprefix(" ") if strip else text)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> RWKV7:
    return RWKV7.load(checkpoint.load(str(tiny_checkpoint)), "cpu", progress=False)


@pytest.mark.parametrize("chat", [False, True])
def test_a_conversation_equals_one_long_run_bit_for_bit(
    model: RWKV7, tiny_checkpoint: Path, tmp_path: Path, chat: bool
) -> None:
    config = checkpoint.load(str(tiny_checkpoint)).config
    engine = Engine(model, Sampler(VOCAB, 3, "cpu", TOKENIZER.allowed(VOCAB)), StatePool(config, 3), 16)
    service = Service(engine, TOKENIZER, Settings(session_database=tmp_path / "sessions.db", session_host=0))
    read = [0]
    for n, prompt in enumerate(["The first turn", "and another one, longer " * 9, "x"]):
        reply = service.reply(Request.of(prompt=prompt, chat=chat, session="s", temperature=0.0, max_tokens=20 + n))
        text = "".join(reply)
        read += encode(chat_prompt(prompt, later=n > 0) if chat else prompt)
        cold = list(engine.submit(read, GREEDY, 20 + n))
        assert text == (decode(cold).removeprefix(" ") if chat else decode(cold)), "no stop in random text"
        read += ids_of_text(TOKENIZER, cold, len(decode(cold)))
        assert reply.metrics()["session_tokens"] == len(read)
    with service.sessions.turn("s") as turn:
        assert turn is not None and turn.start is not None
        whole = engine.read(read)
        assert torch.equal(turn.start.wkv, whole.wkv) and torch.equal(turn.start.shift, whole.shift)
    engine.close()
    service.sessions.close()
