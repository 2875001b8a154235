"""How many examples of each class each client has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.tasks.batches import TensorExamples, as_examples
from gradalign.tasks.datasets import EMNIST_CLASSES
from gradalign.tasks.paper import CIFAR10_CLASSES
from gradalign.tasks.readers import LETTERS
from gradalign.tasks.task import PartitionedClients, Task

_MOST_NOTED = 500  # clients noted in a run folder; a picture has no more columns
_MOST_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """How many examples of each class each client has: (clients, classes), and the classes' names."""

    counts: NDArray[np.int64]
    names: tuple[str, ...]


def class_counts_of(task: Task, most: int | None = None) -> ClassCounts:
    """Count the classes of every client, or of the first ``most``."""
    labels = _labels_of(task, most)
    if labels is None or any(len(own) and own.min() < 0 for own in labels):
        raise GradalignError(f"the task {task.name} does not divide labelled examples among clients")
    names = _class_names(task.name, 1 + max((int(own.max()) for own in labels if len(own)), default=0))
    if len(names) > _MOST_CLASSES:
        raise GradalignError(f"the task {task.name} has labels up to {len(names) - 1}: too many classes to show")
    return ClassCounts(counts=np.stack([np.bincount(own, minlength=len(names)) for own in labels]), names=names)


def _labels_of(task: Task, most: int | None) -> list[NDArray[np.int64]] | None:
    """Return the labels of the first clients; None where the targets are no class numbers or are made on demand."""
    clients = task.clients
    if not isinstance(clients, PartitionedClients | list | tuple):
        return None
    found = []
    for client in range(len(clients) if most is None else min(most, len(clients))):
        examples = as_examples(clients[client])
        if not isinstance(examples, TensorExamples) or len(examples.tensors) < 2:
            return None
        labels = examples.tensors[-1]
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            return None
        own = labels if examples.rows is None else labels[examples.rows]
        found.append(own.cpu().numpy().astype(np.int64))
    return found


def class_counts_note(task: Task) -> dict[str, Any] | None:
    """Return the counts as plain data for the run folder: of the first clients only, so that it stays small."""
    try:
        held = class_counts_of(task, _MOST_NOTED)
    except GradalignError:
        return None
    return {"names": list(held.names), "counts": held.counts.tolist(), "clients": len(task.clients)}


def _class_names(task: str, classes: int) -> tuple[str, ...]:
    known: dict[str, Sequence[str]] = {
        "emnist": EMNIST_CLASSES,
        "cifar10": CIFAR10_CLASSES,
        "shakespeare": ["⏎" if letter == "\n" else "␣" if letter == " " else letter for letter in LETTERS],
    }
    return tuple(known.get(task, [str(label) for label in range(classes)]))
