"""Progress as one line of plain text that is written over: for notebooks, and where no package draws bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from gradalign.errors import shown_text

_SECONDS = 0.2  # between two writings: a notebook keeps every one of them for a moment


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this program: its output is a page, not a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def accuracy_note(row: Mapping[str, Any], before: str = "") -> str:
    """Return the newest measured number worth showing."""
    for scored_on in ("test", "validation"):
        if row.get(f"{scored_on}_accuracy") is not None:
            return f"{scored_on} accuracy {row[f'{scored_on}_accuracy']:.1%}"
        if row.get(f"{scored_on}_loss") is not None:
            return f"{scored_on} loss {row[f'{scored_on}_loss']:.4g}"
    return before


@contextmanager
def rounds_line(rounds: int, label: str, file: IO[str] | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show the rounds of a run in one line; yields a function to call with each row."""
    note, shown, waiting, last, began = "", "", "", 0.0, time.monotonic()

    def show(text: str) -> None:
        nonlocal shown
        if file is not None:
            file.write(f"\r{text:<{len(shown)}}")
            file.flush()
        shown = text

    def write(row: Mapping[str, Any]) -> None:
        nonlocal note, waiting, last
        note, now = accuracy_note(row, note), time.monotonic()
        waiting = shown_text(f"{label}: round {row['round']} of {rounds}, {note or 'training'}, {now - began:.0f} s")
        if now - last >= _SECONDS:
            last = now
            show(waiting)

    try:
        yield write
    finally:
        show(f"{waiting}\n")
