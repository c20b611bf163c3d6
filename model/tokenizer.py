"""Text to ids and back, by longest match in a vocabulary of byte strings (RWKV's World vocabulary or a cut of it).

A vocabulary file has a line ``ID LITERAL LENGTH`` for each token: a positive id, a Python literal of str or bytes, and
the number of its UTF-8 bytes. Id 0 is never in it: it ends a document. Source of the format and of the vocabulary:
rwkv_vocab_v20230424 of BlinkDL/RWKV-LM, which pyrwkv_tokenizer carries.

Encoding is pyrwkv_tokenizer's. Decoding is done here, because its own panics on part of a character.
"""

import ast
import codecs
import tempfile
from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

import torch
from pyrwkv_tokenizer import RWKVTokenizer
from torch import Tensor

from model.errors import RequestError, VocabularyError

WORLD = files("pyrwkv_tokenizer") / "rwkv_vocab_v20230424.txt"
END = 0  # the id that ends a document
MAX_ID = 65535  # the encoder keeps ids in 16 bits


class Tokenizer:
    """One vocabulary. It does not change, and threads may share it."""

    def __init__(self, vocab_path: Path | None = None) -> None:
        """Read ``vocab_path``; None is the World vocabulary. Raises VocabularyError, in one line, for a file that is no
        vocabulary or leaves some text without ids: all 256 single bytes must be in it."""
        if vocab_path is None:
            with as_file(WORLD) as path:
                tokens = _read(path)
                self._encoder = _encoder(path)
        else:
            tokens = _read(vocab_path)
            self._encoder = _encoder_of(tokens, vocab_path)
        self._bytes = [b""] * (max(tokens) + 1)
        for token, text in tokens.items():
            self._bytes[token] = text
        self.defined = [END, *sorted(tokens)]

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """The ids of ``text``. Raises RequestError, naming ``field``, for half of a surrogate pair: it has no bytes."""
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            character = ord(text[error.start])
            raise RequestError(
                field, f"character {error.start} is U+{character:04X}, half of a surrogate pair; send whole characters"
            ) from None
        except Exception:
            raise
        except BaseException as error:  # a panic in Rust; nothing but this must come of it
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise RequestError(field, f"cannot be encoded ({error})") from None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of an id; none for 0 and for ids that are not in the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def decoder(self) -> "IncrementalDecoder":
        """A decoder for the ids of one reply."""
        return IncrementalDecoder(self)

    def allowed(self, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
        """Which of a model's ids may be drawn, as bool [vocab_size]: those with text, and 0.

        Raises VocabularyError where the vocabulary has ids that the model has not.
        """
        if self.defined[-1] >= vocab_size:
            raise VocabularyError(
                f"the vocabulary goes up to id {self.defined[-1]}, wanted {vocab_size - 1} at most, the model's last; "
                "use the vocabulary that belongs to the checkpoint"
            )
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[self.defined] = True
        return mask.to(device)


class IncrementalDecoder:
    """Ids in, text out as soon as it is certain; joined, it equals ``Tokenizer.decode`` of all ids.

    Only bytes that may yet become a character are held back, three at most.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" where it ends inside a character."""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def push_all(self, tokens: Iterable[int]) -> str:
        """The same of several, at a fifth of the time."""
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, tokens)))

    @property
    def pending(self) -> bool:
        """Whether part of a character is held back."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """What is left of a character that was cut off: U+FFFD or nothing."""
        return self._utf8.decode(b"", final=True)


def _read(path: Path) -> dict[int, bytes]:
    """The tokens of a vocabulary file by id, checked."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise VocabularyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise VocabularyError(
            f"{path.name}: found a byte that is no UTF-8 at {error.start}, wanted a vocabulary file"
        ) from None
    if lines[-1] == "":
        del lines[-1]
    tokens: dict[int, bytes] = {}
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            token, text = _parse(line.removesuffix("\r"))
            if token in tokens:
                raise ValueError(f"id {token} a second time, wanted each id once")
            if text in line_of:
                raise ValueError(f"the text of line {line_of[text]} again, wanted each text once")
        except ValueError as error:
            raise VocabularyError(f"{path.name}: line {number}: found {error}") from None
        tokens[token], line_of[text] = text, number
    missing = [f"{byte:#04x}" for byte in range(256) if bytes([byte]) not in line_of]
    if missing:
        raise VocabularyError(
            f"{path.name}: found {256 - len(missing)} of the 256 single bytes, wanted all; "
            f"without {', '.join(missing[:5])}"
        )
    return tokens


def _parse(line: str) -> tuple[int, bytes]:
    """Id and bytes of one line; ValueError says what was found instead."""
    id_, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    if not (id_.isdecimal() and id_.isascii() and length.isdecimal() and literal.lstrip("b")[:1] in ("'", '"')):
        raise ValueError(f"{line[:60]!r}, wanted ID 'literal' LENGTH")
    if not 0 < int(id_) <= MAX_ID:
        raise ValueError(f"id {id_}, wanted 1 to {MAX_ID}")
    text = _evaluate(literal)
    if len(text) != int(length) or not text:
        raise ValueError(f"a length of {length} for {literal[:60]}, wanted {len(text) or 'one byte or more'}")
    return int(id_), text


def _evaluate(literal: str) -> bytes:
    plain = literal[1:-1]
    if literal == f"'{plain}'" and "'" not in plain and "\\" not in plain:
        return plain.encode()  # most tokens, at a tenth of the time
    try:
        value = ast.literal_eval(literal)
        return value if isinstance(value, bytes) else value.encode()
    except (ValueError, SyntaxError, AttributeError, MemoryError, RecursionError):
        raise ValueError(f"{literal[:60]}, wanted a Python literal of str or bytes") from None


def _encoder_of(tokens: dict[int, bytes], path: Path) -> RWKVTokenizer:
    """The encoder for checked tokens, which it gets in the one form that it is sure to read."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "vocabulary.txt"
        lines = (f"{token} {_literal(text)} {len(text)}\n" for token, text in sorted(tokens.items()))
        plain.write_bytes("".join(lines).encode())
        encoder = _encoder(plain)
    for token, text in tokens.items():
        if _is_text(text) and encoder.encode(text.decode()) != [token]:
            raise VocabularyError(
                f"{path.name}: the encoder does not know id {token}, {text!r}; take it out of the file"
            )
    return encoder


def _encoder(path: Path) -> RWKVTokenizer:
    try:
        return RWKVTokenizer(vocab_filepath=str(path))
    except BaseException as error:  # it panics where it cannot read a line
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise VocabularyError(f"{path.name}: the encoder cannot read it ({error})") from None


def _literal(text: bytes) -> str:
    return repr(text.decode()) if _is_text(text) else repr(text)


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
