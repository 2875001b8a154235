"""The one reader of run folders, which anybody may have written: nothing in them hangs, floods or commands.

Files must be regular, not links, and of bounded size; text must be UTF-8, tables flat enough to walk, numbers such that
one can reckon with them. What is not is named in one sentence. Imports nothing heavy, and never writes.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError, shown_text
from gradalign.runs import CAREFULLY, FAILURE, SPEC

LARGEST_TABLE = 16 * 2**20
_DEEPEST = 64
_MOST_DIGITS = 100
_TOO_LONG = f"it has a whole number of more than {_MOST_DIGITS} digits"
_LONGEST_REASON = 1000
_MOST_CELLS, _MOST_COLUMNS = 200_000, 50  # of what is told of clients
ABSURD = 1e100
"""What no measured number reaches: squares and sums of smaller ones are finite."""
Columns = Mapping[str, list[float | None]]


class UnreadableError(GradalignError):
    """A file is not what a run folder has there: ``problem`` is a sentence about "{file}".

    ``reason`` is the same beside the folder's name, given where "its spec.toml …" would not do.
    """

    def __init__(self, path: Path, problem: str, reason: str | None = None) -> None:
        super().__init__(problem.replace("{file}", str(path)))
        self.reason = shown_text(reason or problem.replace("{file}", f"its {path.name}"))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended by itself; ``diverged`` says that resuming it would end the same way."""

    reason: str
    diverged: bool


@dataclass(frozen=True, kw_only=True)
class HeldClassCounts:
    """Examples by (client, class), the classes' names, and how many clients there are in all."""

    counts: list[list[int]]
    names: list[str]
    clients: int


@dataclass(frozen=True, kw_only=True)
class ClientTable:
    """The clients' results as columns: client, examples, loss, accuracy and further metrics; None is not defined.

    ``personalized`` is empty where that was not asked for; ``of`` says how many clients there are in all.
    """

    of: int
    clients: Columns
    personalized: Columns


def is_there(path: Path) -> bool:
    """Return whether the folder has anything of this name, whatever it is and wherever it leads."""
    return os.path.lexists(path)


def is_file(path: Path) -> bool:
    """Return whether it is a file itself, no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def open_file(path: Path, largest: int | None = None, *, flags: int = os.O_RDONLY) -> io.BufferedReader:
    """Open a regular file of bounded size; a link may lead anywhere, a pipe or a device would wait for ever."""
    try:
        number = os.open(path, flags | CAREFULLY, 0o666)
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableError(path, "{file} is missing", f"it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise UnreadableError(path, f"{{file}} {why_not(error)}") from None
    found, problem = os.fstat(number), None
    if not stat.S_ISREG(found.st_mode):
        problem = "{file} is not a file"
    elif largest is not None and found.st_size > largest:
        problem = f"{{file}} has {found.st_size:,} bytes, more than {largest:,}"
    if problem is not None:
        os.close(number)
        raise UnreadableError(path, problem)
    return os.fdopen(number, "rb")


def why_not(error: OSError | ValueError) -> str:
    """Say of a file that could not be opened what is wrong with it."""
    number = getattr(error, "errno", None)
    if number in (errno.ELOOP, errno.EMLINK):
        return "is a symbolic link, which may lead anywhere; put the file itself there"
    if number in (errno.ENXIO, errno.EISDIR):
        return "is not a file"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def read_bytes(path: Path, largest: int) -> bytes:
    with open_file(path, largest) as file:
        try:
            return file.read(os.fstat(file.fileno()).st_size)  # no more, should it grow
        except OSError as error:
            raise UnreadableError(path, f"{{file}} {why_not(error)}") from None


def parse_json(raw: bytes | str) -> Any:
    """Read JSON; what is no finite number of reasonable length is None. Raises ValueError with the reason."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        value = json.loads(
            text,
            parse_constant=lambda _: None,
            parse_float=_finite,
            parse_int=lambda digits: int(digits) if len(digits) <= _MOST_DIGITS else None,
            object_pairs_hook=_without_repeats,
        )
        _check_shape(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def parse_toml(raw: bytes | str) -> dict[str, Any]:
    """Read TOML. Raises ValueError with the reason."""
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # Python does not turn thousands of digits into a number
        raise ValueError(_TOO_LONG) from None
    _check_shape(table)
    return table


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def _check_shape(value: Any) -> None:
    """Refuse what others could not walk through or reckon with; without recursion, whose depth is what is checked."""
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, int) and abs(one) >= 10**_MOST_DIGITS:
                raise ValueError(_TOO_LONG)
        if not below:
            return
        level = below
    raise ValueError("it is nested too deeply")


def number_of(value: Any) -> float | None:
    """Return a number that one can reckon with, or None for anything else; what is all but zero is zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < ABSURD:
        return None
    return float(value) if abs(value) > 1 / ABSURD else 0.0


def read_table(path: Path) -> dict[str, Any]:
    """Read a table, as TOML or JSON by the file's name."""
    raw, kind = read_bytes(path, LARGEST_TABLE), "TOML" if path.suffix == ".toml" else "JSON"
    try:
        table = parse_toml(raw) if kind == "TOML" else parse_json(raw)
    except ValueError as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)[:200]
        raise UnreadableError(path, f"{{file}} is not valid {kind}: {why}") from None
    if not isinstance(table, dict):
        raise UnreadableError(path, "{file} is not a table")
    return table


def read_optional(path: Path) -> dict[str, Any]:
    """Read a table that a run can do without: empty when it is not there or not whole."""
    try:
        return read_table(path)
    except UnreadableError:
        return {}


def read_spec(folder: Path) -> dict[str, Any]:
    if not is_there(folder / SPEC):
        raise GradalignError(f"{folder} is not a run folder: it has no {SPEC}")
    return read_table(folder / SPEC)


def read_failure(folder: Path) -> Failure | None:
    """Return why a run ended by itself, when its folder says so."""
    table = read_optional(folder / FAILURE)
    reason = table.get("failure")
    if not isinstance(reason, str):
        return None
    return Failure(reason=shown_text(reason[:_LONGEST_REASON]), diverged=table.get("diverged") is True)


def read_class_counts(path: Path) -> HeldClassCounts | None:
    """Return the classes of a run's clients; None where they are not there, or not whole."""
    table = read_optional(path)
    counts, names, clients = table.get("counts"), table.get("names"), table.get("clients")
    if not isinstance(counts, list) or not isinstance(names, list) or not names or not counts:
        return None
    if len(counts) * len(names) > _MOST_CELLS or not isinstance(clients, int) or not _is_count(clients):
        return None
    if any(not isinstance(row, list) or len(row) != len(names) or not all(map(_is_count, row)) for row in counts):
        return None
    return HeldClassCounts(counts=counts, names=[shown_text(name)[:40] for name in names], clients=clients)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def read_client_table(path: Path) -> ClientTable | None:
    """Return the results of a run's clients; None where they are not there, or not whole."""
    table = read_optional(path)
    plain, tuned, total = _columns(table.get("clients")), _columns(table.get("personalized", {})), table.get("of")
    if not plain or tuned is None or not isinstance(total, int) or not _is_count(total):
        return None
    return ClientTable(of=total, clients=plain, personalized=tuned)


def _columns(given: Any) -> Columns | None:
    """Return columns of one length, of which one numbers the clients; None for anything else."""
    if given == {}:
        return {}
    if not isinstance(given, dict) or len(given) > _MOST_COLUMNS or not isinstance(given.get("client"), list):
        return None
    if not all(isinstance(column, list) and len(column) == len(given["client"]) for column in given.values()):
        return None
    if not all(map(_is_count, given["client"])):
        return None
    return {shown_text(name): [number_of(value) for value in column] for name, column in given.items()}
