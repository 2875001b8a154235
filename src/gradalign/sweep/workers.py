"""The processes that share a sweep's folder: each holds a lock for as long as it lives."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradalign.runs import SWEEP_WORKERS
from gradalign.runs.folder import locked
from gradalign.watch.followed import is_held


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process at work on a sweep."""

    name: str
    folder: Path


@contextmanager
def working_in(folder: Path) -> Iterator[Worker]:
    """Be a worker of this sweep inside the block."""
    host = re.sub(r"[^\w.-]+", "-", platform.node()) or "host"
    worker = Worker(name=f"{host}-{os.getpid()}-{secrets.token_hex(4)}", folder=folder)
    own = folder / SWEEP_WORKERS / worker.name
    with locked(own):
        yield worker
        # Only after a good end: else the free lock tells the others that whatever was begun is theirs to do.
        shutil.rmtree(own, ignore_errors=True)


def has_died(folder: Path, name: str) -> bool | None:
    """Return whether a worker has ended; None when this folder does not know it, as on another machine."""
    own = folder / SWEEP_WORKERS / name
    if not own.is_dir():
        return None
    try:
        import fcntl  # noqa: F401 - without it nothing can be told from a lock
    except ImportError:
        return None
    return not is_held(own)
