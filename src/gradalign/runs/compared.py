"""The folders of comparisons and sweeps: whose one is, and that one process at a time writes to a comparison's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError
from gradalign.runs import COMPARISON, SPEC, SWEEP, as_toml, differing_fields, write_toml
from gradalign.runs.folder import locked, refuse_strangers
from gradalign.runs.untrusted import read_table

_KINDS = {SPEC: "a single run", COMPARISON: "a comparison", SWEEP: "a sweep"}


def claim(folder: Path, file: str, description: Mapping[str, Any]) -> None:
    """Write a description into a folder whose lock is held, or see that this very thing is in it."""
    for other, what in _KINDS.items():
        if other != file and (folder / other).exists():
            raise GradalignError(f"{folder} holds {what}, not {_KINDS[file]}; choose another --out")
    if not (folder / file).exists():
        refuse_strangers(folder, set())
        write_toml(folder / file, description)
    elif differing := differing_fields(read_table(folder / file), tomllib.loads(as_toml(description))):
        what = _KINDS[file].replace("a ", "another ")
        raise GradalignError(f"{folder} holds {what}: {'; '.join(differing[:3])}; choose another --out")


@contextmanager
def comparison_folder(
    folder: Path, description: Mapping[str, Any], *, resume: bool, grow: bool = False
) -> Iterator[None]:
    """Hold a comparison's folder: refuse what is not ours to overwrite, and a second writer.

    With ``grow``, the algorithms and seeds of a comparison of this name that are there already stay part of it.
    """
    with locked(folder):
        if (folder / COMPARISON).exists() and not resume:
            raise GradalignError(
                f"{folder} already holds a comparison; add --resume to continue it, or choose another --out"
            )
        if grow and (folder / COMPARISON).exists():
            description = _grown(folder / COMPARISON, description)
        claim(folder, COMPARISON, description)
        yield


def _grown(file: Path, description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a description with what a file has of the same comparison beside its own, and write that there."""
    there = read_table(file)
    old = {key: there.get(key) for key in ("algorithms", "seeds")}
    if there.get("name") != description["name"] or not all(isinstance(part, list) for part in old.values()):
        return description  # which is refused as another
    joined = {
        key: [*description[key], *(one for one in part or () if one not in description[key])]
        for key, part in old.items()
    }
    whole = {**description, **joined}
    if whole != there:
        write_toml(file, whole)
    return whole
