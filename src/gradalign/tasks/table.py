"""A task from a table: a row is an example, one column is the target, one says which client holds the row.

Which rows are for testing depends on the seed, the client and, so that every class is in both parts, the class. What
else is learned about the table before training is learned from training rows alone, and between clients as sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gradalign.errors import GradalignError, real, whole
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.batches import TensorExamples
from gradalign.tasks.columns import Column, file_digest, read_table
from gradalign.tasks.encode import FEW, Numbers, encode, moments
from gradalign.tasks.holdout import spans_of, split_groups
from gradalign.tasks.partition import Rows
from gradalign.tasks.task import PartitionedClients, Task

_CHOICES = {"kind": ("classes", "regression"), "model": ("linear", "mlp"), "statistics": ("federation", "client")}
_SHOWN = 8


def table_task(
    path: str | Path | None = None,
    target: str | None = None,
    client: str | None = None,
    *,
    seed: int = 0,
    kind: str | None = None,
    model: str = "linear",
    hidden: int = 32,
    test_share: float = 0.25,
    statistics: str = "federation",
    group: str | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    min_rows: int = 5,
    sha256: str | None = None,
) -> Task:
    """Your own table, CSV or Parquet: predict one column from the others; another says which client holds a row.

    Args:
        path: The file.
        target: The column to predict.
        client: The column that says which client holds a row.
        seed: The seed of the split into training and test rows.
        kind: "classes" or "regression"; None decides by the target: texts, truth values and a few whole numbers are
            classes.
        model: "linear", or "mlp" with one hidden layer.
        hidden: The width of that layer.
        test_share: The share of each client's rows that are for testing.
        statistics: Whose mean and deviation standardise a number: those of the "federation", made of the clients' sums
            over their training rows, or each "client"'s own.
        group: A column that says which rows belong together, such as a patient's: never both trained and tested on.
        drop: Columns that are not used.
        keep: Columns that are used although they look like ids.
        min_rows: Clients with fewer rows are left out.
        sha256: The digest that the file must have; a run's spec has it, so that another file is not taken for this one.
    """
    path = _check_words({"path": path, "target": target, "client": client}, kind, model, statistics)
    file, digest = read_table(path), file_digest(path)
    if sha256 not in (None, digest):
        raise GradalignError(f"{path} has changed: its SHA-256 is {digest}, and task.sha256 says {sha256}")
    owners, names, small = _owners(file.column(str(client)), whole("task.min_rows", min_rows, 1))
    goal = _goal(file.column(str(target)), owners >= 0, kind)
    groups = None if group is None else _groups(file.column(group))
    parts = [np.flatnonzero(owners == one) for one in range(owners.max() + 1)]
    train, test = _split(parts, goal, groups, real("task.test_share", test_share, 0.0, 1.0, below=True), seed)
    tested = np.concatenate(test)
    if not len(tested):
        raise GradalignError(f"{path}: no row is left for testing; raise task.test_share, or use larger clients")
    dropped, kept = ([given] if isinstance(given, str) else list(given) for given in (drop, keep))
    for name in (*dropped, *kept):
        file.require(name)
    columns = [file.column(name) for name in file.names if name not in (target, client, group, *dropped)]
    inputs, left_out = encode(columns, train, owners if statistics == "client" else None, kept)
    targets, words = goal.encode(train)
    pool = (torch.from_numpy(inputs.astype(np.float32)), targets)
    sizes = (inputs.shape[1], len(goal.classes) or 1)
    make: Callable[[], nn.Module] = partial(nn.Linear, *sizes)
    if model == "mlp":
        make = partial(mlp, *sizes, whole("task.hidden", hidden, 1))
    return Task(
        name=path.stem,
        model=make,
        clients=PartitionedClients(pool, train),
        test=TensorExamples(pool, torch.from_numpy(tested)),
        client_tests=PartitionedClients(pool, test),
        loss=F.cross_entropy if goal.classes else F.mse_loss,
        metrics=goal.metrics(train, tested),
        groups=None if groups is None else [groups[own] for own in train],
        client_names=names,
        class_names=goal.classes,
        facts={
            "target": words,
            "inputs": f"{len(columns) - len(left_out)} columns as {sizes[0]} inputs",
            **_left_out(left_out, small, min_rows),
            **goal.majority(tested),
            "file": f"SHA-256 {digest[:16]}…",
        },
    )


def mlp(inputs: int, outputs: int, hidden: int) -> nn.Module:
    """Return a model with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _check_words(needed: Mapping[str, Any], kind: Any, model: Any, statistics: Any) -> Path:
    what = {"path": "a CSV or Parquet file", "target": "the column to predict"}
    for name, given in needed.items():
        if not isinstance(given, str | Path) or not str(given):
            raise GradalignError(f"task.{name} is needed: {what.get(name, 'the column that says who holds a row')}")
    if needed["target"] == needed["client"]:
        raise GradalignError(f'the target and the client are the same column, "{needed["target"]}"')
    given = {"kind": kind or "classes", "model": model, "statistics": statistics}
    for name, known in _CHOICES.items():
        if given[name] not in known:
            raise GradalignError(f'task.{name} must be {" or ".join(known)}, got "{given[name]}"')
    return Path(needed["path"])


def _owners(column: Column, min_rows: int) -> tuple[Rows, list[str], dict[str, int]]:
    """Return the number of each row's client, −1 where that is small, the clients' names, and the small ones' rows."""
    column.require_whole("the client")
    values, owners, counts = np.unique(column.values, return_inverse=True, return_counts=True)
    if len(values) == 1:
        problem = f'has one client alone, "{column.words(values[0])}"; a federation needs two or more'
        raise GradalignError(f'the column "{column.name}" {problem}')
    large = counts >= min_rows
    if large.sum() < 2:
        raise GradalignError(
            f'by the column "{column.name}" {large.sum()} of {len(values):,} clients have {min_rows} rows or more, and '
            "a federation needs two; is it the right column? If it is, lower task.min_rows"
        )
    small = {column.words(value): int(count) for value, count in zip(values[~large], counts[~large], strict=True)}
    names = [column.words(value) for value in values[large]]
    return np.where(large, np.cumsum(large) - 1, -1)[owners], names, small


@dataclass(frozen=True)
class RootMeanSquareError:
    """The root of the mean squared error, in the units of the target."""

    deviation: float
    higher_is_better: bool = field(default=False, init=False)

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        return self.deviation * float((outputs - targets).double().square().mean().sqrt())


def r_squared(outputs: Tensor, targets: Tensor) -> float:
    """Return 1 − Σ(y − ŷ)² / Σ(y − ȳ)²: the share of the targets' variance that is explained."""
    around = (targets - targets.double().mean()).square().sum()
    return float(1.0 - (outputs - targets).double().square().sum() / around)


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """What is predicted: the number of each row's class, or a number."""

    name: str
    values: Numbers
    classes: list[str]

    def encode(self, train: Sequence[Rows]) -> tuple[Tensor, str]:
        """Return the targets and words on them; numbers are standardised by the sums of the training rows."""
        if self.classes:
            names = ", ".join(self.classes[:_SHOWN]) + (", …" if len(self.classes) > _SHOWN else "")
            words = f"{self.name} of {len(self.classes)} classes ({names})"
            return torch.from_numpy(self.values.astype(np.int64)), words
        mean, deviation = moments([self.values[rows] for rows in train])
        scaled = ((self.values[:, None] - mean) / deviation).astype(np.float32)
        return torch.from_numpy(scaled), f"{self.name} as ({self.name} − {mean:.6g}) / {deviation:.6g}"

    def metrics(self, train: Sequence[Rows], tested: Rows) -> dict[str, Any]:
        if self.classes:
            return {}
        varied = {"r2": r_squared} if np.ptp(self.values[tested]) > 0 else {}
        return {"rmse": RootMeanSquareError(moments([self.values[rows] for rows in train])[1]), **varied}

    def majority(self, tested: Rows) -> dict[str, str]:
        """Return what guessing the commonest class would score."""
        if not self.classes:
            return {}
        share = np.bincount(self.values[tested].astype(np.int64)).max() / len(tested)
        return {"majority": f"commonest test class {share:.2%}"}


def _goal(column: Column, used: NDArray[np.bool_], kind: str | None) -> _Goal:
    column.require_whole("the target")
    name, (found, codes) = column.name, np.unique(column.values[used], return_inverse=True)
    if len(found) == 1:
        raise GradalignError(f'the target "{name}" is {column.words(found[0])} in every row: there is nothing to learn')
    few = len(found) <= FEW and bool((found == np.floor(found)).all())
    if kind == "regression" or (kind is None and column.levels is None and not few):
        if column.levels is not None:
            raise GradalignError(f'the target "{name}" has texts such as "{column.words(found[0])}", and no numbers')
        return _Goal(name=name, values=column.values, classes=[])
    if len(found) > max(2, len(codes) // 2):
        problem = f"has {len(found):,} classes in {len(codes):,} rows; is it the right column?"
        raise GradalignError(f'the target "{name}" {problem}')
    values = np.zeros(len(column.values))
    values[used] = codes
    return _Goal(name=name, values=values, classes=[column.words(value) for value in found])


def _groups(column: Column) -> Rows:
    column.require_whole("the group")
    return np.unique(column.values, return_inverse=True)[1].astype(np.int64)


def _split(
    parts: Sequence[Rows], goal: _Goal, groups: Rows | None, share: float, seed: int
) -> tuple[list[Rows], list[Rows]]:
    """Return each client's training rows and test rows."""
    if groups is not None:
        sides = split_groups(spans_of([groups[rows] for rows in parts], [len(rows) for rows in parts]), share, seed)
        train, test = ([rows[own] for rows, own in zip(parts, side, strict=True)] for side in sides)
        return train, test
    test = []
    for client, rows in enumerate(parts):
        stream, labels = numpy_stream(seed, Purpose.SPLIT, client), goal.values[rows]
        held: list[Rows] = []
        for alike in [rows[labels == label] for label in np.unique(labels)] if goal.classes else [rows]:
            # Rounded up or down by chance, so that small classes are tested too; one row is left to train on.
            count = min(int(share * len(alike) + stream.random()), len(alike) - 1)
            held.append(stream.permutation(alike)[:count])
        test.append(np.sort(np.concatenate(held)))
    return [np.setdiff1d(rows, own) for rows, own in zip(parts, test, strict=True)], test


def _left_out(columns: Mapping[str, str], clients: Mapping[str, int], least: int) -> dict[str, str]:
    """Say which columns and clients are left out, and why."""
    facts = {}
    if columns:
        facts["left out"] = "left out: " + ", ".join(f"{name} ({reason})" for name, reason in columns.items())
    if clients:
        named = ", ".join(f"{name} ({rows})" for name, rows in list(clients.items())[:_SHOWN])
        more = f" and {len(clients) - _SHOWN:,} more" if len(clients) > _SHOWN else ""
        facts["small clients"] = f"clients left out for fewer than {least} rows: {named}{more}"
    return facts
