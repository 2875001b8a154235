"""Finding runs below folders, and each run as its folder tells it: what is whole is returned, what is not is named."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gradalign.errors import shown_text
from gradalign.runs import (
    CHECKPOINT,
    CLASS_COUNTS,
    CLIENTS,
    COMPARISON,
    METRICS,
    SPEC,
    SUMMARY,
    SWEEP,
    TRIALS,
    safe_name,
)
from gradalign.runs.metrics import read_metrics
from gradalign.runs.untrusted import (
    ClientTable,
    HeldClassCounts,
    UnreadableError,
    is_there,
    number_of,
    read_class_counts,
    read_client_table,
    read_failure,
    read_optional,
    read_table,
)

State = Literal["complete", "diverged", "unfinished"]
Row = dict[str, float]
_DEEPEST, _MOST_FOLDERS = 40, 100_000
_NO_RUN = "there is no run in it"


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A folder that is not in the report, and why."""

    folder: str
    reason: str
    damaged: bool = False
    """It is of a run that ended: its files say so, and cannot be read."""

    def __str__(self) -> str:
        return f"skipped {self.folder}: {self.reason}"


def _skip(folder: object, reason: object, **more: bool) -> Skipped:
    return Skipped(folder=shown_text(folder), reason=shown_text(reason), **more)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its folder tells it: ``rows`` have finite numbers only, ``summary`` is empty if it did not finish.

    In a comparison ``entry`` is its name there, and ``place`` the entry's place in the comparison's own order.
    """

    folder: Path
    entry: str | None
    comparison: Path | None
    spec: Mapping[str, Any]
    rows: list[Row]
    summary: Mapping[str, Any]
    state: State
    failure: str | None = None
    held: HeldClassCounts | None = None
    clients: ClientTable | None = None
    place: int = 0

    @property
    def scored_on(self) -> str:
        """What it was scored on: "validation" where training examples were held out for that, else "test"."""
        clients = self.spec.get("clients")
        held_out = isinstance(clients, Mapping) and clients.get("holdout") is not None
        return "validation" if held_out or any("validation_loss" in row for row in self.rows) else "test"

    @property
    def seed(self) -> int:
        return int(self.spec.get("seed", 0))


@dataclass
class Gathered:
    """The runs that can be reported, and one reason for each folder that cannot."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


class Search:
    """Which folders may be runs: names and kinds of files only, nothing is read.

    Links are followed, but no folder is entered twice, so links that lead in a circle end.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.runs: list[Path] = []
        self.skipped: list[Skipped] = []
        self._seen: set[tuple[int, int]] = set()
        for folder in folders:
            problem = _not_a_folder(folder)
            if problem or not self._look(folder, 0):
                self.skipped.append(_skip(folder, problem or _NO_RUN))

    def _look(self, folder: Path, depth: int) -> bool:
        """Collect the runs of one folder; return whether there was anything to say of it."""
        if len(self._seen) == _MOST_FOLDERS:  # a link may lead to a whole disk
            reason = f"{_MOST_FOLDERS:,} folders were looked at already; name those that hold runs"
            self.skipped.append(_skip(folder, reason))
            self._seen.add((-1, -1))
        if len(self._seen) > _MOST_FOLDERS:
            return True
        try:
            here = folder.stat()
            if (here.st_dev, here.st_ino) in self._seen:
                return True
            self._seen.add((here.st_dev, here.st_ino))
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self.skipped.append(_skip(folder, error.strerror or error))
            return True
        if {SPEC, METRICS, CHECKPOINT} & {entry.name for entry in entries}:
            self.runs.append(folder)
            return True
        if depth >= _DEEPEST:
            return False
        inside = [folder / entry.name for entry in entries if not entry.name.startswith(".") and os.path.isdir(entry)]
        # Of a folder without any run the topmost is named, not everything below it.
        empty = [path for path in inside if not self._look(path, depth + 1)]
        if len(empty) == len(inside):
            names = {entry.name for entry in entries}
            remains = SUMMARY in names and not {COMPARISON, SWEEP} & names  # of a run that has ended
            self.runs += [folder] * remains
            return remains
        self.skipped += [_skip(path, _NO_RUN) for path in empty]
        return True


def _not_a_folder(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "there is no such folder"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None if stat.S_ISDIR(mode) else "it is a file, not a folder"


def gather(folders: Iterable[Path], *, unfinished: bool = False) -> Gathered:
    """Read all runs in and below the folders; runs that did not finish only when asked for."""
    found = Search(folders)
    gathered = Gathered(skipped=found.skipped)
    comparisons: dict[Path, dict[str, Any]] = {}
    cut_short: dict[Path, list[Path]] = {}
    for folder in found.runs:
        try:
            run = _read_run(folder, comparisons)
        except UnreadableError as error:
            gathered.skipped.append(_skip(folder, error.reason, damaged=has_ended(folder)))
            continue
        sweep = _sweep_of(folder)
        if unfinished or run.state != "unfinished":
            gathered.runs.append(run)
        elif sweep is not None:
            cut_short.setdefault(sweep, []).append(folder)
        else:
            done = int(run.rows[-1]["round"]) if run.rows else 0
            rounds = f"{done:,} of {run.spec.get('rounds', '?')} rounds"
            why = f": {run.failure}" if run.failure else ""
            reason = f"not finished ({rounds} are written){why}; continue it with --resume, or add --unfinished"
            gathered.skipped.append(_skip(folder, reason))
    gathered.runs, repeated = _without_repeats(gathered.runs)
    gathered.skipped += [*repeated, *(_cut_short(sweep, trials) for sweep, trials in cut_short.items())]
    return gathered


def has_ended(folder: Path) -> bool:
    """Return whether a run's folder says that there is nothing left to do: it is complete, or it diverged."""
    failure = read_failure(folder)
    return is_there(folder / SUMMARY) or (failure is not None and failure.diverged)


def _sweep_of(folder: Path) -> Path | None:
    """Return the sweep that a run is a trial of: trials lie in trials/STAGE/TRIAL below its folder."""
    above = Path(os.path.abspath(folder)).parents
    is_trial = len(above) > 2 and above[1].name == TRIALS and is_there(above[2] / SWEEP)
    return above[2] if is_trial else None


def _cut_short(sweep: Path, trials: Sequence[Path]) -> Skipped:
    """Say in one line what is left out of a sweep: there may be hundreds."""
    count = f"{len(trials)} trial{'s' * (len(trials) > 1)}"
    done = is_there(sweep / SUMMARY)
    why = "that the sweep ended early" if done else "not finished: ended early, or the sweep is not done"
    return _skip(os.path.normpath(trials[0] / ".." / ".."), f"{count} {why}; --unfinished shows them")


def _without_repeats(runs: list[Run]) -> tuple[list[Run], list[Skipped]]:
    """Return the runs with other settings or seeds, the finished ones first choice, and the copies of them."""
    first: dict[str, Run] = {}
    repeated = []
    for run in sorted(runs, key=lambda run: get_args(State).index(run.state)):
        same = first.setdefault(canonical([run.entry or run.spec["algorithm"]["name"], run.spec]), run)
        if same is not run:
            repeated.append(_skip(run.folder, f"the same settings and seed as {same.folder}"))
    chosen = {id(run) for run in first.values()}
    return [run for run in runs if id(run) in chosen], repeated


def canonical(value: Any) -> str:
    """Return settings as text that is the same for the same settings."""
    return json.dumps(value, sort_keys=True, default=str)


def _read_run(folder: Path, comparisons: dict[Path, dict[str, Any]]) -> Run:
    spec = read_table(folder / SPEC)
    _check_spec(folder, spec)
    entry, place, comparison = _place_in_comparison(folder, comparisons)
    failure = read_failure(folder)
    diverged = failure is not None and failure.diverged
    complete = is_there(folder / SUMMARY)
    metrics = folder / METRICS
    if not complete and not diverged and not is_there(metrics):
        raise UnreadableError(metrics, "{file} is missing", f"it has no {METRICS}: the run has not begun")
    rows = [_finite(row) for row in read_metrics(folder)] if complete or is_there(metrics) else []
    if not rows and not diverged:
        raise UnreadableError(metrics, "{file} has no whole row")
    summary = read_table(folder / SUMMARY) if complete else {}
    told, last = (number_of(one.get("communication_rounds")) for one in (summary, rows[-1] if rows else {}))
    if told is not None and last is not None and told != last:  # copied over one another
        ends = f"ends after {last:,.0f} rounds of communication, {SUMMARY} after {told:,.0f}: files of two runs"
        raise UnreadableError(metrics, "{file} " + ends)
    return Run(
        folder=folder,
        entry=entry,
        comparison=comparison,
        spec=spec,
        rows=rows,
        summary=summary,
        state="complete" if complete else "diverged" if diverged else "unfinished",
        failure=None if complete or failure is None else failure.reason,
        held=read_class_counts(folder / CLASS_COUNTS),
        clients=read_client_table(folder / CLIENTS) if complete else None,  # else perhaps of fewer rounds
        place=place,
    )


def _check_spec(folder: Path, spec: Mapping[str, Any]) -> None:
    algorithm = spec.get("algorithm")
    if not isinstance(algorithm, Mapping) or not isinstance(algorithm.get("name"), str):
        raise UnreadableError(folder / SPEC, "{file} names no algorithm")
    if not isinstance(spec.get("task", {}), Mapping):
        raise UnreadableError(folder / SPEC, "the task in {file} is not a table")
    if type(spec.get("seed", 0)) is not int:
        raise UnreadableError(folder / SPEC, "the seed in {file} is not a whole number")


def _finite(given: Mapping[str, Any]) -> Row:
    """Return what one can reckon with of a row."""
    numbers = {name: number_of(value) for name, value in given.items()}
    row = {name: value for name, value in numbers.items() if value is not None}
    if "bytes_up" in row and "bytes_down" in row:
        row["bytes"] = row["bytes_up"] + row["bytes_down"]
    return row


def _place_in_comparison(folder: Path, comparisons: dict[Path, dict[str, Any]]) -> tuple[str | None, int, Path | None]:
    """Return a run's name and place in the comparison it belongs to: runs lie in ENTRY/seedN below its folder."""
    place = Path(os.path.realpath(folder))
    if len(place.parts) < 3:
        return None, 0, None
    above = place.parent.parent
    if above not in comparisons:
        comparisons[above] = read_optional(above / COMPARISON)
    names = comparisons[above].get("algorithms")
    for number, name in enumerate(names if isinstance(names, list) else []):
        if isinstance(name, str) and safe_name(name) == place.parent.name:
            return shown_text(name), number, above
    return None, 0, None
