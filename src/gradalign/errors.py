"""The errors a user can cause, and the checks that raise them: each is one sentence. Imports nothing heavy."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


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


class GradalignWarning(UserWarning):
    """Something that was asked for works, and is hardly what was meant."""


def warn(text: str) -> None:
    """Warn at the line, outside the library, that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "gradalign":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, GradalignWarning, stacklevel=level)


class NotWrittenError(GradalignError):
    """A file could not be written: the disk is full, or closed to us; what was there before is as it was."""


class RunEndedError(GradalignError):
    """A run ended by itself before its last round; its folder says why."""


class DivergedError(RunEndedError):
    """A loss, a gradient or an update became NaN or infinite; training cannot go on from there."""


class ClientError(RunEndedError):
    """The user's own code (model, loss, data) raised while it worked for one client."""


class LostRankError(RunEndedError):
    """A rank of a torchrun job ended before the others were done."""


class FolderInUseError(GradalignError):
    """Another process is writing to the folder; it may be free in a moment."""


class TooFewClientsError(RunEndedError):
    """Fewer clients answered a phase than the federation asks for; the round was not taken."""


def told(error: BaseException) -> str:
    """Return what user code raised, and where: its kind, its words, and the last line of code that is the user's."""
    import sysconfig
    import traceback

    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    not_theirs = (*libraries, str(Path(__file__).parent), "<")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = next((frame for frame in frames if not frame.filename.startswith(not_theirs)), None)
    words = f"{type(error).__name__}: {error}"
    if own is None or isinstance(error, SyntaxError):  # which says it itself
        return words
    return f"{words} ({'/'.join(Path(own.filename).parts[-2:])}, line {own.lineno})"


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


@contextmanager
def named_failure(where: str, problem: str = "failed") -> Iterator[None]:
    """Turn what the user's own code raises into a ClientError that says whose it is."""
    try:
        with no_exit(where):
            yield
    except GradalignError:
        raise
    except Exception as error:
        raise ClientError(f"{where} {problem}: {told(error)}") from error


_NEEDED_FOR = {
    "runs": "a run folder",
    "recipes": "a recipe",
    "frames": "a data frame",
    "metrics": "a metric by name",
    "plots": "a picture",
    "report": "the report",
    "flower": "Flower",
    "tables": "a table",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
}


def need(package: str, extra: str) -> Any:
    """Import a package that an extra of this library brings, or say in one sentence what to install."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        missing = package.partition(".")[0]
        if (error.name or "").partition(".")[0] != missing:
            raise
        install = f"pip install 'gradalign[{extra}]'"
        raise GradalignError(f"{_NEEDED_FOR[extra]} needs the package {missing}; install it with: {install}") from None


def flag(name: str, value: Any) -> bool:
    """Return a switch that is True or False and nothing that merely counts as such."""
    if not _is_switch(value):
        raise GradalignError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _is_switch(value: Any) -> bool:
    import numpy as np

    return isinstance(value, bool | np.bool_)


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a whole number (NumPy's and torch's too) inside its range."""
    upper = "" if most is None else f" and at most {most:,}"
    try:
        number = None if _is_switch(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise GradalignError(f"{name} must be a whole number of at least {least}{upper}, got {value!r}")
    return number


def real(name: str, value: Any, least: float, most: float = math.inf, *, below: bool = False) -> float:
    """Return a number inside its range; with ``below``, the upper end is not part of it."""
    import numpy as np

    ends = f"at least {least:g}" if math.isinf(most) else f"in [{least:g}, {most:g}{')' if below else ']'}"
    plain = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    number = float(value) if plain else math.nan
    if not (least <= number < most if below else least <= number <= most):
        raise GradalignError(f"{name} must be a number {ends}, got {value!r}")
    return number
