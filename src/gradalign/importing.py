"""Code of the user's own, by name: ``package.module:name``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError, named_failure, told


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
