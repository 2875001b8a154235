"""``metrics.jsonl`` as its one writer sees it: rows go to the end, and it is known what was written until when."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradalign.runs import CAREFULLY, append, not_written, write_whole


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The first part of the metrics: how long it is, and its digest."""

    length: int
    digest: str


class MetricsFile:
    """A file of rows that is written to from now on; it is opened with the first row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._count(b"")

    def _count(self, rows: bytes) -> None:
        self._written, self._length = hashlib.sha256(rows), len(rows)
        self._marks: dict[int, Mark] = {}

    def begin(self, rows: bytes, round_index: int | None) -> None:
        """Put these rows in the place of what was there; the last of them is of this round."""
        write_whole(self.path, rows)
        self._count(rows)
        if round_index is not None:
            self._marks = {round_index: self.whole}

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row, visible to other processes at once."""
        data = (json.dumps(row, allow_nan=False) + "\n").encode()
        if self._file is None:
            self._file = self._open()
        append(self._file, data, self.path)
        self._written.update(data)
        self._length += len(data)
        last = row["round"]
        self._marks = {when: mark for when, mark in self._marks.items() if when == last - 1} | {last: self.whole}

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | CAREFULLY, 0o666)
        except OSError as error:
            raise not_written(self.path, error) from None

    @property
    def whole(self) -> Mark:
        """All that was written."""
        return Mark(length=self._length, digest=self._written.hexdigest())

    def until(self, round_index: int) -> Mark | None:
        """Return what was written up to this round's row; known of the last two, since a run may stop between them."""
        return self._marks.get(round_index)

    def sync(self) -> None:
        """Return when all of it is on the disk."""
        if self._file is not None:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise not_written(self.path, error) from None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
