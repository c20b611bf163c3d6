"""The text around a model: how a chat is written for it, and where its reply ends."""

import re
from collections.abc import Sequence

from model.errors import RequestError
from model.tokenizer import Tokenizer

CHAT_STOP = "\n\nUser:"


def tidy(text: str) -> str:
    """``text`` as one turn of a chat: line ends are \\n; blank lines, which divide turns, and space at its ends go."""
    text = re.sub(r"\r\n?", "\n", text).strip()
    return re.sub(r"\n(?:[^\S\n]*\n)+", "\n", text)


def chat_prompt(prompt: str, system_prompt: str | None = None, later: bool = False) -> str:
    """A user's turn as RWKV's chat models were trained on it, up to where the reply begins; each text is tidied first.

    There is no space at the end: the model begins its reply with one. ``later``: the turn comes after other text.
    """
    system = tidy(system_prompt or "")
    before = f"System: {system}\n\n" if system else "\n\n" if later else ""
    return f"{before}User: {tidy(prompt)}\n\nAssistant:"


class ReplyText:
    """Ids of one reply in, text out as soon as it is certain that no stop string begins in it.

    The reply is ``text[:first]``, where ``first`` is the least index at which any of ``stops`` begins in the decoded
    text; it does not depend on how the text is cut into tokens. Where a stop is found while another that began earlier
    may still come, the text that decides is awaited. With ``strip_leading_space`` one space at the start of what is
    left is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), strip_leading_space: bool = False) -> None:
        """Raises RequestError for an empty stop string, which every text would begin with."""
        if "" in stops:
            raise RequestError("stop", "found an empty string, wanted one character or more in each")
        self._decoder = tokenizer.decoder()
        self._stops = tuple(stops)
        self._firsts = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._strip = strip_leading_space
        self._held = ""  # decoded and not yet sent
        self.length = 0  # characters of the decoded text that were sent, or dropped at its start
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that may be sent after ``token``; "" once ``stopped`` is true."""
        return self._take(self._decoder.push(token), final=False)

    def push_all(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The same of several, up to the one at which ``stopped`` becomes true, and how many they were."""
        if not self._stops:
            return self._take(self._decoder.push_all(tokens), final=False), len(tokens)
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self.push(token))
            if self.stopped:
                break
        return "".join(pieces), len(pieces)

    def finish(self) -> str:
        """What was held back, at the end of the reply. ``stopped`` may become true."""
        return self._take(self._decoder.finish(), final=True)

    def _take(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = self._first_stop()
        pending = len(self._held) if final else self._first_prefix()
        self.stopped = 0 <= found <= pending
        end = found if self.stopped else pending
        ready, self._held = self._held[:end], "" if self.stopped else self._held[end:]
        self.length += end
        return self._without_space(ready)

    def _first_stop(self) -> int:
        """Where the first whole stop string begins in the held text; -1 where there is none."""
        return min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)

    def _first_prefix(self) -> int:
        """From where on the held text is the beginning of a stop string; its length where it is of none."""
        begin = max(0, len(self._held) - self._longest + 1)
        if self._firsts.isdisjoint(self._held[begin:]):  # nearly always, and much sooner said
            return len(self._held)
        for at in range(begin, len(self._held)):
            if any(len(self._held) - at < len(stop) and stop.startswith(self._held[at:]) for stop in self._stops):
                return at
        return len(self._held)

    def _without_space(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text


def ids_of_text(tokenizer: Tokenizer, ids: Sequence[int], length: int) -> list[int]:
    """Ids of the first ``length`` characters of the text of ``ids``: as many of ``ids`` as lie within, then the rest.

    Only where a text ends inside a token, or with part of a character, are there other ids than those given.
    """
    decoder, kept, at, kept_at = tokenizer.decoder(), 0, 0, 0
    for index, token in enumerate(ids, 1):
        at += len(decoder.push(token))
        if at > length:
            break
        if not decoder.pending:
            kept, kept_at = index, at
    rest = tokenizer.decode(ids[kept:])[: length - kept_at]
    return [*ids[:kept], *(tokenizer.encode(rest) if rest else [])]
