"""Random splits of a task's examples: what would the clients' disagreement be if they were random?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradalign.client.flat import Point
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.batches import Examples, join_batches
from gradalign.tasks.holdout import spans_of, split_where_changed, stretches_of
from gradalign.theory.probe import Probe

LEVEL = 0.05
"""The share of random clients that may be called misaligned."""
SPLITS = 19
"""Random splits: the fewest that can tell at this level."""


@dataclass(frozen=True, kw_only=True)
class Null:
    """r after random splits of the same examples, or why there is none."""

    values: tuple[float, ...] = ()
    pairwise: float | None = None
    """The mean cosine between two clients' gradients, over all splits."""
    why_not: str = ""

    def p_value(self, r: float) -> float | None:
        """Return the chance that random clients disagree at least this much; equal up to rounding counts as equal."""
        if not self.values:
            return None
        return (1 + sum(value >= r * (1.0 - 1e-6) for value in self.values)) / (1 + len(self.values))


class Mixed(Examples):
    """Examples taken from several clients: row k is row ``rows[k]`` of source ``owners[k]``."""

    def __init__(self, sources: Sequence[Examples], owners: Tensor, rows: Tensor) -> None:
        self.sources, self.owners, self.rows = sources, owners, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> Any:
        """Return the rows, grouped by the client they come from."""
        owners, rows = self.owners[index], self.rows[index]
        return join_batches([self.sources[int(o)].batch(rows[owners == o]) for o in owners.unique()])


def random_split(probe: Probe, number: int = 0) -> list[Examples]:
    """Return the probe's examples dealt at random to clients of the same sizes; ``number`` tells splits apart."""
    sources = [probe.examples(client) for client in probe.clients]
    sizes = [len(source) for source in sources]
    owners = torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(sizes))
    rows = torch.cat([torch.arange(size) for size in sizes])
    stream = numpy_stream(probe.seed, Purpose.PARTITION, len(sizes), number)
    if probe.task.groups is None:
        order = torch.as_tensor(stream.permutation(len(rows)))
    else:
        starts = np.cumsum([0, *sizes])
        pieces = [start + piece for own, start in zip(pieces_of(probe), starts, strict=False) for piece in own]
        order = torch.as_tensor(np.concatenate([pieces[place] for place in stream.permutation(len(pieces))]))
    return [Mixed(sources, owners[part], rows[part]) for part in order.split(sizes)]


def pieces_of(probe: Probe) -> list[list[NDArray[np.int64]]]:
    """Return each client's rows in pieces that belong together; what is long, such as a text, in eight or more.

    Rows that overlap are no independent draws: dealt out one by one they would make random clients too much alike.
    """
    found, groups = [], probe.task.groups or ()
    for client in probe.clients:
        count = len(probe.task.client(client))
        spans = spans_of([groups[client]], [count])[0][probe.rows(client, count).numpy()]
        stretches = split_where_changed(np.argsort(spans[:, 0], kind="stable"), stretches_of(spans))
        longest = math.ceil(len(spans) / 8)
        found.append([part for s in stretches for part in np.array_split(s, math.ceil(len(s) / longest))])
    return found


def distinct_splits(sizes: Sequence[int]) -> float:
    """Return into how many different sets of clients of these sizes the examples can be dealt; at most 1e300."""
    logarithm = math.lgamma(sum(sizes) + 1) - math.fsum(math.lgamma(size + 1) for size in sizes)
    counts = np.unique(np.asarray(sizes), return_counts=True)[1]
    logarithm -= math.fsum(math.lgamma(int(count) + 1) for count in counts)  # clients of one size have no names
    return math.exp(min(logarithm, 690.0))


def null_of(probe: Probe, point: Point, splits: int) -> Null:
    """Measure r of random splits, or say why that cannot be."""
    sizes = [len(probe.examples(client)) for client in probe.clients]
    free = sizes if probe.task.groups is None else [len(own) for own in pieces_of(probe)]
    if distinct_splits(free) < 1.0 / LEVEL - 0.5:
        return Null(why_not=f"the clients' {sum(sizes)} examples are too few to be dealt out in other ways")
    try:
        found = [r_and_cosine(probe, point, random_split(probe, number)) for number in range(splits)]
    except Exception as error:  # the clients' own data went through already: it is the mixture that fails
        reason = " ".join(str(error).split()) or type(error).__name__
        return Null(why_not=f"the clients' examples cannot be mixed ({reason})")
    if not all(math.isfinite(r) for r, _ in found):
        return Null(why_not="gradients of mixed examples are not finite")
    return Null(values=tuple(r for r, _ in found), pairwise=mean_of_known([cosine for _, cosine in found]))


def r_and_cosine(probe: Probe, point: Point, parts: Sequence[Examples]) -> tuple[float, float | None]:
    """Return r and the mean cosine between clients in one pass, with r = ½ (Σ p_i ‖g_i‖² − ‖ḡ‖²)."""
    mean, units, squares, count = probe.zeros(), probe.zeros(), 0.0, len(parts)
    for (client, share), examples in zip(probe.shares(), parts, strict=True):
        gradient = probe.gradient(point, client, examples)
        norm = float(gradient.norm())
        mean.add_(gradient, alpha=share)
        squares += share * norm**2
        units.add_(gradient, alpha=1.0 / norm if norm > 0.0 else math.nan)
    pairs = (float(units.square().sum()) - count) / (count * (count - 1))
    return 0.5 * max(squares - float(mean.square().sum()), 0.0), pairs if math.isfinite(pairs) else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
