"""Runs seen from elsewhere while they run: which lie in a folder, their states, and how to go on with what has stopped.

Only new bytes are read, without torch, and nothing is ever written.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError, shown_text
from gradalign.recipes import found
from gradalign.recipes.trust import outside_names
from gradalign.runs import COMPARISON, METRICS, SPEC, SUMMARY, SWEEP, SWEEP_WORKERS, TRIALS, safe_name
from gradalign.runs.locks import is_held
from gradalign.runs.metrics import MetricsTail
from gradalign.runs.untrusted import UnreadableError, is_file, is_there, read_failure, read_optional, read_table

_MOST_RUNS = 10_000
_DEEPEST = 4  # where runs lie below a folder: a comparison's at 2, a sweep's at 3, those of several sweeps at 4


@dataclass
class Followed:
    """One run, as far as its folder tells.

    Attributes:
        entry: What its curve is called: the algorithm's name in a comparison.
        group: Runs of one group share a colour: the seeds of an algorithm, the trials of a sweep's stage.
        state: starting, running, complete, failed (``reason`` says why), stopped, planned or unreadable.
    """

    folder: Path
    entry: str
    group: str = ""
    seed: int | None = None
    state: str = "planned"
    reason: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tail = MetricsTail(self.folder / METRICS)
        self.group = self.group or self.entry
        self._seen: tuple[object, ...] = ()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.tail.rows

    @property
    def rounds(self) -> int:
        """How many rounds the run will have; 0 when that is not known yet."""
        return int(self.spec.get("rounds", 0))

    @property
    def round(self) -> int:
        return int(self.rows[-1]["round"]) if self.rows else 0

    @property
    def label(self) -> str:
        """What to call the run; a trial's name tells its seed, too."""
        is_trial = self.group != self.entry
        return shown_text(self.entry if self.seed is None or is_trial else f"{self.entry}, seed {self.seed}")

    def poll(self) -> None:
        """Look at the folder again. The lock is looked at first: a writer that let go of it has written everything."""
        seen = tuple(_stamp(self.folder / name) for name in (SPEC, SUMMARY))
        if self.state == "complete" and seen == self._seen:
            return
        at_work = is_held(self.folder)
        complete = is_file(self.folder / SUMMARY)
        if not self.rows or seen != self._seen:  # it may have been given more rounds
            self._read_spec()
        self._seen = seen
        if self.state == "unreadable":
            return
        try:
            self.tail.poll()
        except UnreadableError as error:
            self.state, self.reason = "unreadable", error.reason
            return
        failure = read_failure(self.folder)
        bad = self.tail.bad_line
        self.reason = "" if bad is None else f"line {bad} of {METRICS} is not a row of metrics"
        if complete:
            self.state = "complete"
        elif at_work:
            self.state = "running" if self.rows else "starting"
        elif failure is not None:
            self.state, self.reason = "failed", failure.reason
        else:
            self.state = "stopped" if self.spec else "planned"

    def _read_spec(self) -> None:
        try:
            spec = read_table(self.folder / SPEC)
            if type(spec.get("rounds")) is not int:
                raise UnreadableError(self.folder / SPEC, "{file} does not say how many rounds")
            self.spec = spec
            if type(spec.get("seed")) is int:
                self.seed = spec["seed"]
        except UnreadableError as error:
            if is_there(self.folder / SPEC):  # else it has not begun
                self.state, self.reason = "unreadable", error.reason

    def resume_command(self) -> str:
        """Return what to type, or to call, to go on with this run."""
        if "name" not in self.spec:  # made from Python objects: the folder cannot make them again
            return f'call gradalign.run again with out="{self.folder}", resume=True'
        options = ["--out", str(self.folder), "--resume"]
        if outside_names(self.spec):  # anybody's code: only whoever knows the recipe should run it
            return f"gradalign run RECIPE {shlex.join(options)} (RECIPE and options as before)"
        return shlex.join(["gradalign", "run", str(self.folder / SPEC), *options])


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what is another number when a file has been put in the place of one."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class Watched:
    """A run, a comparison, a sweep or any folder with runs below it, as ``kind`` says; "nothing" until it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Followed] = []
        self.has_writer = False
        self.kind = "nothing"

    def poll(self) -> None:
        """Look for new runs, then at each run; raise when the folder holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise GradalignError(f"{self.folder} is a file; watch takes a run's folder, or a comparison's")
        workers = self.folder / SWEEP_WORKERS
        self.has_writer = is_held(self.folder) or (workers.is_dir() and any(map(is_held, workers.iterdir())))
        self._find()
        for run in self.runs:
            run.poll()
        if self.kind == "run" and self.runs[0].state == "unreadable":
            raise GradalignError(f"{self.folder} is not a run folder: {self.runs[0].reason}")

    def _find(self) -> None:
        known = {run.folder for run in self.runs}
        if is_there(self.folder / SPEC):
            self.kind = "run"
            if not self.runs:
                algorithm = found(read_optional(self.folder / SPEC), "algorithm", "name")
                self.runs = [Followed(self.folder, entry=str(algorithm or self.folder.name))]
        elif is_there(self.folder / COMPARISON):
            self.kind = "comparison"
            self.runs += [run for run in _planned(self.folder) if run.folder not in known]
        else:
            is_folder = self.folder.is_dir()
            below = sorted(_runs_below(self.folder, _DEEPEST)) if is_folder else []
            self.runs += [self._found(path) for path in below if path not in known]
            self.kind = "sweep" if is_there(self.folder / SWEEP) else "folder" if self.runs else "nothing"
            there = os.listdir(self.folder) if self.kind == "nothing" and not self.has_writer and is_folder else []
            strangers = sorted(name for name in there if not name.startswith("."))
            if strangers:
                raise GradalignError(
                    f"{self.folder} holds no run: no {SPEC}, {COMPARISON} or {SWEEP} is in it or below it "
                    f"(it has {strangers[0]})"
                )

    def _found(self, folder: Path) -> Followed:
        name = folder.relative_to(self.folder)
        if name.parts[0] == TRIALS and len(name.parts) > 2:
            return Followed(folder, entry="/".join(name.parts[1:]), group=name.parts[1])
        return Followed(folder, entry=re.sub(r"[/_-]seed\d+$", "", str(name)))

    @property
    def at_work(self) -> bool:
        """Whether anyone writes to the folder, or to a run in it."""
        return self.has_writer or any(run.state in ("starting", "running") for run in self.runs)

    @property
    def ended(self) -> bool:
        """Whether nothing can follow: nobody is at work, and nothing is left that could be resumed."""
        if self.at_work or not self.runs:
            return False
        if self.kind == "sweep":  # which ends trials early, and tells by its summary that it is done
            return is_file(self.folder / SUMMARY)
        return all(run.state in ("complete", "failed", "unreadable") for run in self.runs)

    @property
    def failed(self) -> list[Followed]:
        """The runs that failed, where that was not to be expected: a sweep tries values that diverge."""
        return [] if self.kind == "sweep" else [run for run in self.runs if run.state == "failed"]

    def advice(self) -> str:
        """Return how to go on with what has stopped; empty when nothing has."""
        if self.at_work or self.ended:
            return ""
        if self.kind in ("comparison", "sweep"):
            command = "compare" if self.kind == "comparison" else "sweep"
            options = shlex.join(["--out", str(self.folder), "--resume"])
            return f"continue with: gradalign {command} RECIPE {options} (RECIPE and options as before)"
        stopped = [run for run in self.runs if run.state == "stopped"]
        return f"continue with: {stopped[0].resume_command()}" if stopped else ""


def _planned(folder: Path) -> list[Followed]:
    """Return all runs of a comparison, begun or not."""
    try:
        plan = read_table(folder / COMPARISON)
    except UnreadableError as error:
        raise GradalignError(f"{folder} is not a comparison: {error.reason}") from None
    for key, kind in (("algorithms", str), ("seeds", int)):
        if not isinstance(plan.get(key), list) or not all(type(one) is kind for one in plan[key]):
            raise GradalignError(f"{folder / COMPARISON} is not a comparison's description: it lists no {key}")
    entries, seeds = plan["algorithms"], plan["seeds"]
    if len(entries) * len(seeds) > _MOST_RUNS:
        raise GradalignError(f"{folder / COMPARISON} describes {len(entries) * len(seeds):,} runs, too many to watch")
    runs = product(entries, seeds)
    return [Followed(folder / safe_name(entry) / f"seed{seed}", entry=entry, seed=seed) for entry, seed in runs]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError:  # gone, or not ours to read
        return
    if any(entry.name == SPEC for entry in entries):
        yield folder
    elif depth > 0:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _runs_below(Path(entry.path), depth - 1)
