"""Reading run folders that anybody may have written: what is whole is returned, what is not is named.

Nothing here trusts a file: sizes are bounded, only regular files are opened, numbers are finite or left out.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gradalign.experiment.files import COMPARISON, FAILURE, HOLDINGS, METRICS, SPEC, SUMMARY, entry_folder
from gradalign.report.folders import Skipped, find_runs, shown_text

State = Literal["complete", "diverged", "unfinished"]
Row = dict[str, float]
_LARGEST_METRICS, _LARGEST_OTHER = 512 * 2**20, 16 * 2**20
_MOST_CELLS = 200_000


class UnreadableError(Exception):
    """A file is not what a run folder has there."""


@dataclass(frozen=True, kw_only=True)
class Held:
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
        failure: Why it diverged.
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
    held: Held | None = None
    place: int = 0

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
    for folder in found.runs:
        try:
            run = _read_run(folder, comparisons)
        except UnreadableError as error:
            gathered.skipped.append(Skipped(folder=shown_text(folder), reason=shown_text(error)))
            continue
        if run.state == "unfinished" and not unfinished:
            rounds = f"{_last_round(run.rows):,} of {shown_text(run.spec.get('rounds', '?'))} rounds"
            reason = f"not finished ({rounds} are written); continue it with --resume, or add --unfinished"
            gathered.skipped.append(Skipped(folder=shown_text(folder), reason=reason))
        else:
            gathered.runs.append(run)
    gathered.runs, repeated = _without_repeats(gathered.runs)
    gathered.skipped += repeated
    return gathered


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
    spec = _read_table(folder / SPEC, toml=True)
    _check_spec(spec)
    failure = _text_of(_read_optional(folder / FAILURE).get("failure"))
    entry, place, comparison = _place_in_comparison(folder, comparisons)
    if failure is None and comparison is not None:
        failure = _failure_in(comparisons[comparison], folder)
    complete = (folder / SUMMARY).exists()
    if not complete and failure is None and not (folder / METRICS).exists():
        raise UnreadableError(f"it has no {METRICS}: the run has not begun")
    rows = _read_rows(folder / METRICS) if complete or (folder / METRICS).exists() else []
    if not rows and failure is None:
        raise UnreadableError(f"its {METRICS} has no whole row")
    summary = _read_table(folder / SUMMARY) if complete else {}
    state: State = "complete" if complete else "diverged" if failure is not None else "unfinished"
    return Run(
        folder=folder,
        entry=entry,
        comparison=comparison,
        spec=spec,
        rows=rows,
        summary=summary,
        state=state,
        failure=failure if state == "diverged" else None,
        held=_read_holdings(folder / HOLDINGS),
        place=place,
    )


def _check_spec(spec: Mapping[str, Any]) -> None:
    algorithm = spec.get("algorithm")
    if not isinstance(algorithm, Mapping) or not isinstance(algorithm.get("name"), str):
        raise UnreadableError(f"its {SPEC} names no algorithm")
    if not isinstance(spec.get("task", {}), Mapping):
        raise UnreadableError(f"the task in its {SPEC} is not a table")
    if not isinstance(spec.get("seed", 0), int) or isinstance(spec.get("seed"), bool):
        raise UnreadableError(f"the seed in its {SPEC} is not a whole number")


def _read_bytes(path: Path, largest: int) -> bytes:
    """Read a regular file of bounded size; a pipe or a device would wait for ever."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"its {path.name} is not a file")
        if found.st_size > largest:
            raise UnreadableError(f"its {path.name} has {found.st_size:,} bytes, more than {largest:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UnreadableError(f"it has no {path.name}") from None
    except OSError as error:
        raise UnreadableError(f"its {path.name} cannot be read: {error.strerror or error}") from None


def _read_table(path: Path, *, toml: bool = False) -> dict[str, Any]:
    raw = _read_bytes(path, _LARGEST_OTHER)
    try:
        text = raw.decode("utf-8")
        table = tomllib.loads(text) if toml else json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError(f"its {path.name} is not valid {'TOML' if toml else 'JSON'}") from None
    if not isinstance(table, dict):
        raise UnreadableError(f"its {path.name} is not a table")
    return table


def _read_optional(path: Path) -> dict[str, Any]:
    """Read a table that a run can do without."""
    try:
        return _read_table(path, toml=path.suffix == ".toml")
    except UnreadableError:
        return {}


def _text_of(value: Any) -> str | None:
    return shown_text(value) if isinstance(value, str) else None


def number_of(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_rows(path: Path) -> list[Row]:
    """Read the rows of the metrics; a last line cut short is left out, any other that is no row spoils the file."""
    lines = _read_bytes(path, _LARGEST_METRICS).split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise UnreadableError(f"line {number} of its {path.name} is not a row of metrics") from None
        row = _finite(given)
        if "round" not in row or (rows and row["round"] <= rows[-1]["round"]):
            raise UnreadableError(f"line {number} of its {path.name} is not a row of metrics")
        rows.append(row)
    return rows


def _finite(given: Any) -> Row:
    if not isinstance(given, dict):
        return {}
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
        comparisons[above] = _read_optional(above / COMPARISON)
        if comparisons[above]:
            comparisons[above]["summary"] = _read_optional(above / SUMMARY)
    names = comparisons[above].get("algorithms")
    if not isinstance(names, list):
        return None, 0, None
    for number, name in enumerate(names):
        if isinstance(name, str) and entry_folder(name) == place.parent.name:
            return shown_text(name), number, above
    return None, 0, None


def _failure_in(comparison: Mapping[str, Any], folder: Path) -> str | None:
    """Return what a comparison's summary says of a run that diverged."""
    place = Path(os.path.abspath(folder))
    wanted = f"{place.parent.name}/{place.name}"
    table = comparison["summary"].get("algorithms")
    for entry in table if isinstance(table, list) else []:
        runs = entry.get("runs") if isinstance(entry, dict) else None
        for run in runs if isinstance(runs, list) else []:
            if isinstance(run, dict) and run.get("folder") == wanted:
                return _text_of(run.get("failure"))
    return None


def _read_holdings(path: Path) -> Held | None:
    table = _read_optional(path)
    counts, names, clients = table.get("counts"), table.get("names"), table.get("clients")
    if not isinstance(counts, list) or not isinstance(names, list) or not names or not counts:
        return None
    if len(counts) * len(names) > _MOST_CELLS or not isinstance(clients, int):
        return None
    for row in counts:
        if not isinstance(row, list) or len(row) != len(names) or any(number_of(cell) is None for cell in row):
            return None
    return Held(counts=counts, names=[shown_text(name)[:40] for name in names], clients=clients)
