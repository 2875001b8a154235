"""Examples that belong together: several pictures of one patient, overlapping windows of one text.

A group is a span of units: of one, such as a patient, or of several that follow one another, such as the letters that a
window covers. Examples that share a unit are never trained on and scored at once; what lies between is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, numpy_stream

Rows = NDArray[np.int64]
Spans = NDArray[np.int64]
"""(examples, 2): the first and the last unit of each example."""
_TRIES = 16
"""Random places that are tried for a cut before it is made at an end."""


def spans_of(groups: Sequence[Any], sizes: Sequence[int]) -> list[Spans]:
    """Return every client's groups as spans.

    Args:
        groups: For each client one entry per example: a whole number, a name, or a pair (first, last) of whole numbers.
        sizes: The number of examples of every client.
    """
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


@dataclass(frozen=True, kw_only=True)
class Pool:
    """All clients' examples one after the other."""

    spans: Spans
    client: Rows
    """Whose each example is."""
    offsets: Rows
    """Where each client begins, and the end."""

    @classmethod
    def of(cls, spans: Sequence[Spans]) -> Pool:
        """Return the pool of these clients."""
        sizes = [len(own) for own in spans]
        return cls(
            spans=np.concatenate(spans),
            client=np.repeat(np.arange(len(sizes)), sizes),
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        )

    def touching(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which examples share a unit with a chosen one."""
        return _touching(self.spans, chosen)

    def stretches(self) -> Rows:
        """Return the number of each example's stretch: who is linked by shared units, over any number of others."""
        order = np.argsort(self.spans[:, 0], kind="stable")
        first, reach = self.spans[order, 0], np.maximum.accumulate(self.spans[order, 1])
        number = np.empty(len(order), np.int64)
        number[order] = np.concatenate([[0], np.cumsum(first[1:] > reach[:-1])])
        return number


def _touching(spans: Spans, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    some = spans[chosen]
    some = some[np.argsort(some[:, 0], kind="stable")]
    reach = np.maximum.accumulate(some[:, 1]) if len(some) else some[:, 1]
    before = np.searchsorted(some[:, 0], spans[:, 1], side="right")  # chosen ones that begin in time
    touched = np.zeros(len(spans), bool)
    touched[before > 0] = reach[before[before > 0] - 1] >= spans[before > 0, 0]
    return touched


def split_groups(spans: Sequence[Spans], share: float, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Return which of each client's examples are trained on and which are held out, both in ascending order.

    Clients give whole stretches, and a piece from any place of a stretch that is too long for that. Clients that share
    units give together. What is neither held out nor free of what is held out is in neither list. A client always
    keeps something to train on.
    """
    pool = Pool.of(spans)
    stretches = pool.stretches()
    held = np.zeros(len(pool.spans), bool)
    for unit, members in _units(pool, stretches):
        held[_chosen(pool.spans, stretches, members, share, numpy_stream(seed, Purpose.HOLDOUT, unit))] = True
    trained = ~pool.touching(held)
    while len(robbed := np.setdiff1d(np.arange(len(spans)), pool.client[trained])):
        own = np.isin(pool.client, robbed)
        held &= ~pool.touching(own)
        trained = ~pool.touching(held)
    cuts = pool.offsets[1:-1]
    return tuple([np.flatnonzero(part) for part in np.split(side, cuts)] for side in (trained, held))  # type: ignore[return-value]


def _units(pool: Pool, stretches: Rows) -> list[tuple[int, Rows]]:
    """Return (first client, examples) of every set of clients that share units with each other."""
    lowest = np.arange(len(pool.offsets) - 1)  # the lowest client that each client is known to be linked to
    while True:
        of_stretch = np.full(int(stretches.max()) + 1, len(lowest))
        np.minimum.at(of_stretch, stretches, lowest[pool.client])
        linked = lowest.copy()
        np.minimum.at(linked, pool.client, of_stretch[stretches])
        if np.array_equal(linked, lowest):
            break
        lowest = linked
    unit = lowest[pool.client]
    order = np.argsort(unit, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(unit[order])) + 1)
    return [(int(unit[part[0]]), part) for part in parts]


def _chosen(spans: Spans, stretches: Rows, members: Rows, share: float, stream: np.random.Generator) -> Rows:
    """Return the examples that one unit gives: about its share of them, each with nearly the same chance."""
    count = min(int(share * len(members) + stream.random()), len(members) - 1)
    ordered = members[np.lexsort((spans[members, 0], stretches[members]))]
    pieces = np.split(ordered, np.flatnonzero(np.diff(stretches[ordered])) + 1)
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
        if np.count_nonzero(~_touching(spans, cut)) >= max(least, 1):
            return cut
    return None
