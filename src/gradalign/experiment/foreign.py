"""Reading folders that anybody may have written: only regular files of bounded size, and text without commands.

Imports nothing heavy, and never writes.
"""

from __future__ import annotations

import json
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradalign.experiment.files import FAILURE

_LARGEST_TABLE = 16 * 2**20


class UnreadableError(Exception):
    """A file is not what a run folder has there."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended by itself; ``diverged`` says that resuming it would end the same way."""

    reason: str
    diverged: bool


def shown_text(text: object) -> str:
    """Return text that any terminal, page or picture can hold: no control characters, no halves of characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def read_bytes(path: Path, largest: int) -> bytes:
    """Read a regular file of bounded size; a pipe or a device would wait for ever."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"its {path.name} is not a file")
        if found.st_size > largest:
            raise UnreadableError(f"its {path.name} has {found.st_size:,} bytes, more than {largest:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UnreadableError(f"it has no {path.name}") from None
    except OSError as error:
        raise UnreadableError(f"its {path.name} cannot be read: {error.strerror or error}") from None


def read_table(path: Path) -> dict[str, Any]:
    """Read a table, as TOML or JSON by the file's name."""
    raw, toml = read_bytes(path, _LARGEST_TABLE), path.suffix == ".toml"
    try:
        text = raw.decode("utf-8")
        table = tomllib.loads(text) if toml else json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableError(f"its {path.name} is not valid {'TOML' if toml else 'JSON'}") from None
    if not isinstance(table, dict):
        raise UnreadableError(f"its {path.name} is not a table")
    return table


def read_optional(path: Path) -> dict[str, Any]:
    """Read a table that a run can do without: empty when it is not there or not whole."""
    try:
        return read_table(path)
    except UnreadableError:
        return {}


def read_failure(folder: Path) -> Failure | None:
    """Return why a run ended by itself, when its folder says so."""
    table = read_optional(folder / FAILURE)
    reason = table.get("failure")
    if not isinstance(reason, str):
        return None
    return Failure(reason=shown_text(reason), diverged=table.get("diverged") is True)
