"""Errors that a person can do something about. Each is one line: what was found, what was wanted, what to do."""

from typing import ClassVar


class RwkvError(Exception):
    """The base of all of them. ``code`` never changes once released, so that clients may match on it."""

    code: ClassVar[str] = "E000"

    def __str__(self) -> str:
        return f"{self.code} {super().__str__()}"


class CheckpointError(RwkvError):
    """The file is not a checkpoint that this model can run."""

    code = "E100"


class DownloadError(CheckpointError):
    """The checkpoint did not arrive whole."""

    code = "E110"


class VocabularyError(RwkvError):
    """The vocabulary file is not one that every text can be encoded with."""

    code = "E120"


class RequestError(RwkvError, ValueError):
    """An input of a request is out of its bounds; ``field`` names it."""

    code = "E200"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SessionError(RwkvError):
    """A session cannot be gone on with, or cannot be kept."""

    code = "E400"


class SessionBusyError(SessionError):
    """Another request has the session."""

    code = "E410"


class SessionRefusedError(SessionError):
    """What is kept under the name does not fit this server, or is damaged."""

    code = "E420"


class SessionNotKeptError(SessionError):
    """The turn was made, and its state could not be kept: the session is as it was before."""

    code = "E430"
