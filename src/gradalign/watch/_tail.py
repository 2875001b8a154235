"""The rows of a metrics file that grows, and whether somebody is writing to a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradalign.runs import CAREFULLY, LOCK
from gradalign.runs.untrusted import (
    LARGEST_METRICS,
    UnreadableError,
    is_file,
    is_there,
    number_of,
    open_file,
    row_of,
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
