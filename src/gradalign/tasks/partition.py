"""Who holds what: ways of dividing labelled examples among clients.

Every function returns one array of row numbers per client, is seeded, uses no row twice and leaves no client empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream

Rows = NDArray[np.int64]


def _check(examples: int, clients: int) -> None:
    if clients < 1:
        raise GradalignError(f"task.clients must be at least 1, got {clients}")
    if clients > examples:
        raise GradalignError(f"task.clients is {clients}, but there are only {examples} examples to share out")


def iid(labels: NDArray[np.int64], clients: int, seed: int) -> list[Rows]:
    """Shuffle the examples and deal them out evenly."""
    _check(len(labels), clients)
    order = numpy_stream(seed, Purpose.PARTITION).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def by_classes(labels: NDArray[np.int64], clients: int, classes_per_client: int, seed: int) -> list[Rows]:
    """Give each client examples of ``classes_per_client`` classes.

    Classes go round over the clients in a seeded order, so each class has as equal a number of holders as can be; its
    examples are dealt out evenly among them.
    """
    _check(len(labels), clients)
    classes = np.unique(labels)
    if not 1 <= classes_per_client <= len(classes):
        raise GradalignError(
            f"task.classes_per_client must be from 1 to {len(classes)}, the number of classes, got {classes_per_client}"
        )
    if clients * classes_per_client < len(classes):
        raise GradalignError(
            f"{clients} clients with {classes_per_client} classes each cannot hold all {len(classes)} classes; "
            "raise task.clients or task.classes_per_client"
        )
    stream = numpy_stream(seed, Purpose.PARTITION)
    order = stream.permutation(classes)
    held = [
        [order[(c * classes_per_client + j) % len(order)] for j in range(classes_per_client)] for c in range(clients)
    ]
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label in classes:
        holders = [c for c in range(clients) if label in held[c]]
        rows = stream.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(holders):
            raise GradalignError(
                f"class {label} has {len(rows)} examples for {len(holders)} clients; use fewer clients"
            )
        for holder, share in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[holder].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]
