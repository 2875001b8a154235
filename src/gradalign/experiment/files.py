"""The files of run folders: their names, and writing one whole or not at all. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

SPEC, METRICS, CHECKPOINT, SUMMARY = "spec.toml", "metrics.jsonl", "checkpoint.safetensors", "summary.json"
MODEL, LOCK = "model.safetensors", ".lock"
HOLDINGS = "holdings.json"
FAILURE = "failure.json"
"""Why a run ended by itself before its last round, and whether it diverged; removed when it goes on."""
COMPARISON, CURVES, REPORT = "compare.toml", "curves.png", "report.html"
SWEEP, SWEEP_WORKERS, TRIALS = "sweep.toml", ".workers", "trials"
"""A sweep's description, where each of its processes holds a lock, and the folder of its trials' stages."""
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""The trackers' own folders."""


def safe_name(text: str) -> str:
    """Return text as a file or folder may be called; a comparison's entry names its folder so."""
    return re.sub(r"[^\w.+-]+", "-", text)


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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text or bytes atomically."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    write_atomically(path, lambda file: _put(file, data))


def _put(file: Path, data: bytes) -> None:
    file.write_bytes(data)
