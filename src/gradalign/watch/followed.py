"""Reading run folders while someone else writes to them: only new bytes, no torch, and nothing is ever written."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradalign.recipes.trust import is_outside, task_name
from gradalign.runs import CAREFULLY, LOCK, METRICS, SPEC, SUMMARY
from gradalign.runs.untrusted import (
    LARGEST_METRICS,
    UnreadableError,
    is_file,
    is_there,
    number_of,
    open_file,
    read_failure,
    read_table,
    row_of,
    shown_text,
)

COLUMNS = (
    "round",
    "seconds",
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "r",
    "drift",
    "train_loss",
)
"""What is kept of a row."""


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
        """Read what is new; raise when what lies there is no file of rows."""
        if not is_there(self.path):
            self._forget(None)
            return
        try:
            with open_file(self.path, LARGEST_METRICS) as file:
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
        except OSError as error:
            raise UnreadableError(self.path, f"{{file}} cannot be read: {error.strerror or error}") from None

    def _take(self, new: bytes) -> bool:
        """Add the whole lines; what comes after the last line's end is torn and waits for the rest.

        Returns False when the rounds begin again: another file has come in the place of the one read so far, and the
        system has given it the same number.
        """
        fresh = self._offset == 0
        end = new.rfind(b"\n") + 1
        for line in new[:end].splitlines():
            self._lines += 1
            row = row_of(line)
            if row is not None and self.rows and row["round"] <= self.rows[-1]["round"]:
                if not fresh:
                    return False
                row = None
            if row is None:
                self.bad_line = self.bad_line or self._lines
            else:
                numbers = {name: number_of(row.get(name)) for name in COLUMNS}
                self.rows.append(numbers | {"round": row["round"]})
        self._offset += end
        return True


def is_held(folder: Path) -> bool:
    """Return whether a process is writing to this folder.

    A shared lock is tried for and dropped at once; a writer that starts in this very moment tries again.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: nobody locks, so nobody is known to be gone
        return True
    try:
        if not is_file(folder / LOCK):  # nobody of us holds a link or a pipe
            return False
        lock = os.open(folder / LOCK, os.O_RDONLY | CAREFULLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


@dataclass
class Followed:
    """One run, as far as its folder tells.

    Attributes:
        folder: The run folder.
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
        is_trial = self.group != self.entry  # whose name tells all
        return shown_text(self.entry if self.seed is None or is_trial else f"{self.entry}, seed {self.seed}")

    def poll(self) -> None:
        """Look at the folder again. The lock is looked at first: who has let go of it has written everything."""
        complete = is_file(self.folder / SUMMARY)
        if complete and self.state == "complete":
            return
        held = is_held(self.folder)
        complete = is_file(self.folder / SUMMARY)
        if not self.rows:
            self._read_spec()
        if self.state == "unreadable":
            return
        try:
            self.tail.poll()
        except UnreadableError as error:
            self.state, self.reason = "unreadable", error.reason
            return
        failure = read_failure(self.folder)
        self.reason = ""
        if self.tail.bad_line is not None:
            self.reason = f"line {self.tail.bad_line} of {METRICS} is not a row of metrics"
        if complete:
            self.state = "complete"
        elif held:
            self.state = "running" if self.rows else "starting"
        elif failure is not None:
            self.state = "failed"
            self.reason = failure.reason
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
        if is_outside(task_name(self.spec)):  # anybody's code: only whoever knows the recipe should run it
            return f"gradalign run RECIPE {shlex.join(options)} (RECIPE and options as before)"
        return shlex.join(["gradalign", "run", str(self.folder / SPEC), *options])
