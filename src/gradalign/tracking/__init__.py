"""What a run tells others while it runs: one small protocol, and a group of trackers that cannot harm the run.

``metrics.jsonl`` is always written, before any tracker hears of a row; it is what a resumed run goes on from and what
all other commands read. A tracker only repeats it elsewhere, so a tracker that fails is left behind with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gradalign.errors import GradalignError

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]

_GROUPS = {
    "alignment": ("r", "drift", "drift_ratio", "cosine"),
    "spent": ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds"),
    "test": ("test_loss", "test_accuracy"),
    "validation": ("validation_loss", "validation_accuracy"),
    "train": ("train_loss", "train_accuracy"),
}
_KINDS = ("test", "validation", "clients", "personalized")  # whose further columns begin with their group's name
_GROUP_OF = {column: group for group, columns in _GROUPS.items() for column in columns}


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

    def __bool__(self) -> bool:
        return bool(self._all)

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
