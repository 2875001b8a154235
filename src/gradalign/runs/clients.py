"""What a run folder tells of its clients one by one: the classes they hold, and how they fared at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradalign.errors import shown_text
from gradalign.runs.untrusted import number_of, read_optional

Columns = Mapping[str, list[float | None]]
_MOST_CELLS, _MOST_COLUMNS = 200_000, 50


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
