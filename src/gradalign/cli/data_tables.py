"""What ``gradalign data`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradalign.tasks.class_counts import ClassCounts
from gradalign.tasks.task import Task

_SHOWN_CLIENTS = 12
_SHOWN_CLASSES = 6


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


def print_class_counts(console: Console, task: Task, held: ClassCounts, picture: Path) -> None:
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
