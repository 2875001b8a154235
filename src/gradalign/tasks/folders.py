"""Where data lies: one data folder for files in their usual layouts, one cache folder for what is made from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from gradalign.errors import GradalignError

DATA_VARIABLE = "GRADALIGN_DATA"
CACHE_VARIABLE = "GRADALIGN_CACHE"

_chosen: ContextVar[Path | None] = ContextVar("data_folder", default=None)


def cache_folder() -> Path:
    """Return the folder for downloads and decoded arrays: $GRADALIGN_CACHE, or the user's own cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    import pooch

    return Path(pooch.os_cache("gradalign"))


def data_folder(named: str | Path | None = None) -> Path:
    """Return the one folder where data sets are looked for and downloaded to.

    It is the named one, else that of ``--data-dir``, else $GRADALIGN_DATA, else a folder in the user's cache.
    """
    chosen = named or _chosen.get() or os.environ.get(DATA_VARIABLE)
    if not chosen:
        return cache_folder() / "data"
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise GradalignError(f"the data folder {folder} does not exist")
    return folder


@contextmanager
def using_data_folder(folder: Path | None) -> Iterator[None]:
    """Look for data in this folder inside the block; None changes nothing."""
    if folder is None:
        yield
        return
    token = _chosen.set(folder)
    try:
        yield
    finally:
        _chosen.reset(token)


def find_file(folder: Path, places: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first of these files that exists, place by place."""
    candidates = (folder / place / name for place in places for name in names)
    return next((path for path in candidates if path.is_file()), None)


def missing(data_set: str, folder: Path, looked_for: str, advice: str) -> GradalignError:
    """Return the error for a data set that is not there."""
    return GradalignError(f"{data_set} is not in {folder}: there is no {looked_for}; {advice}")
