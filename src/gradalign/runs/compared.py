"""The folder of a comparison: whose it is, and that one process at a time writes to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError
from gradalign.runs import COMPARISON, SPEC, differing_fields, write_toml
from gradalign.runs.folder import locked, refuse_strangers
from gradalign.runs.untrusted import read_table


@contextmanager
def comparison_folder(folder: Path, description: Mapping[str, Any], *, resume: bool) -> Iterator[None]:
    """Hold a comparison's folder: refuse what is not ours to overwrite, and a second writer."""
    with locked(folder):
        if (folder / SPEC).exists():
            raise GradalignError(f"{folder} holds a single run, not a comparison; choose another --out")
        if (folder / COMPARISON).exists():
            if not resume:
                raise GradalignError(
                    f"{folder} already holds a comparison; add --resume to continue it, or choose another --out"
                )
            differing = differing_fields(read_table(folder / COMPARISON), description)
            if differing:
                raise GradalignError(f"{folder} holds another comparison: {'; '.join(differing)}")
        else:
            refuse_strangers(folder, set())
            write_toml(folder / COMPARISON, description)
        yield
