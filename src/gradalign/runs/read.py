"""Reading run folders that anybody may have written: what is whole is returned, what is not is named.

Nothing here trusts a file: sizes are bounded, only regular files are opened, numbers are finite or left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradalign.runs import COMPARISON, CLASS_COUNTS, METRICS, SPEC, SUMMARY, SWEEP, TRIALS, safe_name
from gradalign.runs.untrusted import (
    Failure,
    UnreadableError,
    is_there,
    read_failure,
    read_metrics,
    read_optional,
    read_table,
    shown_text,
)
from gradalign.runs.untrusted import number_of as number_of
from gradalign.runs.find import Skipped, find_runs

State = Literal["complete", "diverged", "unfinished"]
Row = dict[str, float]
_MOST_CELLS = 200_000


@dataclass(frozen=True, kw_only=True)
class HeldClassCounts:
    """Who holds what: counts (clients, classes), the classes' names, and how many clients there are in all."""

    counts: list[list[int]]
    names: list[str]
    clients: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its folder tells it.

    Attributes:
        folder: Where it lies.
        entry: Its name in a comparison, or None.
        place: The entry's place in the comparison's own order.
        comparison: The comparison's folder, or None.
        spec: Its settings.
        rows: The finite numbers of every row of its metrics; each has "round".
        summary: Its summary; empty when it did not finish.
        state: How it ended.
        failure: Why it ended by itself before its last round.
        held: The division of the data, where the folder has it.
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
    place: int = 0

    @property
    def scored_on(self) -> str:
        """What it was scored on: "validation" where training examples were held out for that, else "test"."""
        clients = self.spec.get("clients")
        held_out = isinstance(clients, Mapping) and clients.get("holdout") is not None
        return "validation" if held_out or any("validation_loss" in row for row in self.rows) else "test"

    @property
    def seed(self) -> int:
        """The run's seed."""
        seed = self.spec.get("seed", 0)
        return seed if isinstance(seed, int) else 0


@dataclass
class Gathered:
    """The runs that can be reported, and one reason for each folder that cannot."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def gather(folders: Iterable[Path], *, unfinished: bool = False) -> Gathered:
    """Read all runs in and below the folders; runs that did not finish only when asked for."""
    found = find_runs(folders)
    gathered = Gathered(skipped=list(found.skipped))
    comparisons: dict[Path, dict[str, Any]] = {}
    cut_short: dict[Path, list[Path]] = {}
    for folder in found.runs:
        try:
            run = _read_run(folder, comparisons)
        except UnreadableError as error:
            gathered.skipped.append(Skipped(folder=shown_text(folder), reason=error.reason))
            continue
        sweep = _sweep_of(folder)
        if run.state == "unfinished" and not unfinished and sweep is not None:
            cut_short.setdefault(sweep, []).append(folder)
        elif run.state == "unfinished" and not unfinished:
            rounds = f"{_last_round(run.rows):,} of {shown_text(run.spec.get('rounds', '?'))} rounds"
            why = f": {run.failure}" if run.failure else ""
            reason = f"not finished ({rounds} are written){why}; continue it with --resume, or add --unfinished"
            gathered.skipped.append(Skipped(folder=shown_text(folder), reason=reason))
        else:
            gathered.runs.append(run)
    gathered.runs, repeated = _without_repeats(gathered.runs)
    gathered.skipped += [*repeated, *(_cut_short(sweep, trials) for sweep, trials in cut_short.items())]
    return gathered


def _sweep_of(folder: Path) -> Path | None:
    """Return the sweep that a run is a trial of: trials lie in trials/STAGE/TRIAL below its folder."""
    place = Path(os.path.abspath(folder))
    if len(place.parts) < 4 or place.parent.parent.name != TRIALS or not is_there(place.parents[2] / SWEEP):
        return None
    return place.parents[2]


def _cut_short(sweep: Path, trials: Sequence[Path]) -> Skipped:
    """Say in one line what is left out of a sweep: there may be hundreds."""
    count = f"{len(trials)} trial{'s' * (len(trials) > 1)}"
    if is_there(sweep / SUMMARY):
        reason = f"{count} that the sweep ended early; --unfinished shows them"
    else:
        reason = f"{count} not finished: ended early, or the sweep is not done; --unfinished shows them"
    return Skipped(folder=shown_text(os.path.normpath(trials[0] / ".." / "..")), reason=reason)


def _without_repeats(runs: list[Run]) -> tuple[list[Run], list[Skipped]]:
    """Return the runs with other settings or seeds, the finished ones first choice, and the copies of them."""
    order = {"complete": 0, "diverged": 1, "unfinished": 2}
    kept: dict[str, Run] = {}
    repeated = []
    for run in sorted(runs, key=lambda run: order[run.state]):
        key = canonical([run.entry or run.spec["algorithm"]["name"], run.spec])
        if key in kept:
            reason = f"the same settings and seed as {shown_text(kept[key].folder)}"
            repeated.append(Skipped(folder=shown_text(run.folder), reason=reason))
        else:
            kept[key] = run
    chosen = {id(run) for run in kept.values()}
    return [run for run in runs if id(run) in chosen], repeated


def canonical(value: Any) -> str:
    """Return settings as text that is the same for the same settings."""
    return json.dumps(value, sort_keys=True, default=str)


def _last_round(rows: Sequence[Row]) -> int:
    return int(rows[-1]["round"]) if rows else 0


def _read_run(folder: Path, comparisons: dict[Path, dict[str, Any]]) -> Run:
    spec = read_table(folder / SPEC)
    _check_spec(folder, spec)
    failure = read_failure(folder)
    entry, place, comparison = _place_in_comparison(folder, comparisons)
    if failure is None and comparison is not None:
        failure = _failure_in(comparisons[comparison], folder)
    complete = is_there(folder / SUMMARY)
    diverged = failure is not None and failure.diverged
    metrics = folder / METRICS
    if not complete and not diverged and not is_there(metrics):
        raise UnreadableError(metrics, "{file} is missing", f"it has no {METRICS}: the run has not begun")
    rows = [_finite(row) for row in read_metrics(folder)] if complete or is_there(metrics) else []
    if not rows and not diverged:
        raise UnreadableError(metrics, "{file} has no whole row")
    summary = read_table(folder / SUMMARY) if complete else {}
    state: State = "complete" if complete else "diverged" if diverged else "unfinished"
    return Run(
        folder=folder,
        entry=entry,
        comparison=comparison,
        spec=spec,
        rows=rows,
        summary=summary,
        state=state,
        failure=failure.reason if failure is not None and not complete else None,
        held=_read_class_counts(folder / CLASS_COUNTS),
        place=place,
    )


def _check_spec(folder: Path, spec: Mapping[str, Any]) -> None:
    algorithm = spec.get("algorithm")
    if not isinstance(algorithm, Mapping) or not isinstance(algorithm.get("name"), str):
        raise UnreadableError(folder / SPEC, "{file} names no algorithm")
    if not isinstance(spec.get("task", {}), Mapping):
        raise UnreadableError(folder / SPEC, "the task in {file} is not a table")
    if not isinstance(spec.get("seed", 0), int) or isinstance(spec.get("seed"), bool):
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
    place = Path(os.path.abspath(folder))
    if len(place.parts) < 3:
        return None, 0, None
    above = place.parent.parent
    if above not in comparisons:
        comparisons[above] = read_optional(above / COMPARISON)
        if comparisons[above]:
            comparisons[above]["summary"] = read_optional(above / SUMMARY)
    names = comparisons[above].get("algorithms")
    if not isinstance(names, list):
        return None, 0, None
    for number, name in enumerate(names):
        if isinstance(name, str) and safe_name(name) == place.parent.name:
            return shown_text(name), number, above
    return None, 0, None


def _failure_in(comparison: Mapping[str, Any], folder: Path) -> Failure | None:
    """Return what a comparison's summary says of a run that diverged."""
    place = Path(os.path.abspath(folder))
    wanted = f"{place.parent.name}/{place.name}"
    table = comparison["summary"].get("algorithms")
    for entry in table if isinstance(table, list) else []:
        runs = entry.get("runs") if isinstance(entry, dict) else None
        for run in runs if isinstance(runs, list) else []:
            if isinstance(run, dict) and run.get("folder") == wanted:
                reason = run.get("failure")
                return Failure(reason=shown_text(reason), diverged=True) if isinstance(reason, str) else None
    return None


def _read_class_counts(path: Path) -> HeldClassCounts | None:
    table = read_optional(path)
    counts, names, clients = table.get("counts"), table.get("names"), table.get("clients")
    if not isinstance(counts, list) or not isinstance(names, list) or not names or not counts:
        return None
    if len(counts) * len(names) > _MOST_CELLS or not isinstance(clients, int) or not _is_count(clients):
        return None
    for row in counts:
        if not isinstance(row, list) or len(row) != len(names) or any(not _is_count(cell) for cell in row):
            return None
    return HeldClassCounts(counts=counts, names=[shown_text(name)[:40] for name in names], clients=clients)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53
