"""Which folders below the given ones may be runs: names and kinds of files only, nothing is read.

Links are followed, but no folder is entered twice, so links that lead in a circle end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gradalign.runs import CHECKPOINT, METRICS, SPEC
from gradalign.runs.untrusted import shown_text

_RUN_MARKS = {SPEC, METRICS, CHECKPOINT}
_DEEPEST = 40
_MOST_FOLDERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A folder that is not in the report, and why."""

    folder: str
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.folder}: {self.reason}"


@dataclass
class Found:
    """The folders that look like runs, and those that lead to none."""

    runs: list[Path] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def find_runs(folders: Iterable[Path]) -> Found:
    """Look for run folders in and below the given ones, in the order of their names."""
    found, seen = Found(), set[tuple[int, int]]()
    for folder in folders:
        problem = _not_a_folder(folder)
        if problem:
            found.skipped.append(Skipped(folder=shown_text(folder), reason=problem))
        elif not _look(folder, found, seen, 0):
            found.skipped.append(Skipped(folder=shown_text(folder), reason="there is no run in it"))
    return found


def _not_a_folder(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "there is no such folder"
    except (OSError, ValueError) as error:
        return shown_text(getattr(error, "strerror", None) or error)
    return None if stat.S_ISDIR(mode) else "it is a file, not a folder"


def _look(folder: Path, found: Found, seen: set[tuple[int, int]], depth: int) -> bool:
    """Collect the runs of one folder; return whether there was anything to say of it."""
    if len(seen) == _MOST_FOLDERS:  # a link may lead to a whole disk
        seen.add((-1, -1))
        reason = f"{_MOST_FOLDERS:,} folders were looked at already; name those that hold runs"
        found.skipped.append(Skipped(folder=shown_text(folder), reason=reason))
    if len(seen) > _MOST_FOLDERS:
        return True
    try:
        here = folder.stat()
        if (here.st_dev, here.st_ino) in seen:
            return True
        seen.add((here.st_dev, here.st_ino))
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        found.skipped.append(Skipped(folder=shown_text(folder), reason=shown_text(error.strerror or error)))
        return True
    if _RUN_MARKS & {entry.name for entry in entries}:
        found.runs.append(folder)
        return True
    inside = [folder / entry.name for entry in entries if not entry.name.startswith(".") and _leads_on(entry)]
    if depth >= _DEEPEST:
        return False
    # Of a folder without any run the topmost is named, not everything below it.
    empty = [path for path in inside if not _look(path, found, seen, depth + 1)]
    if len(empty) == len(inside):
        return False
    found.skipped += [Skipped(folder=shown_text(path), reason="there is no run in it") for path in empty]
    return True


def _leads_on(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
