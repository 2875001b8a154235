"""Whose code a recipe may run. A recipe names the function that makes its task, so running one is running code.

A recipe that lies in a run folder was written by a run, perhaps somebody else's. Its task, when it is not one of this
package's, is imported only when the user vouches for it. Imports nothing heavy.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError
from gradalign.runs import COMPARISON, METRICS, SPEC, SWEEP
from gradalign.runs.untrusted import shown_text


def is_outside(task: object) -> bool:
    """Return whether a task's name is a function to import, not one of this package's tasks."""
    return ":" in str(task)


def task_name(table: Mapping[str, Any]) -> object:
    """Return the name of a recipe's task, whatever it is; None when there is none."""
    task = table.get("task")
    return task.get("name") if isinstance(task, Mapping) else None


def lies_in_run_folder(recipe: Path) -> bool:
    """Return whether a file is in, or below, a folder that a run, a comparison or a sweep has written."""
    for path in (recipe.absolute(), recipe.resolve()):
        if path.name == SPEC:
            return True
        for folder in path.parents:
            if any((folder / name).exists() for name in (SPEC, METRICS, COMPARISON, SWEEP)):
                return True
    return False


def require_trust(recipe: Path, data: Mapping[str, Any], changes: Mapping[str, Any], given: str | None) -> None:
    """Refuse a recipe from a run folder that names code outside this package, unless the user gave that name."""
    if task_name(changes) is not None or not lies_in_run_folder(recipe):
        return
    for name in _named(data):
        if is_outside(name) and name != given:
            shown = shown_text(name)
            raise GradalignError(
                f'{shown_text(recipe)} lies in a run folder, and its task "{shown}" is code from outside gradalign: '
                f"if you know and trust it, add --trust-task, or name the task yourself: --task {shlex.quote(shown)}"
            )


def _named(data: Mapping[str, Any]) -> Iterator[object]:
    yield task_name(data)
    compare = data.get("compare")
    settings = compare.get("settings") if isinstance(compare, Mapping) else None
    for own in settings.values() if isinstance(settings, Mapping) else ():
        if isinstance(own, Mapping):
            yield task_name(own)
