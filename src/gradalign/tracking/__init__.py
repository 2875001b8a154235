"""What a run tells others while it runs: one small protocol, and a group of trackers that cannot harm the run.

``metrics.jsonl`` is always written, before any tracker hears of a row; it is what a resumed run goes on from and what
all other commands read. A tracker only repeats it elsewhere, so a tracker that fails is left behind with a warning.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from gradalign.errors import GradalignError, shown_text

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]

_GROUPS = {
    "alignment": ("r", "drift", "drift_ratio", "cosine"),
    "spent": ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds"),
}
_KINDS = ("test", "validation", "train", "clients", "personalized")  # whose columns begin with their group's name
_GROUP_OF = {column: group for group, columns in _GROUPS.items() for column in columns}
_WRITE_SECONDS = 0.2  # between two writings: a notebook keeps every one of them for a moment


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told when a run starts or goes on.

    Attributes:
        name: What to call the run.
        folder: The run folder, when there is one.
        settings: The run's spec, as in spec.toml.
        rounds: How many rounds it will have.
        earlier: The rows that count from before an interruption, oldest first; empty in a new run. A tracker that has
            seen later ones should forget them: those rounds are played again.
    """

    name: str
    folder: Path | None
    settings: Mapping[str, Any]
    rounds: int
    earlier: Sequence[Row] = ()


@runtime_checkable
class Tracker(Protocol):
    """Something that follows a run. One object may follow several runs, one after the other."""

    def start(self, run: RunInfo) -> None:
        """Get ready for a run; what is raised here ends it before any training, with one line."""

    def log(self, row: Row) -> None:
        """Take one row of metrics: the columns of metrics.jsonl, None where nothing was measured."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Let go of the run; ``summary`` is that of summary.json, or None when the run did not come to its end."""


def tagged(row: Row) -> dict[str, float]:
    """Return a row's measured numbers under grouped names, such as ``test/loss`` and ``alignment/r``."""
    found = {}
    for column, value in row.items():
        if column == "round" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        kind = column.partition("_")[0]
        group = _GROUP_OF.get(column, kind if kind in _KINDS else "round")
        found[f"{group}/{column.removeprefix(f'{group}_')}"] = float(value)
    return found


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Trackers:
    """Several trackers as one, following one run after the other; one that fails is left behind with a warning."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        for tracker in trackers:
            if isinstance(tracker, type) or not isinstance(tracker, Tracker):
                raise GradalignError(f"a tracker is an object with start, log and end, got {tracker!r}")
        self._all = list(trackers)
        self._proven: list[Tracker] = []
        """Those that have followed a run before: of them, a failed start is a passing trouble, not a wrong setting."""
        self._at_work: list[Tracker] = []

    def start(self, run: RunInfo) -> None:
        """Start all; the first that cannot start at all raises, and the others are let go."""
        for tracker in self._all:
            try:
                tracker.start(run)
            except Exception as error:
                if tracker in self._proven:
                    _warn(tracker, error)
                    continue
                self.end(None)
                if isinstance(error, GradalignError):
                    raise
                raise GradalignError(f"{_name(tracker)} could not start: {_one_line(error)}") from error
            self._at_work.append(tracker)
            self._proven.append(tracker)

    def log(self, row: Row) -> None:
        """Hand on a row."""
        for tracker in tuple(self._at_work):
            try:
                tracker.log(row)
            except Exception as error:
                self._at_work.remove(tracker)
                _warn(tracker, error)
                with suppress(Exception):
                    tracker.end(None)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """End all that are still at work."""
        while self._at_work:
            tracker = self._at_work.pop()
            try:
                tracker.end(summary)
            except Exception as error:
                _warn(tracker, error)

    def catch_up(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """Tell of a run that is complete already those that keep their record in its folder and have none there."""
        for tracker in self._all:
            place = getattr(tracker, "subfolder", None)
            if place is None or run.folder is None or (run.folder / place).exists():
                continue
            late = Trackers([tracker])
            late.start(run)
            late.end(summary)


def _name(tracker: Tracker) -> str:
    return f"the tracker {type(tracker).__name__}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _warn(tracker: Tracker, error: Exception) -> None:
    logger.warning("%s failed and gets no more of this run, which goes on: %s", _name(tracker), _one_line(error))


# Progress as one line of plain text that is written over: for notebooks, and where no package draws bars.


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this program: its output is a page, not a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def accuracy_note(row: Mapping[str, Any], before: str = "") -> str:
    """Return the newest measured number worth showing."""
    for scored_on in ("test", "validation"):
        if row.get(f"{scored_on}_accuracy") is not None:
            return f"{scored_on} accuracy {row[f'{scored_on}_accuracy']:.1%}"
        if row.get(f"{scored_on}_loss") is not None:
            return f"{scored_on} loss {row[f'{scored_on}_loss']:.4g}"
    return before


@contextmanager
def rounds_line(rounds: int, label: str, file: IO[str] | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show the rounds of a run in one line; yields a function to call with each row."""
    note, shown, waiting, last, began = "", "", "", 0.0, time.monotonic()

    def show(text: str) -> None:
        nonlocal shown
        if file is not None:
            file.write(f"\r{text:<{len(shown)}}")
            file.flush()
        shown = text

    def write(row: Mapping[str, Any]) -> None:
        nonlocal note, waiting, last
        note, now = accuracy_note(row, note), time.monotonic()
        waiting = shown_text(f"{label}: round {row['round']} of {rounds}, {note or 'training'}, {now - began:.0f} s")
        if now - last >= _WRITE_SECONDS:
            last = now
            show(waiting)

    try:
        yield write
    finally:
        show(f"{waiting}\n")
