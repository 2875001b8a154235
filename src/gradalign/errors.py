"""The errors a user can cause, each with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def shown_text(text: object) -> str:
    """Return text that any terminal, page or picture can hold: no control characters, no halves of characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


class GradalignError(ValueError):
    """A problem with what was asked for; its message is one clear sentence for the user.

    Names and settings in it may come from anybody's files: the message is one line that no terminal obeys.
    """

    def __init__(self, message: object = "") -> None:
        lines = str(message).replace("\t", " ").splitlines()
        super().__init__(shown_text(" ".join(line.strip() for line in lines)))


class NotWrittenError(GradalignError):
    """A file could not be written: the disk is full, or closed to us; what was there before is as it was."""


class DivergedError(GradalignError):
    """A loss, a gradient or an update became NaN or infinite; training cannot go on from there."""


class ClientError(GradalignError):
    """The user's own code (model, loss, data) raised while it worked for one client."""


class LostRankError(GradalignError):
    """A rank of a torchrun job ended before the others were done."""


class FolderInUseError(GradalignError):
    """Another process is writing to the folder; it may be free in a moment."""


class TooFewClientsError(GradalignError):
    """Fewer clients answered a phase than the federation asks for; the round was not taken."""


@contextmanager
def no_exit(where: str) -> Iterator[None]:
    """Turn a ``sys.exit`` in the user's own code, which would end everything without a word, into a ClientError."""
    try:
        yield
    except SystemExit as stop:
        raise ClientError(
            f"{where} called sys.exit({'' if stop.code is None else repr(stop.code)}) and would have ended everything; "
            "let it return, or raise an error that says what is wrong"
        ) from stop
