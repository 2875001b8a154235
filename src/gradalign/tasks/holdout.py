"""Validation examples held out from the training data, client by client, so that tuning never sees the test set.

Examples may belong together: several pictures of one patient, overlapping windows of one text. Each then has a span of
units: one, such as the patient, or several that follow one another, such as the letters that a window covers. Examples
that share a unit are never trained on and scored at once; what lies between is left out of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradalign.errors import GradalignError, real
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.batches import Examples, TensorExamples, as_examples, batch_length, join_batches, take_examples
from gradalign.tasks.partition import Rows
from gradalign.tasks.task import PartitionedClients, Task

Spans = NDArray[np.int64]
"""(examples, 2): the first and the last unit of each example."""
Split = Callable[..., tuple[Tensor, Tensor]]
"""From a ``client`` and its number of ``examples`` to the rows that are trained on and those that are held out."""
Parts = tuple[Sequence[Any], Examples | None, Sequence[Examples]]
"""The clients' training examples, all that was held out, and what was held out from each."""
_TRIES = 16
"""Random places that are tried for a cut before it is made at an end."""


def hold_out(task: Task, share: float, seed: int = 0) -> Task:
    """Return the task with a share of each client's examples taken out of training and scored instead of the test set.

    Examples that belong together (``Task.groups``) are not torn apart, and what lies between is left out of both. What
    was held out from a client is its own test (``Task.client_tests``).

    Args:
        task: What is trained; its own test set is not part of the result.
        share: The share of each client's examples to hold out, between 0 and 1.
        seed: The seed of the choice.
    """
    if not 0.0 < real("the share to hold out", share, 0.0, 1.0) < 1.0:
        raise GradalignError(f"the share to hold out must be between 0 and 1, got {share:g}")
    split, groups = _splitter(task, share, seed)
    if isinstance(task.clients, PartitionedClients):
        clients, validation, own = _split_partition(task.clients, split)
    else:
        clients, validation, own = _split_entries(task, split, seed)
    if not validation:
        groups_too = "" if groups is None else ", or smaller groups of examples that belong together"
        raise GradalignError(
            f"holding out {share:g} of each client of the task {task.name} gives no validation example; "
            f"hold out more, or use larger clients{groups_too}"
        )
    return replace(task, clients=clients, test=validation, client_tests=own, groups=groups, scored_on="validation")


def split_rows(examples: int, share: float, seed: int, client: int) -> tuple[Tensor, Tensor]:
    """Return which of a client's examples are trained on and which are held out, both in ascending order.

    A client gives ``share`` of its examples, rounded up or down by a seeded draw so that every example has the same
    chance to be held out, also at clients that are too small to give a whole one. One is always left to train on.
    """
    stream = numpy_stream(seed, Purpose.HOLDOUT, client)
    count = min(int(share * examples + stream.random()), examples - 1)
    order = stream.permutation(examples)
    return torch.from_numpy(np.sort(order[count:])), torch.from_numpy(np.sort(order[:count]))


def _split_as_given(rows: list[tuple[Tensor, Tensor]], client: int, examples: int) -> tuple[Tensor, Tensor]:
    return rows[client]  # a plain function, not a closure, so that workers can be sent a task


def _splitter(task: Task, share: float, seed: int) -> tuple[Split, Sequence[Any] | None]:
    """Return how a client of so many examples is split, and the groups of what is trained on."""
    if task.groups is None:
        return partial(split_rows, share=share, seed=seed), None
    if (sizes := task.sizes) is None:
        sizes = np.array([len(task.client(client, seed)) for client in range(len(task.clients))])
    spans = spans_of(task.groups, sizes.tolist())
    trained, held = split_groups(spans, share, seed)
    rows = [(torch.from_numpy(own), torch.from_numpy(out)) for own, out in zip(trained, held, strict=True)]
    return partial(_split_as_given, rows), [own[used] for own, used in zip(spans, trained, strict=True)]


def _split_partition(clients: PartitionedClients, split: Split) -> Parts:
    trained, held = [], []
    for client, rows in enumerate(clients.rows.split(clients.sizes().tolist())):
        train, valid = split(client=client, examples=len(rows))
        trained.append(rows[train])
        held.append(rows[valid])
    own = PartitionedClients(clients.tensors, held, clients.transform)
    validation = TensorExamples(clients.tensors, own.rows, clients.transform)
    return PartitionedClients(clients.tensors, trained, clients.transform), validation, own


def _split_entries(task: Task, split: Split, seed: int) -> Parts:
    """Split clients that are entries of a list, or made on demand; what is held out is gathered now, once."""
    batches, counts = [], []
    for client in range(len(task.clients)):
        examples = task.client(client, seed)
        rows = split(client=client, examples=len(examples))[1]
        counts.append(len(rows))
        if len(rows):
            batches.append(examples.batch(rows))
    clients: Sequence[Any] = _TrainingParts(task.clients, split)
    if isinstance(task.clients, list | tuple):
        clients = list(clients)
    try:
        gathered = _Gathered(join_batches(batches)) if batches else None
    except GradalignError as error:
        raise GradalignError(f"cannot hold out validation examples: {error}") from None
    return clients, gathered, [] if gathered is None else _Consecutive(gathered, counts)


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
        return examples.select(self._split(client=client % len(self), examples=len(examples))[0])


class _Consecutive(Sequence[Examples]):
    """Examples cut into pieces, one for each client in turn, made when it is asked for: there may be 200,000."""

    def __init__(self, examples: Examples, counts: Sequence[int]) -> None:
        self._examples, self._ends = examples, np.cumsum([0, *counts])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        client = range(len(self))[client]
        return self._examples.select(torch.arange(int(self._ends[client]), int(self._ends[client + 1])))


class _Gathered(Examples):
    """One large batch, of any form, from which smaller ones are drawn."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return batch_length(self.whole)

    def batch(self, index: Tensor) -> Any:
        return take_examples(self.whole, index)


def spans_of(groups: Sequence[Any], sizes: Sequence[int]) -> list[Spans]:
    """Return every client's groups, see ``Task.groups``, as spans; ``sizes`` are the clients' numbers of examples."""
    arrays = [np.asarray(groups[client]) for client in range(len(sizes))]
    if {array.dtype.kind for array in arrays} <= {"U", "S"}:
        _, numbers = np.unique(np.concatenate([array.ravel() for array in arrays]), return_inverse=True)
        arrays = np.split(numbers, np.cumsum([array.size for array in arrays])[:-1])
    found = []
    for client, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        whole = array.dtype.kind in "iu" and array.shape in ((size,), (size, 2))
        spans = np.asarray(array, np.int64) if whole else np.empty((0, 2), np.int64)
        spans = np.stack([spans, spans], axis=1) if spans.ndim == 1 else spans
        if not whole or (spans[:, 0] > spans[:, 1]).any():
            raise GradalignError(
                f"Task.groups: client {client} has {size} examples and needs a whole number, a name or a pair "
                f"(first, last) for each, got an array of {array.dtype} with shape {array.shape}"
            )
        found.append(spans)
    return found


def touching(spans: Spans, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which examples share a unit with a chosen one."""
    some = spans[chosen]
    some = some[np.argsort(some[:, 0], kind="stable")]
    reach = np.maximum.accumulate(some[:, 1])
    before = np.searchsorted(some[:, 0], spans[:, 1], side="right")  # chosen ones that begin in time
    touched = np.zeros(len(spans), bool)
    touched[before > 0] = reach[before[before > 0] - 1] >= spans[before > 0, 0]
    return touched


def stretches_of(spans: Spans) -> Rows:
    """Return the number of each example's stretch: examples linked by shared units, over any number of others."""
    order = np.argsort(spans[:, 0], kind="stable")
    first, reach = spans[order, 0], np.maximum.accumulate(spans[order, 1])
    number = np.empty(len(order), np.int64)
    number[order] = np.concatenate([[0], np.cumsum(first[1:] > reach[:-1])])
    return number


def split_where_changed(rows: Rows, number: Rows) -> list[Rows]:
    """Cut the rows into stretches of one number each."""
    return np.split(rows, np.flatnonzero(np.diff(number[rows])) + 1)


def split_groups(spans: Sequence[Spans], share: float, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Return which of each client's examples are trained on and which are held out, both in ascending order.

    Clients give whole stretches, and a piece from any place of a stretch that is too long for that. Clients that share
    units give together. What is neither held out nor free of what is held out is in neither list. A client always
    has something left to train on.
    """
    sizes, pool = [len(own) for own in spans], np.concatenate(spans)
    client = np.repeat(np.arange(len(sizes)), sizes)  # whose each example is
    stretches = stretches_of(pool)
    held = np.zeros(len(pool), bool)
    for unit, members in _linked_clients(client, len(sizes), stretches):
        held[_chosen(pool, stretches, members, share, numpy_stream(seed, Purpose.HOLDOUT, unit))] = True
    trained = ~touching(pool, held)
    while len(robbed := np.setdiff1d(np.arange(len(sizes)), client[trained])):
        held &= ~touching(pool, np.isin(client, robbed))
        trained = ~touching(pool, held)
    cuts = np.cumsum(sizes)[:-1]
    own, out = ([np.flatnonzero(part) for part in np.split(side, cuts)] for side in (trained, held))
    return own, out


def _linked_clients(client: Rows, clients: int, stretches: Rows) -> list[tuple[int, Rows]]:
    """Return (first client, examples) of every set of clients that share units with each other."""
    lowest = np.arange(clients)  # the lowest client that each client is known to be linked to
    while True:
        of_stretch = np.full(int(stretches.max()) + 1, clients)
        np.minimum.at(of_stretch, stretches, lowest[client])
        linked = lowest.copy()
        np.minimum.at(linked, client, of_stretch[stretches])
        if np.array_equal(linked, lowest):
            break
        lowest = linked
    unit = lowest[client]
    parts = split_where_changed(np.argsort(unit, kind="stable"), unit)
    return [(int(unit[part[0]]), part) for part in parts]


def _chosen(spans: Spans, stretches: Rows, members: Rows, share: float, stream: np.random.Generator) -> Rows:
    """Return the examples that one set of clients gives: about its share of them, each with nearly the same chance."""
    count = min(int(share * len(members) + stream.random()), len(members) - 1)
    pieces = split_where_changed(members[np.lexsort((spans[members, 0], stretches[members]))], stretches)
    found: list[Rows] = []
    for place in stream.permutation(len(pieces)):
        left = count - sum(len(piece) for piece in found)
        if left < 1:
            break
        piece = pieces[place]
        if len(piece) <= left:
            found.append(piece)
            continue
        cut = _cut(spans[piece], left, stream)
        if cut is not None:
            found.append(piece[cut])
        elif stream.random() * len(piece) < left and len(piece) < len(members):
            found.append(piece)
        break
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _cut(spans: Spans, count: int, stream: np.random.Generator) -> NDArray[np.bool_] | None:
    """Return which examples of one stretch, in order, are cut out, or None where every cut leaves nothing to train on.

    The stretch is taken as a ring, so that its ends are cut out as often as its middle. A cut has a gap on two sides;
    where the stretch is so short that hardly a third of the rest would be left, the cut is near one end, or at it.
    """
    size = len(spans)
    anywhere = [(int(start), (size - count) / 3) for start in stream.integers(size, size=_TRIES)]
    at_an_end = [(int(start), 1) for start in stream.permutation([0, size - count])]
    for start, least in (*anywhere, *at_an_end):
        cut = (np.arange(size) - start) % size < count
        if np.count_nonzero(~touching(spans, cut)) >= max(least, 1):
            return cut
    return None
