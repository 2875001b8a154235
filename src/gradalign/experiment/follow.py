"""Reading run folders while someone else writes to them: only new bytes, no torch, and nothing is ever written."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError
from gradalign.experiment.layout import COMPARISON, FAILURE, LOCK, METRICS, SPEC, SUMMARY

COLUMNS = ("round", "seconds", "test_accuracy", "test_loss", "r", "drift", "train_loss")
"""What is kept of a row."""
DEEPEST = 3
"""How far below a folder its runs may lie: a comparison's are at 2, those of several comparisons at 3."""


class MetricsTail:
    """The rows of a metrics file that grows, is cut back when its run is resumed, or is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget(None)

    def _forget(self, which: tuple[int, int] | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.bad_line: int | None = None
        self._offset = self._lines = 0
        self._file = which

    def poll(self) -> None:
        """Read what is new."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                which = (status.st_dev, status.st_ino)
                # A resumed run puts a shorter file in the place of the old one.
                if which != self._file or status.st_size < self._offset:
                    self._forget(which)
                file.seek(self._offset)
                if not self._take(file.read()):
                    self._forget(which)
                    file.seek(0)
                    self._take(file.read())
        except FileNotFoundError:
            self._forget(None)
        except OSError as error:
            raise GradalignError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _take(self, new: bytes) -> bool:
        """Add the whole lines; what comes after the last line's end is torn and waits for the rest.

        Returns False when the rounds begin again: another file has come in the place of the one read so far, and the
        system has given it the same number.
        """
        fresh = self._offset == 0
        end = new.rfind(b"\n") + 1
        for line in new[:end].splitlines():
            self._lines += 1
            row = _row_of(line)
            if row is not None and self.rows and row["round"] <= self.rows[-1]["round"]:
                if not fresh:
                    return False
                row = None
            if row is None:
                self.bad_line = self.bad_line or self._lines
            else:
                self.rows.append({name: row.get(name) for name in COLUMNS})
        self._offset += end
        return True


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("round")) is int else None


def is_held(folder: Path) -> bool:
    """Return whether a process is writing to this folder.

    A shared lock is tried for and dropped at once; a writer that starts in this very moment tries again.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: nobody locks, so nobody is known to be gone
        return True
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@dataclass
class Followed:
    """One run, as far as its folder tells.

    Attributes:
        folder: The run folder.
        entry: What its curve is called: the algorithm's name in a comparison.
        state: starting, running, complete, failed (``reason`` says why), stopped, planned or unreadable.
    """

    folder: Path
    entry: str
    seed: int | None = None
    state: str = "planned"
    reason: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tail = MetricsTail(self.folder / METRICS)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that are there."""
        return self.tail.rows

    @property
    def rounds(self) -> int:
        """How many rounds the run will have; 0 when that is not known yet."""
        return int(self.spec.get("rounds", 0))

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def label(self) -> str:
        """What to call the run."""
        return self.entry if self.seed is None else f"{self.entry}, seed {self.seed}"

    def poll(self) -> None:
        """Look at the folder again. The lock is looked at first: who has let go of it has written everything."""
        complete = (self.folder / SUMMARY).exists()
        if complete and self.state == "complete":
            return
        held = is_held(self.folder)
        complete = (self.folder / SUMMARY).exists()
        if not self.rows:
            self._read_spec()
        if self.state == "unreadable":
            return
        self.tail.poll()
        failure = self.folder / FAILURE
        self.reason = ""
        if self.tail.bad_line is not None:
            self.reason = f"line {self.tail.bad_line} of {METRICS} is not a row of metrics"
        if complete:
            self.state = "complete"
        elif held:
            self.state = "running" if self.rows else "starting"
        elif failure.exists():
            self.state = "failed"
            self.reason = failure.read_text(encoding="utf-8", errors="replace").strip()
        else:
            self.state = "stopped" if self.spec else "planned"

    def _read_spec(self) -> None:
        try:
            spec = tomllib.loads((self.folder / SPEC).read_text(encoding="utf-8"))
            if not isinstance(spec.get("rounds"), int):
                raise ValueError("it does not say how many rounds")
            self.spec = spec
            if isinstance(spec.get("seed"), int):
                self.seed = spec["seed"]
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self.state, self.reason = "unreadable", f"{SPEC} is not a run's: {error}"

    def resume_command(self) -> str:
        """Return what to type, or to call, to go on with this run."""
        if "name" not in self.spec:  # made from Python objects: the folder cannot make them again
            return f'call gradalign.run again with out="{self.folder}", resume=True'
        return shlex.join(["gradalign", "run", str(self.folder / SPEC), "--out", str(self.folder), "--resume"])


class Watched:
    """A folder that is watched: one run, a comparison's runs, or all runs that lie below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Followed] = []
        self.held = False
        self.kind = "nothing"

    def poll(self) -> None:
        """Look for new runs, then at each run; raise when the folder holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise GradalignError(f"{self.folder} is a file; watch takes a run's folder, or a comparison's")
        self.held = is_held(self.folder)
        self._find()
        for run in self.runs:
            run.poll()
        if self.kind == "run" and self.runs[0].state == "unreadable":
            raise GradalignError(f"{self.folder} is not a run folder: {self.runs[0].reason}")

    def _find(self) -> None:
        known = {run.folder for run in self.runs}
        if (self.folder / SPEC).exists():
            self.kind = "run"
            self.runs = self.runs or [Followed(self.folder, entry=_algorithm(self.folder))]
            return
        if (self.folder / COMPARISON).exists():
            self.kind = "comparison"
            self.runs += [run for run in _planned(self.folder) if run.folder not in known]
            return
        found = sorted(_specs_below(self.folder, DEEPEST)) if self.folder.is_dir() else []
        for path in found:
            if path.parent not in known:
                name = str(path.parent.relative_to(self.folder))
                self.runs.append(Followed(path.parent, entry=re.sub(r"[/-]seed\d+$", "", name)))
        self.kind = "folder" if self.runs else "nothing"
        if not self.runs and self.folder.is_dir() and not self.held:
            strangers = sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith("."))
            if strangers:
                raise GradalignError(
                    f"{self.folder} holds no run: neither {SPEC} nor {COMPARISON} is in it or below it "
                    f"(it has {strangers[0]})"
                )

    @property
    def at_work(self) -> bool:
        """Whether anyone writes to the folder, or to a run in it."""
        return self.held or any(run.state in ("starting", "running") for run in self.runs)

    @property
    def complete(self) -> bool:
        """Whether every run has come to its end."""
        return bool(self.runs) and all(run.state == "complete" for run in self.runs)

    def advice(self) -> str:
        """Return how to go on with what has stopped; empty when nothing has."""
        stopped = [run for run in self.runs if run.state == "stopped"]
        if self.at_work or not (stopped or any(run.state == "planned" for run in self.runs)):
            return ""
        if self.kind == "comparison":
            return (
                f"continue with: gradalign compare RECIPE --out {self.folder} --resume (and the other options it had)"
            )
        return f"continue with: {stopped[0].resume_command()}" if stopped else ""


def _algorithm(folder: Path) -> str:
    try:
        spec = tomllib.loads((folder / SPEC).read_text(encoding="utf-8"))
        return str(spec["algorithm"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def _planned(folder: Path) -> list[Followed]:
    """Return all runs of a comparison, begun or not."""
    try:
        plan = tomllib.loads((folder / COMPARISON).read_text(encoding="utf-8"))
        entries, seeds = [str(entry) for entry in plan["algorithms"]], [int(seed) for seed in plan["seeds"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GradalignError(f"{folder / COMPARISON} is not a comparison's description: {error}") from None
    return [
        Followed(folder / folder_name(entry) / f"seed{seed}", entry=entry, seed=seed)
        for entry in entries
        for seed in seeds
    ]


def folder_name(entry: str) -> str:
    """Return the folder of one entry of a comparison."""
    return re.sub(r"[^\w.+-]+", "-", entry)


def _specs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError:  # gone, or not ours to read
        return
    if any(entry.name == SPEC for entry in entries):
        yield folder / SPEC
    elif depth > 0:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _specs_below(Path(entry.path), depth - 1)
