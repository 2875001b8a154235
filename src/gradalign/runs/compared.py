"""The folders of comparisons and sweeps: whose one is, and that one process at a time writes to a comparison's."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError
from gradalign.runs import COMPARISON, SPEC, SWEEP, as_toml, differing_fields, write_toml
from gradalign.runs.folder import refuse_strangers
from gradalign.runs.locks import locked
from gradalign.runs.untrusted import read_table

_LISTS = ("algorithms", "seeds")
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
def comparison_folder(folder: Path, about: Mapping[str, Any], *, resume: bool, grow: bool = False) -> Iterator[None]:
    """Hold a comparison's folder: refuse what is not ours to overwrite, and a second writer.

    With ``grow``, the algorithms and seeds that it has of the same comparison stay beside those it is ``about`` now.
    """
    with locked(folder):
        if (folder / COMPARISON).exists() and not resume:
            raise GradalignError(
                f"{folder} already holds a comparison; add --resume to continue it, or choose another --out"
            )
        there = read_table(folder / COMPARISON) if grow and (folder / COMPARISON).exists() else {}
        if there.get("name") == about["name"] and all(isinstance(there.get(key), list) for key in _LISTS):
            about = {**about, **{key: [*about[key], *(x for x in there[key] if x not in about[key])] for key in _LISTS}}
            write_toml(folder / COMPARISON, about)
        claim(folder, COMPARISON, about)
        yield
