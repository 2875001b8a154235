"""From a recipe's words to clients: a partition by name, the share of it a scale takes, the classes each client has."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks import partition
from gradalign.tasks.batches import TensorExamples, as_examples
from gradalign.tasks.datasets import CLASS_NAMES
from gradalign.tasks.partition import Labels, Rows
from gradalign.tasks.task import PartitionedClients, Task

PARTITIONS = {
    "iid": "IID",
    "one-class": "one class per client",
    "separate": "{classes_per_client} classes per client without overlap",
    "classes": "{classes_per_client} classes per client",
    "sorted": "sorted by label, {iid_share:.4g} of it IID",
    "dirichlet": "Dirichlet({alpha:g})",
    "natural": "natural clients",
    "custom": "custom lists",
}
"""The partitions by name, and what a summary says of them; ``gradalign.tasks.partition`` says what they do."""

_SCALE_KEY = 1  # keeps the choice of clients apart from the partition's own stream
_MOST_NOTED = 500  # clients noted in a run folder; a picture has no more columns
_MOST_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Division:
    """How examples are divided among clients.

    Attributes:
        partition: A name of ``PARTITIONS``.
        clients: The number of clients; None takes all owners of a "natural" partition, such as the roles of plays.
        classes_per_client: For "separate" and "classes".
        iid_share: For "sorted".
        alpha: For "dirichlet".
        parts: For "custom": lists of row numbers, one per client, or the name of a JSON file with them.
        client_share: The share of these clients that takes part at all, a seeded choice of them and as many more as it
            takes to have every class.
        data_share: The share of its examples that each of them has, at least one of each of its classes.
    """

    partition: str = "iid"
    clients: int | None = None
    classes_per_client: int = 1
    iid_share: float = 0.0
    alpha: float = 0.5
    parts: Sequence[Sequence[int]] | str | Path | None = None
    client_share: float = 1.0
    data_share: float = 1.0

    def __post_init__(self) -> None:
        if self.partition not in PARTITIONS:
            raise GradalignError(f'task.partition must be one of {", ".join(PARTITIONS)}, got "{self.partition}"')
        if (self.partition == "custom") != (self.parts is not None):
            raise GradalignError('task.parts and task.partition = "custom" belong together')
        if self.clients is None and self.partition not in ("natural", "custom"):
            raise GradalignError(f'task.clients is needed for the partition "{self.partition}"')
        for name in ("client_share", "data_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise GradalignError(f"task.{name} must be above 0 and at most 1, got {getattr(self, name):g}")

    def divide(self, labels: Labels, seed: int, owners: Labels | None = None) -> list[Rows]:
        """Return the rows of every client of the whole federation."""
        if self.partition == "custom":
            return partition.custom(len(labels), self.parts or ())
        if self.partition == "natural":
            if owners is None:
                raise GradalignError('task.partition: this data has no owners, so it has no "natural" partition')
            return partition.natural(owners, self.clients, seed)
        ways: dict[str, tuple[Any, ...]] = {
            "iid": (partition.iid,),
            "one-class": (partition.one_class,),
            "separate": (partition.separate_classes, self.classes_per_client),
            "classes": (partition.by_classes, self.classes_per_client),
            "sorted": (partition.sorted_with_iid, self.iid_share),
            "dirichlet": (partition.dirichlet, self.alpha),
        }
        divide, *own = ways[self.partition]
        parts: list[Rows] = divide(labels, self.clients or 0, *own, seed)
        return parts

    def subset(self, parts: list[Rows], labels: Labels, seed: int) -> list[Rows]:
        """Return the clients and rows that the shares ask for: a seeded choice of clients, an even choice of rows."""
        # Windows of text overlap their neighbours, and their letters are as common as they are: thin them out.
        as_they_are = self.partition in ("natural", "custom")
        if self.client_share < 1.0:
            # At least two: one client has nobody to align with.
            count = max(min(2, len(parts)), round(self.client_share * len(parts)))
            stream = numpy_stream(seed, Purpose.PARTITION, _SCALE_KEY)
            chosen = stream.choice(len(parts), count, replace=False)
            if not as_they_are:
                chosen = _with_all_classes(chosen, [np.unique(labels[part]) for part in parts], stream)
            parts = [parts[client] for client in np.sort(chosen)]
        if self.data_share < 1.0 and as_they_are:
            parts = [part[spaced_choice(labels[part], math.ceil(self.data_share * len(part)))] for part in parts]
        elif self.data_share < 1.0:
            counts = [max(math.ceil(self.data_share * len(part)), len(np.unique(labels[part]))) for part in parts]
            parts = [part[even_choice(labels[part], count)] for part, count in zip(parts, counts, strict=True)]
        return parts

    def describe(self, clients: int, used: int) -> dict[str, str]:
        """Return the facts worth printing beside a result."""
        facts = {"partition": PARTITIONS[self.partition].format(**vars(self))}
        if used < clients or self.data_share < 1.0:
            share = f"{100 * self.data_share:.4g} % of their examples"
            facts["kept"] = f"scaled to {used} of {clients} clients with {share}"
        return facts


def _with_all_classes(chosen: Rows, held: Sequence[Labels], stream: np.random.Generator) -> Rows:
    """Return the chosen clients, and others in a random order that hold a class which none before them holds."""
    classes, more = set(np.concatenate([held[client] for client in chosen]).tolist()), []
    for client in stream.permutation(np.setdiff1d(np.arange(len(held)), chosen)):
        if not classes.issuperset(held[client].tolist()):
            classes |= set(held[client].tolist())
            more.append(client)
    return np.append(chosen, np.array(more, np.int64))


def divided(
    kind: type[Division] = Division, *, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Turn ``make(division, *, seed=0, …)`` into a task's function that takes the division's settings as keywords.

    Its signature lists the fields of ``kind`` one by one, ``without`` some, with ``defaults`` of its own.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    settings = [
        inspect.Parameter(field.name, keyword, default=defaults.get(field.name, field.default), annotation=field.type)
        for field in fields(kind)
        if field.name not in without
    ]

    def decorate(make: Callable[..., Task]) -> Callable[..., Task]:
        seed, *own = (p for p in inspect.signature(make).parameters.values() if p.kind is keyword)
        signature = inspect.Signature([seed, *settings, *own])

        @functools.wraps(make)
        def task(**given: Any) -> Task:
            bound = signature.bind(**given)
            bound.apply_defaults()
            values = bound.kwargs
            division = kind(**{setting.name: values.pop(setting.name) for setting in settings})
            return make(division, **values)

        task.__signature__ = signature  # type: ignore[attr-defined]
        return task

    return decorate


def spaced_choice(labels: Labels, count: int | None) -> Rows:
    """Return ``count`` positions, in order and at equal distances; None takes all."""
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    if count < 1:
        raise GradalignError(f"a limit on the examples must be at least 1, got {count}")
    return np.arange(count) * len(labels) // count


def even_choice(labels: Labels, count: int | None) -> Rows:
    """Return ``count`` positions, in order, with every class as equally present as can be; None takes all."""
    if count is None or count >= len(labels) or count < 1:
        return spaced_choice(labels, count)
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], labels[order], side="left")
    rank = np.empty(len(labels), np.int64)  # the how-manieth of its class each row is
    rank[order] = np.arange(len(labels)) - starts
    return np.sort(np.argsort(rank, kind="stable")[:count])


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
    classes = 1 + max((int(own.max()) for own in labels if len(own)), default=0)
    names = tuple(task.class_names) or CLASS_NAMES.get(task.name, ())
    if len(names) < classes:  # a task of the user's own may have the name of ours
        names = tuple(map(str, range(classes)))
    if len(names) > _MOST_CLASSES:
        raise GradalignError(f"the task {task.name} has labels up to {len(names) - 1}: too many classes to show")
    return ClassCounts(counts=np.stack([np.bincount(own, minlength=len(names)) for own in labels]), names=names)


def _labels_of(task: Task, most: int | None) -> list[NDArray[np.int64]] | None:
    """Return the labels of the first clients; None where the targets are no class numbers or are made on demand."""
    clients = task.clients
    if not isinstance(clients, PartitionedClients | list | tuple):
        return None
    found = []
    for entry in clients[:most]:
        examples = as_examples(entry)
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
        counted = class_counts_of(task, _MOST_NOTED)
    except GradalignError:
        return None
    return {"names": list(counted.names), "counts": counted.counts.tolist(), "clients": len(task.clients)}
