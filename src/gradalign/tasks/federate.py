"""Makes a Task of a data set: limits, partition, share of it, test set, facts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from gradalign.tasks.data import PartitionedClients, TensorExamples, Transform
from gradalign.tasks.datasets import DataSet
from gradalign.tasks.divide import Division, even_choice, spaced_choice
from gradalign.tasks.partition import Labels, Rows
from gradalign.tasks.task import Task


def federate(
    data: DataSet,
    division: Division,
    *,
    model: Callable[[], nn.Module],
    transform: Transform,
    augment: Callable[[Any], Any] | None = None,
    seed: int,
    train_limit: int | None = None,
    test_limit: int | None = None,
) -> Task:
    """Return the task of a data set divided among clients.

    Classes that no client holds are left out of the test set too, which happens only where there are fewer
    clients than it takes to hold all classes; the test set has the same share of its examples as the clients.
    """
    labels = data.train.labels
    choose = spaced_choice if data.users else even_choice
    pool = choose(labels, train_limit)
    owners = None if data.train.owners is None else data.train.owners[pool]
    whole = division.divide(labels[pool], seed, owners)
    parts = [pool[part] for part in division.keep(whole, labels[pool], seed)]
    test = _test_rows(data, parts, natural=division.partition == "natural")
    test = test[choose(data.test.labels[test], math.ceil(division.data_share * len(test)))]
    test = test[choose(data.test.labels[test], test_limit)]
    return Task(
        name=data.name,
        model=model,
        clients=PartitionedClients((data.train.inputs, torch.from_numpy(labels)), parts, transform),
        test=TensorExamples((data.test.inputs, torch.from_numpy(data.test.labels)), torch.from_numpy(test), transform),
        augment=augment,
        groups=None if data.train.spans is None else [data.train.spans[part] for part in parts],
        facts={
            **division.describe(len(whole), len(parts)),
            **_classes_held(data, parts),
            **data.facts(),
            "majority": _majority(data.test.labels[test]),
        },
    )


def _test_rows(data: DataSet, parts: list[Rows], *, natural: bool) -> Rows:
    """Return the test rows that belong to these clients: of their owners, or of the classes they hold."""
    mine = data.train.owners if natural else data.train.labels
    theirs = data.test.owners if natural else data.test.labels
    if mine is None or theirs is None or (data.users and not natural):
        return np.arange(len(data.test.labels))
    held = np.unique(np.concatenate([np.unique(mine[part]) for part in parts]))
    rows = np.flatnonzero(np.isin(theirs, held))
    # The kept owners may have no test examples of their own: then everyone's will do.
    return rows if len(rows) else np.arange(len(theirs))


def _classes_held(data: DataSet, parts: list[Rows]) -> dict[str, str]:
    if data.users:
        return {}
    held = len(np.unique(np.concatenate([np.unique(data.train.labels[part]) for part in parts])))
    return {} if held == data.classes else {"classes": f"{held} of {data.classes} classes"}


def _majority(labels: Labels) -> str:
    """Return how often the commonest test class occurs: what guessing it would score."""
    return f"commonest test class {np.bincount(labels).max() / len(labels):.2%}"
