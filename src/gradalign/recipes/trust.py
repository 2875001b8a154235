"""Code of the user's own, by name: ``package.module:name``; and whose a recipe may run.

A recipe names the function that makes its task, and perhaps classes of algorithms, so running one is running code. One
that lies in a run folder was written by a run, perhaps somebody else's: what it names, when it is not one of this
package's, is imported only when the user vouches for it.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError, named_failure, shown_text, told
from gradalign.recipes import found
from gradalign.runs import COMPARISON, METRICS, SPEC, SWEEP


def is_outside(name: object) -> bool:
    """Return whether a name is one to import, not one of this package's."""
    return ":" in str(name)


def imported(name: str, where: str, kind: str) -> Any:
    """Return what ``package.module:name`` names, or say in one sentence what is wrong; ``kind`` is what it should be.

    Modules are found as with ``python -m``: beside where the command was given, too.
    """
    module_name, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not module_name or not attribute:
        raise GradalignError(f'{where}: "{name}" is not package.module:{kind}')
    with named_failure(f"{where}: importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise GradalignError(f'{where}: cannot import "{module_name}": {told(error)}') from error
    target = getattr(module, attribute, None)
    if target is None:
        raise GradalignError(f'{where}: the module {module_name} has no "{attribute}"')
    return target


def lies_in_run_folder(recipe: Path) -> bool:
    """Return whether a file is in, or below, a folder that a run, a comparison or a sweep has written."""
    written = (SPEC, METRICS, COMPARISON, SWEEP)
    for path in (recipe.absolute(), recipe.resolve()):
        if path.name == SPEC or any((folder / name).exists() for folder in path.parents for name in written):
            return True
    return False


def require_trust(recipe: Path, data: Mapping[str, Any], changes: Mapping[str, Any], task: str | None) -> None:
    """Refuse a recipe from a run folder that names code outside this package, unless the user gave that name."""
    if not lies_in_run_folder(recipe):
        return
    given = {"task": found(changes, "task", "name") or task, "algorithm": found(changes, "algorithm", "name")}
    for kind, name in _named(data):
        # The command line's task takes the place of every other; its algorithm not that of a comparison's entries.
        replaced = kind == "task" and found(changes, "task", "name") is not None
        if is_outside(name) and name != given[kind] and not replaced:
            shown = shown_text(name)
            itself = (
                f"--task {shlex.quote(shown)}" if kind == "task" else f"--set {shlex.quote(f'algorithm.name={shown}')}"
            )
            raise GradalignError(
                f'{shown_text(recipe)} lies in a run folder, and its {kind} "{shown}" is code from outside gradalign: '
                f"if you know and trust it, add --trust-task, or name the {kind} yourself: {itself}"
            )


def outside_names(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of code that does not come with this package in a recipe's tables, as they may be shown."""
    return list(dict.fromkeys(shown_text(name) for _, name in _named(spec) if is_outside(name)))


def _named(data: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what a recipe's tables name, with its kind."""
    settings, entries = found(data, "compare", "settings"), found(data, "compare", "algorithms")
    for own in (data, *(settings.values() if isinstance(settings, Mapping) else ())):
        for kind in ("task", "algorithm"):
            yield kind, found(own, kind, "name")
    for entry in entries if isinstance(entries, list) else ():
        yield "algorithm", entry
