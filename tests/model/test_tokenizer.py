"""Text to ids and back: facts of the World vocabulary, any text, any cut, any vocabulary file."""

import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from model.errors import RequestError, VocabularyError
from model.tokenizer import Tokenizer

HELLO = "Hello🦩🔥𠮷"
HELLO_IDS = [33155, 3319, 167, 170, 28334, 241, 161, 175, 184]
BAD, REPLACEMENT = 129, 19232  # the lone byte 0x80, and a real U+FFFD


@pytest.fixture(scope="module")
def world() -> Tokenizer:
    return Tokenizer()


def streamed(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token) for token in ids), decoder.finish()]


@pytest.mark.parametrize(
    ("text", "ids"),
    [(HELLO, HELLO_IDS), ("\n\nUser:", [261, 24281, 59]), ("\n\n\nUser:", [3328, 24281, 59]), ("", []), ("\0", [1])],
)
def test_ids_of_the_world_vocabulary(world: Tokenizer, text: str, ids: list[int]) -> None:
    assert world.encode(text) == ids
    assert world.decode(ids) == text


def test_facts_of_the_world_vocabulary(world: Tokenizer) -> None:
    assert world.defined == list(range(65530))
    assert [world.token_bytes(byte + 1) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert sum(b"\n\n" in world.token_bytes(token) for token in world.defined) == 34
    several = sum(len(world.encode(chr(code))) > 1 for code in range(0x4E00, 0xA000))
    assert round(100 * several / (0xA000 - 0x4E00)) == 61
    for token in (0, 65530, 65535, 65536, -1):
        assert world.token_bytes(token) == b""


@pytest.mark.acceptance(1)
@pytest.mark.parametrize("text", [HELLO, "a\ufffdb", "é\u200d👩‍👩‍👧x", "\0\r\n\u2028"])
def test_streamed_text_is_the_whole_decode_for_every_cut(world: Tokenizer, text: str) -> None:
    for start in range(len(text)):
        ids = world.encode(text[start:])
        assert "".join(streamed(world, ids)) == text[start:]
        for end in range(len(ids) + 1):  # max_tokens
            pieces = streamed(world, ids[:end])
            assert "".join(pieces) == world.decode(ids[:end])
            whole = b"".join(map(world.token_bytes, ids[:end])).decode("utf-8", "ignore")
            assert "".join(pieces[:-1]) == whole, "a piece held part of a character, or more was held back than that"


@pytest.mark.acceptance(1)
def test_a_lone_bad_byte_holds_nothing_back(world: Tokenizer) -> None:
    assert streamed(world, [BAD, *world.encode("ab"), BAD, 34]) == ["\ufffd", "ab", "\ufffd", "!", ""]
    assert streamed(world, [0xC3 + 1, 98]) == ["", "\ufffda", ""]


@pytest.mark.acceptance(1)
def test_a_real_replacement_character_passes(world: Tokenizer) -> None:
    assert world.encode("\ufffd") == [REPLACEMENT]
    assert streamed(world, [REPLACEMENT, 98]) == ["\ufffd", "a", ""]


@pytest.mark.acceptance(1)
def test_any_bytes_stream_as_they_decode(world: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.choice([rng.randrange(65536), rng.randrange(257), *HELLO_IDS]) for _ in range(rng.randrange(12))]
        assert "".join(streamed(world, ids)) == world.decode(ids)


@pytest.mark.acceptance(2)
def test_id_0_and_undefined_ids_add_no_text(world: Tokenizer) -> None:
    assert streamed(world, [98, 0, 65535, 99]) == ["a", "", "", "b", ""]


@pytest.mark.acceptance(2)
def test_only_defined_ids_may_be_drawn(world: Tokenizer) -> None:
    mask = world.allowed(65536)
    assert mask.dtype == torch.bool and mask.shape == (65536,)
    assert mask[:65530].all() and not mask[65530:].any()
    with pytest.raises(VocabularyError, match="up to id 65529, wanted 511 at most"):
        world.allowed(512)


def test_the_longest_match_is_taken(world: Tokenizer) -> None:
    rng = random.Random(2)
    by_text = {world.token_bytes(token): token for token in world.defined[1:]}
    alphabet = ["a", "the", " ", "\n", "    ", "é", "中", "文", "🦩", "\x7f", "\u0301", "def f(x):", "0", "===="]
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        assert world.encode(text) == longest_match(text.encode(), by_text)


def longest_match(data: bytes, by_text: dict[bytes, int]) -> list[int]:
    ids, at = [], 0
    while at < len(data):
        size = next(size for size in range(128, 0, -1) if data[at : at + size] in by_text and at + size <= len(data))
        ids.append(by_text[data[at : at + size]])
        at += size
    return ids


@pytest.mark.parametrize("text", ["\ud800", "ab\udc80c"])
def test_half_a_surrogate_pair_is_refused_by_name(world: Tokenizer, text: str) -> None:
    with pytest.raises(
        RequestError, match=r"system_prompt: character \d is U\+D[8C][08]0, half of a surrogate pair"
    ) as error:
        world.encode(text, "system_prompt")
    assert error.value.field == "system_prompt" and error.value.code == "E200"


def test_a_panic_of_the_encoder_is_an_ordinary_error(world: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Broken:
        def encode(self, _: str) -> list[int]:
            raise PanicException("index out of range")

    broken = Tokenizer.__new__(Tokenizer)
    broken._encoder = Broken()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="index out of range"):
        broken.encode("a")


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n\n", "𠮷", " ", "\0", "\U0010ffff"])
def test_two_million_characters_take_seconds(world: Tokenizer, text: str) -> None:
    whole = (text * (2_000_000 // len(text) + 1))[:2_000_000]
    start = time.perf_counter()
    ids = world.encode(whole)
    assert time.perf_counter() - start < 10
    assert world.decode(ids) == whole


SINGLES = [f"{byte + 1} {chr(byte)!r} 1" if byte < 128 else f"{byte + 1} {bytes([byte])!r} 1" for byte in range(256)]


def write(folder: Path, lines: list[str], end: str = "\n") -> Path:
    path = folder / "vocab.txt"
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def test_a_vocabulary_of_another_numbering(tmp_path: Path) -> None:
    """As the one that is cut out of the World vocabulary for a small model."""
    extra = ["'the'", "' the'", "'🦩'", "b'\\xf0\\x9f'", "'\\'\"'", "'\\\\n'", "'\\u3000'", '"it\'s"', "'    '"]
    texts = [line.split(" ", 1)[1].rsplit(" ", 1)[0] for line in reversed(SINGLES)] + extra
    own = [f"{7 * number + 3} {text} {size(text)}" for number, text in enumerate(texts)]
    tokenizer = Tokenizer(write(tmp_path, own))
    sample = "it's the 🦩🔥\u3000'\" \\n    \0\xff"
    ids = tokenizer.encode(sample)
    by_text = {tokenizer.token_bytes(token): token for token in tokenizer.defined[1:]}
    assert ids == longest_match(sample.encode(), by_text)
    assert tokenizer.decode(ids) == sample and "".join(streamed(tokenizer, ids)) == sample
    assert tokenizer.defined == [0, *(7 * number + 3 for number in range(len(texts)))]
    assert tokenizer.allowed(5000).sum() == len(texts) + 1


def size(literal: str) -> int:
    value = eval(literal)
    return len(value if isinstance(value, bytes) else value.encode())


@pytest.mark.acceptance(5)
def test_crlf_line_ends_load(tmp_path: Path) -> None:
    assert Tokenizer(write(tmp_path, [*SINGLES, "300 'a\\r\\n' 3"], "\r\n")).encode("a\r\na") == [300, 98]


@pytest.mark.acceptance(5)
@pytest.mark.parametrize("byte", [0, 10, 97, 255])
def test_a_missing_byte_fails_at_setup(tmp_path: Path, byte: int) -> None:
    path = write(tmp_path, [line for line in SINGLES if not line.startswith(f"{byte + 1} ")])
    with pytest.raises(
        VocabularyError,
        match=f"E120 vocab.txt: found 255 of the 256 single bytes, wanted all; without {byte:#04x}",
    ):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "found '', wanted ID 'literal' LENGTH"),
        ("no line", "found 'no line', wanted ID 'literal' LENGTH"),
        ("300 ab 2", "found '300 ab 2', wanted ID 'literal' LENGTH"),
        ("300 'ab 2", "found 'ab, wanted a Python literal"),
        ("300 'ab'+'c' 3", "wanted a Python literal"),
        ("300 'ab' x", "wanted ID 'literal' LENGTH"),
        ("300 'ab' 3", "found a length of 3 for 'ab', wanted 2"),
        ("300 'é' 1", "found a length of 1 for 'é', wanted 2"),
        ("300 '' 0", "wanted one byte or more"),
        ("0 'ab' 2", "found id 0, wanted 1 to 65535"),
        ("-3 'ab' 2", "wanted ID 'literal' LENGTH"),
        ("65536 'ab' 2", "found id 65536, wanted 1 to 65535"),
        ("98 'ab' 2", "found id 98 a second time"),
        ("300 'a' 1", "found the text of line 98 again"),
        ("300 b'a' 1", "found the text of line 98 again"),
        ("300 '\\ud800' 3", "wanted a Python literal"),
        ("300 __import__('os').system('true') 3", "wanted ID 'literal' LENGTH"),
        ("300 'a'.__class__ 3", "wanted a Python literal"),
    ],
)
def test_each_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(VocabularyError) as error:
        Tokenizer(write(tmp_path, [*SINGLES, line]))
    message = str(error.value)
    assert message.startswith("E120 vocab.txt: line 257: ") and says in message and "\n" not in message


def test_a_file_that_is_no_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="cannot be read: No such file"):
        Tokenizer(tmp_path / "none.txt")
    (tmp_path / "vocab.txt").write_bytes(b"1 '\xff' 1\n")
    with pytest.raises(VocabularyError, match="found a byte that is no UTF-8 at 3"):
        Tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "vocab.txt").write_bytes(b"")
    with pytest.raises(VocabularyError, match="found 0 of the 256 single bytes"):
        Tokenizer(tmp_path / "vocab.txt")
