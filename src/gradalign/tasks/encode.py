"""The inputs of a table: numbers standardised, categories as zeros and ones, gaps marked; training rows decide how."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError
from gradalign.tasks.columns import Column
from gradalign.tasks.partition import Rows

Numbers = NDArray[np.float64]
FEW = 10
"""Of so many different values at most, a column is no id, and whole numbers are classes."""
_MOST_LEVELS = 50  # of a category; a column with more texts is a name or a note
_ID_ROWS = 20  # in a shorter table, numbers that are all different are no sign of an id


def moments(parts: Sequence[Numbers]) -> tuple[float, float]:
    """Return mean and standard deviation over the rows of all parts that are not missing; 1 where nothing deviates.

    Each part is a client's, and it gives sums alone: (n, Σx), then, told the mean, Σ(x − mean)², which is Σx² without
    the loss of digits. So secure summation, which shows nobody's sums but the total, is all that it takes.
    """
    count = sum(np.count_nonzero(~np.isnan(part)) for part in parts)
    if count == 0:
        return math.nan, math.nan
    mean = sum(float(np.nansum(part)) for part in parts) / count
    deviation = math.sqrt(sum(float(np.nansum((part - mean) ** 2)) for part in parts) / count)
    return mean, deviation if deviation > 1e-12 * abs(mean) else 1.0  # less is rounding


def encode(
    columns: Sequence[Column], train: Sequence[Rows], owners: Rows | None, keep: Sequence[str]
) -> tuple[Numbers, dict[str, str]]:
    """Return the inputs, and the columns that are left out with the reason.

    A number is standardised by the federation's statistics, or by each client's own where ``owners`` says which client
    a row belongs to; where it is missing, it is 0, the mean. A category has a column of zeros and ones for each of its
    values; a value that no training row has is none of them. A further column marks the gaps.
    """
    rows, left_out = np.concatenate(train), {}
    blocks: list[Numbers] = []
    for column in columns:
        values, seen = column.values, column.values[rows]
        reason = _useless(column, seen, kept=column.name in keep)
        if reason:
            left_out[column.name] = reason
            continue
        if column.levels is None:
            blocks.append(_standardised(values, train, owners)[:, None])
        else:
            blocks.append((values[:, None] == np.unique(seen[~np.isnan(seen)])).astype(np.float64))
        if np.isnan(seen).any():
            blocks.append(np.isnan(values)[:, None].astype(np.float64))
    if not blocks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise GradalignError(f"no column is left to learn from{f' ({reasons})' if reasons else ''}")
    return np.concatenate(blocks, axis=1), left_out


def _standardised(values: Numbers, train: Sequence[Rows], owners: Rows | None) -> Numbers:
    if owners is None:
        statistics = np.array(moments([values[rows] for rows in train]))
    else:
        statistics = np.array([moments([values[rows]]) for rows in train])[owners].T
    scaled: Numbers = np.nan_to_num((values - statistics[0]) / statistics[1], nan=0.0)
    return scaled


def _useless(column: Column, seen: Numbers, *, kept: bool) -> str:
    """Return why a column does not help, judged by the training rows; an empty text when it may."""
    known = seen[~np.isnan(seen)]
    different = len(np.unique(known))
    if different == 0:
        return "empty"
    if different == 1 and len(known) == len(seen):
        return "the same in every row"
    if kept or different <= FEW:
        return ""
    if column.levels is not None:
        names = different > _MOST_LEVELS or 2 * different > len(known)
        return f"{different:,} different texts" if names else ""
    if (known != np.floor(known)).any():
        return ""
    largest = np.abs(known).max()
    if largest > 2.0**53:  # where floats no longer tell neighbours apart
        return "an id: whole numbers of more than 15 digits"
    called = re.search(r"(^|[^a-z])(id|key|nr|number)$|ID$", column.name)
    like_an_id = called or largest > 1e9 or np.ptp(known) < 2 * len(seen)
    return "an id: whole numbers, all different" if different >= max(len(known), _ID_ROWS) and like_an_id else ""
