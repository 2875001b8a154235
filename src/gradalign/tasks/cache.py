"""Decoded arrays kept on disk: the second start maps them into memory instead of decoding the files again.

An entry belongs to its source files' paths, sizes and times of change; when one changes, the entry is made anew and
the old one removed. Entries appear whole, by a rename, so processes that start together may both make one and
either's is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.tasks.folders import cache_folder

Arrays = dict[str, NDArray[Any]]
_FORM = "2"  # raise this when a reader changes what it makes of the same file


def cached_arrays(kind: str, sources: Sequence[Path], decode: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
    """Return what ``decode`` makes of these files, from the cache when it is there.

    The arrays are mapped copy-on-write: processes share their pages, and nobody can change the files through them.
    """
    stats = [(path.resolve(), path.stat()) for path in sources]
    whose = _digest([_FORM, kind, *(str(path) for path, _ in stats)])
    state = _digest([f"{stat.st_size} {stat.st_mtime_ns}" for _, stat in stats])
    entry = cache_folder() / "decoded" / f"{kind}-{whose}-{state}"
    found = _load(entry)
    if found is not None:
        return found
    arrays = {name: np.ascontiguousarray(array) for name, array in decode().items()}
    try:
        _store(entry, arrays)
        _remove_stale(entry, f"{kind}-{whose}-")
    except OSError:  # a full disk or a cache that cannot be written: slower next time, right all the same
        return arrays
    return _load(entry) or arrays


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _load(entry: Path) -> Arrays | None:
    """Map an entry's arrays; None when it is not there or damaged."""
    try:
        names = sorted(path for path in entry.iterdir() if path.suffix == ".npy")
        return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in names} or None
    except (OSError, ValueError, EOFError):
        return None


def _store(entry: Path, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=".making-", dir=entry.parent))
    try:
        for name, array in arrays.items():
            with (workshop / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        if entry.exists() and _load(entry) is None:
            shutil.rmtree(entry)
        with suppress(OSError):  # another process was first: its entry is as good
            workshop.rename(entry)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _remove_stale(entry: Path, prefix: str) -> None:
    """Remove entries of the same files in an earlier state; who has them mapped keeps them."""
    for other in entry.parent.glob(f"{prefix}*"):
        if other != entry:
            shutil.rmtree(other, ignore_errors=True)
