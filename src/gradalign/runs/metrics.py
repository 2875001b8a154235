"""``metrics.jsonl``: the one parser of its rows, the file as its writer sees it, and as one sees it who follows it."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradalign.runs import CAREFULLY, METRICS, write_whole, writing
from gradalign.runs.untrusted import UnreadableError, is_there, number_of, open_file, parse_json, read_bytes, why_not

LARGEST_METRICS = 512 * 2**20
SHOWN = ("seconds", "test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "r", "drift", "train_loss")
"""What is remembered of a row, beside its round, while a run is followed."""


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return a line of the metrics as a row; None when it is none."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("round")) is not int or not 0 <= row["round"] < 2**53:
        return None
    return row


def _lines(raw: bytes, last: int = -1) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield number, line and row; None for a line that is no row, or whose round does not come after the last one."""
    for number, line in enumerate(io.BytesIO(raw), start=1):
        if line.strip():
            row = row_of(line)
            row = row if row is not None and row["round"] > last else None
            last = last if row is None else row["round"]
            yield number, line, row


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics: a last line cut short is left out, any other must be one."""
    path = folder / METRICS
    return rows_in(read_bytes(path, LARGEST_METRICS), path)


def rows_in(raw: bytes, path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line, row in _lines(raw):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n") or row_of(line) is not None:
            raise UnreadableError(path, f"line {number} of {{file}} is not a row of metrics")
    return rows


class MetricsTail:
    """The rows of a metrics file that grows, is cut back when its run is resumed, or is not there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget(None)

    def _forget(self, which: tuple[int, int] | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.bad_line: int | None = None
        self._offset = self._count = 0
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
                while not self._take(file.read()):
                    self._forget(which)
                    file.seek(0)
        except OSError as error:
            raise UnreadableError(self.path, f"{{file}} {why_not(error)}") from None

    def _take(self, new: bytes) -> bool:
        """Add the whole lines; what comes after the last line's end is torn and waits for the rest.

        Returns False when they do not go on from the rows before: perhaps another file has come in the place of the one
        read so far, and the system has given it the same number.
        """
        whole = new[: new.rfind(b"\n") + 1]
        found = list(_lines(whole, self.rows[-1]["round"] if self.rows else -1))
        bad = [self._count + number for number, _, row in found if row is None]
        if bad and self._offset:
            return False
        self.bad_line = self.bad_line or (bad[0] if bad else None)
        for _, _, row in found:
            if row is not None:
                self.rows.append({name: number_of(row.get(name)) for name in SHOWN} | {"round": row["round"]})
        self._offset += len(whole)
        self._count += whole.count(b"\n")
        return True


class Mark(NamedTuple):
    """The first part of the metrics: how long it is, and its digest."""

    length: int
    digest: str


class MetricsFile:
    """A file of rows that is written to from now on; it is opened with the first row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._written, self._length = hashlib.sha256(), 0
        self._marks: dict[int, Mark] = {}

    def begin(self, rows: bytes, round_index: int | None) -> None:
        """Put these rows in the place of what was there; the last of them is of this round."""
        write_whole(self.path, rows)
        self._written, self._length = hashlib.sha256(rows), len(rows)
        self._marks = {} if round_index is None else {round_index: self.whole}

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row, past all buffers: other processes see it at once."""
        data = left = (json.dumps(row, allow_nan=False) + "\n").encode()
        with writing(self.path):
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | CAREFULLY, 0o666)
            while left:
                left = left[os.write(self._file, left) :]
        self._written.update(data)
        self._length += len(data)
        last = row["round"]
        self._marks = {when: mark for when, mark in self._marks.items() if when == last - 1} | {last: self.whole}

    @property
    def whole(self) -> Mark:
        return Mark(self._length, self._written.hexdigest())

    def until(self, round_index: int) -> Mark | None:
        """Return what was written up to this round's row; known of the last two, since a run may stop between them."""
        return self._marks.get(round_index)

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        if self._file is not None:
            with writing(self.path):
                os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
