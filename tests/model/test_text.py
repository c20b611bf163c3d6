"""Chat formatting, and where a reply ends: by its decoded text, whatever the tokens."""

import itertools
import random
import time

import pytest

from model.errors import RequestError
from model.text import CHAT_STOP, ReplyText, chat_prompt, tidy
from model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def world() -> Tokenizer:
    return Tokenizer()


def reply(tokenizer: Tokenizer, ids: list[int], stops: list[str], strip: bool = False) -> tuple[list[str], bool]:
    """The pieces that are sent, and whether a stop string ended them."""
    text, pieces = ReplyText(tokenizer, stops, strip), []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    return pieces, text.stopped


def expected(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@pytest.mark.acceptance(4)
@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("a\r\n\r\n\r\nb  ", "a\nb"),
        ("a\n\nb", "a\nb"),
        ("a\nb", "a\nb"),
        ("a\n \t\n\n    b", "a\n    b"),
        ("a\rb", "a\nb"),
        ("\n\n a \n\n", "a"),
        ("x\n\nUser: y\n\nAssistant:", "x\nUser: y\nAssistant:"),
        ("\n", ""),
    ],
)
def test_a_turn_of_a_chat(text: str, turn: str) -> None:
    assert tidy(text) == turn
    assert chat_prompt(text) == f"User: {turn}\n\nAssistant:"
    assert chat_prompt("hi", text) == (f"System: {turn}\n\n" if turn else "") + "User: hi\n\nAssistant:"


@pytest.mark.acceptance(4)
def test_no_text_makes_tidying_slow() -> None:
    for text in ("\n" * 2_000_000, "a" + " \n" * 1_000_000 + "b", "\r" * 2_000_000, "a\n" + " " * 2_000_000 + "b"):
        began = time.perf_counter()
        tidy(text)
        assert time.perf_counter() - began < 5


@pytest.mark.acceptance(3)
@pytest.mark.parametrize(
    ("ids", "text", "stopped"),
    [
        ([4571, 261, 24281, 59], " hi\n", True),
        ([4571, 3328, 24281, 59], " hi\n\n", True),
        ([4571, 11, 33553], " hi\nUsers", False),
    ],
)
def test_a_stop_across_tokens(world: Tokenizer, ids: list[int], text: str, stopped: bool) -> None:
    pieces, ended = reply(world, ids, ["\nUser:"])
    assert "".join(pieces) == text and ended is stopped


@pytest.mark.acceptance(3)
def test_a_stop_longer_than_ten_tokens(world: Tokenizer) -> None:
    stop = "🦩🔥𠮷 and so it ends, at long last, here."
    assert len(world.encode(stop)) > 10
    pieces, stopped = reply(world, world.encode(f"Well {stop} never"), [stop])
    assert "".join(pieces) == "Well " and stopped


@pytest.mark.acceptance(3)
def test_a_stop_that_ends_inside_a_token(world: Tokenizer) -> None:
    ids = world.encode("a    b")
    pieces, stopped = reply(world, ids, ["a  "])
    assert any(len(world.token_bytes(token)) > 2 for token in ids)
    assert "".join(pieces) == "" and stopped


@pytest.mark.acceptance(3)
def test_text_that_turns_out_to_be_no_stop_is_sent_at_once(world: Tokenizer) -> None:
    assert reply(world, [98, 99, 121], ["abc"]) == (["", "", "abx", ""], False)
    assert reply(world, [98, 99], ["abc"]) == (["", "", "ab"], False)
    assert reply(world, [98, 98, 99, 100], ["abc"]) == (["", "a", "", "", ""], True)


@pytest.mark.acceptance(3)
def test_the_stop_that_begins_first_counts(world: Tokenizer) -> None:
    """ "bc" is whole before "abcd" is, which begins before it: the decision waits."""
    assert reply(world, [98, 99, 100, 101], ["bc", "abcd"]) == (["", "", "", "", ""], True)
    assert reply(world, [98, 99, 100, 121], ["bc", "abcd"]) == (["", "", "", "a", ""], True)
    assert reply(world, [98, 99, 100], ["bc", "abcd"]) == (["", "", "", "a"], True)
    assert reply(world, [98, 99], ["ab", "abc"]) == (["", "", ""], True)


@pytest.mark.acceptance(3)
def test_pieces_join_to_the_text_before_the_stop_for_every_cut(world: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choices(["a", "b", "ab", "\n", "é", "🦩"], k=rng.randrange(1, 12)))
        stops = ["".join(rng.choices("aab\né🦩", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        ids = random_cut(world, text, rng)
        pieces, stopped = reply(world, ids, stops)
        assert "".join(pieces) == expected(text, stops), (text, stops, ids)
        assert stopped is any(stop in text for stop in stops)
        assert "\ufffd" not in "".join(pieces)


def test_several_ids_are_as_good_as_one_by_one(world: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(2000):
        ids = rng.choices(
            [*world.encode("ab a\n é🦩x"), *(byte + 1 for byte in "é🦩ab\n ".encode()), 0], k=rng.randrange(1, 12)
        )
        stops = rng.choice([[], [], ["ab"], ["\n", "aab"], ["é", " a\n"]])
        single, several = ReplyText(world, stops, True), ReplyText(world, stops, True)
        wanted, used = [], 0
        while used < len(ids) and not single.stopped:
            wanted.append(single.push(ids[used]))
            used += 1
        got, taken, at = [], 0, 0
        while at < len(ids) and not several.stopped:
            group = ids[at : at + rng.randrange(1, 6)]
            piece, count = several.push_all(group)
            got.append(piece)
            taken, at = taken + count, at + len(group)
        assert ("".join(got), taken) == ("".join(wanted), used), (ids, stops)
        assert (several.stopped, several.length) == (single.stopped, single.length)
        assert several.finish() == single.finish()


def random_cut(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids of ``text`` that are cut anywhere between its bytes, not only where longest match cuts."""
    data, ids = text.encode(), []
    by_text = {tokenizer.token_bytes(token): token for token in tokenizer.encode(text)}
    while data:
        fits = [data[:1], *(piece for piece in by_text if data.startswith(piece))]
        piece = rng.choice(fits)
        ids.append(by_text.get(piece, piece[0] + 1))
        data = data[len(piece) :]
    return ids


@pytest.mark.acceptance(3)
def test_no_more_is_held_back_than_a_stop_may_need(world: Tokenizer) -> None:
    stop, text = "\n\nUser:", "aaab aa\n\nUs\n\nUser"
    out, sent = ReplyText(world, [stop, "zzz"]), ""
    for end, token in enumerate((byte + 1 for byte in text.encode()), 1):
        sent += out.push(token)
        held = text[:end][len(sent) :]
        assert text[:end].startswith(sent) and len(held) < len(stop)
        assert held == "" or stop.startswith(held)
    assert sent + out.finish() == text


@pytest.mark.acceptance(2)
def test_nothing_of_id_0_or_nul_stops_or_shows(world: Tokenizer) -> None:
    assert reply(world, [98, 0, 1, 99], ["\nUser:"]) == (["a", "", "\0", "b", ""], False)


@pytest.mark.parametrize(
    ("text", "sent"), [(" hi", "hi"), ("  hi", " hi"), ("hi ", "hi "), ("\n hi", "\n hi"), (" ", ""), ("", "")]
)
def test_one_leading_space_of_a_chat_reply_is_dropped(world: Tokenizer, text: str, sent: str) -> None:
    for ids in (world.encode(text), [byte + 1 for byte in text.encode()]):
        pieces, _ = reply(world, ids, [CHAT_STOP], strip=True)
        assert "".join(pieces) == sent


def test_a_chat_ends_where_the_user_would_speak(world: Tokenizer) -> None:
    pieces, stopped = reply(world, world.encode(" Hello there.\n\nUser: what"), [CHAT_STOP], strip=True)
    assert "".join(pieces) == "Hello there." and stopped


def test_after_a_stop_nothing_comes(world: Tokenizer) -> None:
    text = ReplyText(world, ["b"])
    assert [text.push(token) for token in (98, 99, 100)] == ["a", "", ""]
    assert text.stopped and text.finish() == ""


def test_a_character_that_was_cut_off_may_end_in_a_stop(world: Tokenizer) -> None:
    assert reply(world, [98, 0xC3 + 1], ["\ufffd"]) == (["a", "", ""], True)


def test_an_empty_stop_is_refused_by_name(world: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop: found an empty string"):
        ReplyText(world, ["a", ""])


def test_long_stops_cost_little(world: Tokenizer) -> None:
    began = time.perf_counter()
    text = ReplyText(world, ["a" * 5000 + "b", *("a" * size for size in range(6000, 6010))])
    sent = "".join(text.push(98) for _ in range(5500)) + text.finish()
    assert sent == "a" * 5500
    assert time.perf_counter() - began < 5


def test_all_short_cuts(world: Tokenizer) -> None:
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        for stops in (["ab"], ["aab"], ["abab", "ba"], ["bbb", "a"]):
            pieces, _ = reply(world, [ord(letter) + 1 for letter in text], stops)
            assert "".join(pieces) == expected(text, stops)
