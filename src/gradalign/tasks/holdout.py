"""Validation examples held out from the training data, client by client, so that tuning never sees the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradalign.checks import real
from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.batches import batch_length, join_batches, take_examples
from gradalign.tasks.data import Examples, PartitionedClients, TensorExamples, as_examples
from gradalign.tasks.groups import spans_of, split_groups
from gradalign.tasks.task import Task

Split = Callable[[int, int], tuple[Tensor, Tensor]]
"""From a client and its number of examples to the rows that are trained on and those that are held out."""


def split_rows(examples: int, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return which of a client's examples are trained on and which are held out, both in ascending order.

    A client gives ``share`` of its examples, rounded up or down by a seeded draw so that every example has the same
    chance to be held out, also at clients that are too small to give a whole one. It always keeps one to train on.
    """
    stream = numpy_stream(seed, Purpose.HOLDOUT, client)
    count = min(int(share * examples + stream.random()), examples - 1)
    order = stream.permutation(examples)
    return torch.from_numpy(np.sort(order[count:])), torch.from_numpy(np.sort(order[:count]))


def hold_out(task: Task, share: float, seed: int = 0) -> Task:
    """Return the task with a share of each client's examples taken out of training and scored instead of the test set.

    Examples that belong together (``Task.groups``) are not torn apart, and what lies between is left out of both.

    Args:
        task: What is trained; its own test set is not part of the result.
        share: The share of each client's examples to hold out, between 0 and 1.
        seed: The seed of the choice.
    """
    if not 0.0 < real("the share to hold out", share, 0.0, 1.0) < 1.0:
        raise GradalignError(f"the share to hold out must be between 0 and 1, got {share:g}")
    split, groups = _splitter(task, share, seed)
    if isinstance(task.clients, PartitionedClients):
        parts: tuple[Sequence[Any], Examples | None] = _split_partition(task.clients, split)
    else:
        parts = _split_entries(task, split, seed)
    clients, validation = parts
    if validation is None or len(validation) == 0:
        groups_too = "" if groups is None else ", or smaller groups of examples that belong together"
        raise GradalignError(
            f"holding out {share:g} of each client of the task {task.name} gives no validation example; "
            f"hold out more, or use larger clients{groups_too}"
        )
    return replace(task, clients=clients, test=validation, groups=groups, scored_on="validation")


def _splitter(task: Task, share: float, seed: int) -> tuple[Split, Sequence[Any] | None]:
    """Return how a client of so many examples is split, and the groups of what is trained on."""
    if task.groups is None:
        return _AtRandom(share, seed), None
    known = task.sizes
    sizes = [len(task.client(client, seed)) for client in range(len(task.clients))] if known is None else known.tolist()
    spans = spans_of(task.groups, sizes)
    trained, held = split_groups(spans, share, seed)
    rows = [(torch.from_numpy(own), torch.from_numpy(out)) for own, out in zip(trained, held, strict=True)]
    return _Given(rows), [own[kept] for own, kept in zip(spans, trained, strict=True)]


@dataclass(frozen=True)
class _AtRandom:
    """Splits every client by itself, when it is asked for."""

    share: float
    seed: int

    def __call__(self, client: int, examples: int) -> tuple[Tensor, Tensor]:
        return split_rows(examples, self.share, self.seed, client)


@dataclass(frozen=True)
class _Given:
    """Has all clients' rows already."""

    rows: list[tuple[Tensor, Tensor]]

    def __call__(self, client: int, examples: int) -> tuple[Tensor, Tensor]:
        return self.rows[client]


def _split_partition(clients: PartitionedClients, split: Split) -> tuple[PartitionedClients, TensorExamples]:
    trained, held = [], []
    for client in range(len(clients)):
        rows = clients.rows[clients.offsets[client] : clients.offsets[client + 1]]
        train, valid = split(client, len(rows))
        trained.append(rows[train])
        held.append(rows[valid])
    validation = TensorExamples(clients.tensors, torch.cat(held), clients.transform)
    return PartitionedClients(clients.tensors, trained, clients.transform), validation


def _split_entries(task: Task, split: Split, seed: int) -> tuple[Sequence[Any], Examples | None]:
    """Split clients that are entries of a list, or made on demand; what is held out is gathered now, once."""
    batches = []
    for client in range(len(task.clients)):
        examples = task.client(client, seed)
        rows = split(client, len(examples))[1]
        if len(rows):
            batches.append(examples.batch(rows))
    clients = _TrainingParts(task.clients, split)
    whole = list(clients) if isinstance(task.clients, list | tuple) else clients
    return whole, _Gathered(_joined(batches)) if batches else None


class _TrainingParts(Sequence[Any]):
    """The clients' training examples, each client's made when it is asked for, as the clients' own are."""

    def __init__(self, clients: Sequence[Any], split: Split) -> None:
        self._clients, self._split = clients, split

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        examples = as_examples(self._clients[client])
        rows = self._split(client % len(self), len(examples))[0]
        if isinstance(examples, TensorExamples):
            own = rows if examples.rows is None else examples.rows[rows]
            return TensorExamples(examples.tensors, own, examples.transform)
        return _Part(examples, rows)


class _Part(Examples):
    """Some rows of any examples."""

    def __init__(self, examples: Examples, rows: Tensor) -> None:
        self.examples, self.rows = examples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> Any:
        """Return the selected rows, collated as the examples themselves do it."""
        return self.examples.batch(self.rows[index])


class _Gathered(Examples):
    """One large batch, of any form, from which smaller ones are drawn."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return batch_length(self.whole)

    def batch(self, index: Tensor) -> Any:
        """Return these examples, in the form of the clients' own batches."""
        return take_examples(self.whole, index)


def _joined(batches: Sequence[Any]) -> Any:
    try:
        return join_batches(batches)
    except GradalignError as error:
        raise GradalignError(f"cannot hold out validation examples: {error}") from None
