"""Ways of dividing labelled examples among clients.

Every way returns one array of row numbers per client, is seeded, uses no row twice and leaves no client empty.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream

Rows = NDArray[np.int64]
Labels = NDArray[np.integer[Any]]


def _check(labels: Labels, clients: int) -> None:
    if clients < 1:
        raise GradalignError(f"task.clients must be at least 1, got {clients}")
    if clients > len(labels):
        raise GradalignError(f"task.clients is {clients}, but there are only {len(labels)} examples to share out")


def _classes(labels: Labels, clients: int, classes_per_client: int) -> int:
    """Return the number of classes, at least as many as a client is to hold."""
    _check(labels, clients)
    classes = len(np.unique(labels))
    if not 1 <= classes_per_client <= classes:
        raise GradalignError(
            f"task.classes_per_client must be from 1 to {classes}, the number of classes, got {classes_per_client}"
        )
    return classes


def iid(labels: Labels, clients: int, seed: int) -> list[Rows]:
    """Shuffle the examples and deal them out evenly."""
    _check(labels, clients)
    order = numpy_stream(seed, Purpose.PARTITION).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def by_classes(labels: Labels, clients: int, classes_per_client: int, seed: int) -> list[Rows]:
    """Give each client examples of ``classes_per_client`` classes, so that every class has a holder.

    Classes go round over the clients in a seeded order, so each class has as equal a number of holders as can be; its
    examples are dealt out evenly among them.
    """
    classes = _classes(labels, clients, classes_per_client)
    if clients * classes_per_client < classes:
        raise GradalignError(
            f"{clients} clients with {classes_per_client} classes each cannot hold all {classes} classes; "
            "raise task.clients or task.classes_per_client"
        )
    return _hand_out(labels, clients, classes_per_client, seed)


def separate_classes(labels: Labels, clients: int, classes_per_client: int, seed: int) -> list[Rows]:
    """Give each client all examples of ``classes_per_client`` classes that nobody else holds.

    With fewer places than classes, the classes left over are held by no one.
    """
    classes = _classes(labels, clients, classes_per_client)
    if clients * classes_per_client > classes:
        raise GradalignError(
            f"{clients} clients with {classes_per_client} classes each need {clients * classes_per_client} classes, "
            f"but there are {classes}; lower task.clients or task.classes_per_client"
        )
    return _hand_out(labels, clients, classes_per_client, seed)


def one_class(labels: Labels, clients: int, seed: int) -> list[Rows]:
    """Give each client examples of a single class: all of the class, or a share where clients outnumber classes."""
    _check(labels, clients)
    return _hand_out(labels, clients, 1, seed)


def _hand_out(labels: Labels, clients: int, classes_per_client: int, seed: int) -> list[Rows]:
    """Let the classes go round over the clients and deal each class out evenly among its holders."""
    classes, stream = np.unique(labels), numpy_stream(seed, Purpose.PARTITION)
    order = stream.permutation(classes)
    places = np.arange(clients * classes_per_client).reshape(clients, classes_per_client) % len(order)
    parts: list[list[Rows]] = [[] for _ in range(clients)]
    for label in classes:
        holders = np.flatnonzero((order[places] == label).any(axis=1))
        rows = stream.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(holders):
            raise GradalignError(
                f"class {label} has {len(rows)} examples for {len(holders)} clients; use fewer clients"
            )
        for holder, share in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            parts[holder].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def sorted_with_iid(labels: Labels, clients: int, iid_share: float, seed: int) -> list[Rows]:
    """Deal a share of the examples at random and the rest in the order of their labels, in equal blocks.

    0 gives each client a block of the sorted labels, 1 is IID; all clients are of equal size, give or take one.
    """
    _check(labels, clients)
    if not 0.0 <= iid_share <= 1.0:
        raise GradalignError(f"task.iid_share must be between 0 and 1, got {iid_share:g}")
    order = numpy_stream(seed, Purpose.PARTITION).permutation(len(labels))
    mixed = round(iid_share * len(labels))
    rest = order[mixed:]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    shuffled, both = (np.array_split(rows, clients) for rows in (order[:mixed], order))
    # Never negative: who gets one more of the shuffled examples also gets one more in all, or has a whole row to spare.
    sizes = [len(whole) - len(part) for whole, part in zip(both, shuffled, strict=True)]
    blocks = np.split(rest, np.cumsum(sizes)[:-1])
    return [np.sort(np.concatenate(pair)) for pair in zip(shuffled, blocks, strict=True)]


def dirichlet(labels: Labels, clients: int, alpha: float, seed: int) -> list[Rows]:
    """Divide each class by shares drawn from a Dirichlet(α) over the clients: small α, few classes per client.

    One draw, no retries: a client left with nothing is given an example of the client that has most.
    """
    _check(labels, clients)
    if not 0.0 < alpha < np.inf:
        raise GradalignError(f"task.alpha must be above 0, got {alpha:g}")
    stream = numpy_stream(seed, Purpose.PARTITION)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = stream.permutation(np.flatnonzero(labels == label))
        cuts = np.round(np.cumsum(_dirichlet_shares(alpha, clients, stream))[:-1] * len(rows)).astype(np.int64)
        for part, share in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(share.tolist())
    _fill_empty(parts)
    return [np.sort(np.array(part, np.int64)) for part in parts]


def _dirichlet_shares(alpha: float, clients: int, stream: np.random.Generator) -> NDArray[np.float64]:
    """Draw from a symmetric Dirichlet in logarithms, where even a tiny α neither overflows nor gives NaN."""
    # A Gamma(α) variable is a Gamma(α + 1) variable times U^(1/α).
    alpha = float(np.clip(alpha, 1e-100, 1e9))
    logs = np.log(stream.gamma(alpha + 1.0, size=clients)) - stream.exponential(size=clients) / alpha
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _fill_empty(parts: list[list[int]]) -> None:
    largest = [(-len(part), client) for client, part in enumerate(parts)]
    heapq.heapify(largest)
    for part in parts:
        if not part:
            size, giver = heapq.heappop(largest)
            part.append(parts[giver].pop())
            heapq.heappush(largest, (size + 1, giver))


def natural(owners: Labels, clients: int | None, seed: int) -> list[Rows]:
    """Give each owner's examples to a client of its own: all owners, or a seeded choice of some."""
    held = np.unique(owners)
    if clients is not None:
        if not 1 <= clients <= len(held):
            raise GradalignError(f"task.clients must be from 1 to {len(held)}, the owners of the data, got {clients}")
        held = np.sort(numpy_stream(seed, Purpose.PARTITION).choice(held, clients, replace=False))
    order = np.argsort(owners, kind="stable")
    starts, stops = (np.searchsorted(owners[order], held, side=side) for side in ("left", "right"))
    return [np.sort(order[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def custom(examples: int, lists: Sequence[Sequence[int]] | str | Path) -> list[Rows]:
    """Take the user's own lists of row numbers, one per client, or a JSON file that holds them."""
    if isinstance(lists, str | Path):
        try:
            lists = json.loads(Path(lists).read_text(encoding="utf-8"))
        except OSError as error:
            raise GradalignError(f"task.parts: cannot read {error.filename}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise GradalignError(f"task.parts: {lists} is not JSON: {error}") from None
    if not isinstance(lists, Sequence) or not lists:
        raise GradalignError("task.parts must be a list of lists of row numbers, one list per client")
    parts: list[Rows] = []
    seen = np.zeros(examples, bool)
    for client, part in enumerate(lists):
        try:
            rows = np.asarray(part)
        except ValueError:  # lists of several lengths
            rows = np.empty((0, 0))
        if rows.ndim != 1 or not len(rows) or rows.dtype.kind not in "iu":
            raise GradalignError(f"task.parts: client {client} needs a list of one or more row numbers")
        if rows.min() < 0 or rows.max() >= examples:
            raise GradalignError(f"task.parts: client {client} names rows outside 0 to {examples - 1}")
        if len(np.unique(rows)) < len(rows) or seen[rows].any():
            raise GradalignError(f"task.parts: client {client} names a row that is taken already")
        seen[rows] = True
        parts.append(rows.astype(np.int64))
    return parts
