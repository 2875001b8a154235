"""The folder that is watched: which runs lie in it, whether anyone is at work there, and when all is over."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from gradalign.errors import GradalignError
from gradalign.runs import COMPARISON, SPEC, SUMMARY, SWEEP, SWEEP_WORKERS, TRIALS, safe_name
from gradalign.runs.untrusted import UnreadableError, is_file, is_there, read_optional, read_table
from gradalign.watch.followed import Followed, is_held

_MOST_RUNS = 10_000
DEEPEST = 4
"""How far below a folder its runs may lie: a comparison's are at 2, a sweep's at 3, those of several sweeps at 4."""


class Watched:
    """A run, a comparison, a sweep or any folder with runs below it, as ``kind`` says; "nothing" until it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Followed] = []
        self.held = False
        self.kind = "nothing"

    def poll(self) -> None:
        """Look for new runs, then at each run; raise when the folder holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise GradalignError(f"{self.folder} is a file; watch takes a run's folder, or a comparison's")
        self.held = is_held(self.folder) or self._has_workers()
        self._find()
        for run in self.runs:
            run.poll()
        if self.kind == "run" and self.runs[0].state == "unreadable":
            raise GradalignError(f"{self.folder} is not a run folder: {self.runs[0].reason}")

    def _has_workers(self) -> bool:
        workers = self.folder / SWEEP_WORKERS
        return workers.is_dir() and any(is_held(worker) for worker in workers.iterdir())

    def _find(self) -> None:
        known = {run.folder for run in self.runs}
        if is_there(self.folder / SPEC):
            self.kind = "run"
            self.runs = self.runs or [Followed(self.folder, entry=_algorithm(self.folder))]
        elif is_there(self.folder / COMPARISON):
            self.kind = "comparison"
            self.runs += [run for run in _planned(self.folder) if run.folder not in known]
        else:
            found = sorted(_specs_below(self.folder, DEEPEST)) if self.folder.is_dir() else []
            self.runs += [self._found(path.parent) for path in found if path.parent not in known]
            is_sweep = is_there(self.folder / SWEEP)
            self.kind = "sweep" if is_sweep else "folder" if self.runs else "nothing"
            if self.kind == "nothing" and self.folder.is_dir() and not self.held:
                self._refuse_strangers()

    def _found(self, folder: Path) -> Followed:
        name = folder.relative_to(self.folder)
        if name.parts[0] == TRIALS and len(name.parts) > 2:
            return Followed(folder, entry="/".join(name.parts[1:]), group=name.parts[1])
        return Followed(folder, entry=re.sub(r"[/_-]seed\d+$", "", str(name)))

    def _refuse_strangers(self) -> None:
        strangers = sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith("."))
        if strangers:
            raise GradalignError(
                f"{self.folder} holds no run: no {SPEC}, {COMPARISON} or {SWEEP} is in it or below it "
                f"(it has {strangers[0]})"
            )

    @property
    def at_work(self) -> bool:
        """Whether anyone writes to the folder, or to a run in it."""
        return self.held or any(run.state in ("starting", "running") for run in self.runs)

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


def _algorithm(folder: Path) -> str:
    algorithm = read_optional(folder / SPEC).get("algorithm")
    return str(algorithm["name"]) if isinstance(algorithm, dict) and "name" in algorithm else folder.name


def _planned(folder: Path) -> list[Followed]:
    """Return all runs of a comparison, begun or not."""
    try:
        plan = read_table(folder / COMPARISON)
    except UnreadableError as error:
        raise GradalignError(f"{folder} is not a comparison: {error.reason}") from None
    entries, seeds = plan.get("algorithms"), plan.get("seeds")
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise GradalignError(f"{folder / COMPARISON} is not a comparison's description: it lists no algorithms")
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise GradalignError(f"{folder / COMPARISON} is not a comparison's description: it lists no seeds")
    if len(entries) * len(seeds) > _MOST_RUNS:
        raise GradalignError(f"{folder / COMPARISON} describes {len(entries) * len(seeds):,} runs, too many to watch")
    return [
        Followed(folder / safe_name(entry) / f"seed{seed}", entry=entry, seed=seed)
        for entry in entries
        for seed in seeds
    ]


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
