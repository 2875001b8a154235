"""The errors a user can cause, each with one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GradalignError(ValueError):
    """A problem with what was asked for; its message is one clear sentence for the user."""


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
