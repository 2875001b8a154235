"""One process at a time writes to a folder, and others can tell whether one does."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gradalign import runs
from gradalign.errors import FolderInUseError, GradalignError
from gradalign.runs.untrusted import is_file, open_file

_locks: set[IO[bytes]] = set()


def _drop_inherited_locks() -> None:
    """Close a forked worker's copies: a lock must end with the process that took it, not with its workers."""
    for lock in _locks:
        lock.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited_locks)


@contextmanager
def locked(folder: Path, retries: int = 8) -> Iterator[None]:
    """Make the folder if need be and keep other writers out of it inside the block.

    One that holds it is waited for as long as so many ``retries`` take, fifty a second; the default is for a reader
    that asks whether anyone writes, and holds the lock for a blink.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from None
    # Nothing is ever written to the lock: it may be anybody's file under another name.
    with open_file(folder / runs.LOCK, flags=os.O_RDWR | os.O_CREAT) as lock:
        try:
            import fcntl
        except ImportError:  # not a Unix: nothing to lock with
            yield
            return
        for left in range(retries, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not left:
                    raise FolderInUseError(f"another process is writing to {folder}") from None
                time.sleep(0.02)
        _locks.add(lock)
        try:
            yield
        finally:
            _locks.discard(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a worker forked a moment ago may still hold a copy of the file


def is_held(folder: Path) -> bool:
    """Return whether a process is writing to this folder.

    A shared lock is tried for and dropped at once; a writer that starts in this very moment tries again.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: nobody locks, so nobody is known to be gone
        return True
    if not is_file(folder / runs.LOCK):  # nobody of us holds a link or a pipe
        return False
    try:
        with open_file(folder / runs.LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, GradalignError):
        return is_file(folder / runs.LOCK)  # else it has just gone
    return False


def unusable(folder: Path, error: OSError) -> GradalignError:
    return GradalignError(f"cannot use {folder} as a run folder: {error.strerror or error}")
