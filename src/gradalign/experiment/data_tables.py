"""What ``gradalign data`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradalign.errors import GradalignError
from gradalign.tasks.cifar import CIFAR10_CLASSES
from gradalign.tasks.data import PartitionedClients
from gradalign.tasks.datasets import EMNIST_CLASSES
from gradalign.tasks.leaf import LETTERS
from gradalign.tasks.task import Task

_SHOWN_CLIENTS = 12
_SHOWN_CLASSES = 6


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """How many examples of each class each client holds.

    Attributes:
        counts: (clients, classes).
        names: The classes' names.
    """

    counts: NDArray[np.int64]
    names: tuple[str, ...]


def holdings_of(task: Task) -> Holdings:
    """Count the classes of every client."""
    clients = task.clients
    if not isinstance(clients, PartitionedClients) or clients.tensors[-1].ndim != 1:
        raise GradalignError(f"the task {task.name} does not divide labelled examples among clients")
    labels = clients.tensors[-1].numpy().astype(np.int64)
    names = _class_names(task.name, int(labels.max()) + 1)
    owner = np.repeat(np.arange(len(clients)), clients.sizes())
    flat = owner * len(names) + labels[clients.rows.numpy()]
    counts = np.bincount(flat, minlength=len(clients) * len(names)).reshape(len(clients), len(names))
    return Holdings(counts=counts, names=names)


def _class_names(task: str, classes: int) -> tuple[str, ...]:
    known: dict[str, Sequence[str]] = {
        "emnist": EMNIST_CLASSES,
        "cifar10": CIFAR10_CLASSES,
        "shakespeare": ["⏎" if letter == "\n" else "␣" if letter == " " else letter for letter in LETTERS],
    }
    return tuple(known.get(task, [str(label) for label in range(classes)]))


def print_data(console: Console, found: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Print the data sets, those that are there with their counts."""
    table = Table("data set", "training", "test", "classes", title=f"data folder: {folder}", title_style="")
    table.add_column("where", overflow="fold")  # a path cut off with dots helps nobody
    for data in found:
        if not data["here"]:
            table.add_row(f"[bold]{data['name']}[/bold]", "–", "–", "–", escape(data["why"]))
            continue
        full = data["full"] or (None, None)
        users = f", {data['users']} clients" if data["users"] else ""
        table.add_row(
            f"[bold]{data['name']}[/bold]",
            _count(data["train_examples"], full[0]),
            _count(data["test_examples"], full[1]),
            f"{data['classes']}{users}",
            escape(data["where"]),
        )
    console.print(table)


def _count(found: int, full: int | None) -> str:
    return f"{found:,}" if full is None or found == full else f"{found:,} of {full:,}"


def print_holdings(console: Console, task: Task, held: Holdings, picture: Path) -> None:
    """Print the first clients' holdings and the sizes of all."""
    sizes, classes = held.counts.sum(axis=1), (held.counts > 0).sum(axis=1)
    table = Table("client", "examples", "classes", "holds most of")
    for client in range(min(len(sizes), _SHOWN_CLIENTS)):
        row = held.counts[client]
        most = [label for label in np.argsort(-row, kind="stable")[:_SHOWN_CLASSES] if row[label]]
        more = ", …" if classes[client] > len(most) else ""
        words = ", ".join(f"{held.names[label]}: {row[label]:,}" for label in most)
        table.add_row(str(client), f"{sizes[client]:,}", str(classes[client]), escape(words + more))
    if len(sizes) > _SHOWN_CLIENTS:
        table.add_row("…", "", "", f"and {len(sizes) - _SHOWN_CLIENTS:,} clients more")
    console.print(table)
    facts = ", ".join(str(fact) for fact in task.facts.values())
    console.print(escape(f"{task.name}: {len(sizes):,} clients, {sizes.sum():,} training examples; {facts}"))
    for what, values in (("examples", sizes), ("classes", classes)):
        console.print(
            f"{what} per client: lowest {values.min():,}, median {int(np.median(values)):,}, highest {values.max():,}"
        )
    console.print(f"picture: {escape(str(picture))}", soft_wrap=True)
