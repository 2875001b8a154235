"""The files of run folders: their names, and writing one whole or not at all. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

SPEC, METRICS, CHECKPOINT, SUMMARY = "spec.toml", "metrics.jsonl", "checkpoint.safetensors", "summary.json"
HOLDINGS, FAILURE = "holdings.json", "failure.json"
COMPARISON, SWEEP, CURVES, REPORT = "compare.toml", "sweep.toml", "curves.png", "report.html"


def entry_folder(entry: str) -> str:
    """Return the name of the folder that a comparison's entry has."""
    return re.sub(r"[^\w.+-]+", "-", entry)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file, then put it in place: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)  # some writers make private files; a run folder is as open as the user's umask says
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
