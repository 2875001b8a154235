"""Is one algorithm better than another, and does the paper say so too? Pure arithmetic on the seeds' results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RULE = (
    "Two algorithms are told apart when the 95 % confidence interval of the difference of their means over the seeds "
    "(Welch's t) leaves out zero; else the pair is undecided, within the spread of the seeds; with one seed nothing "
    "can be told."
)
PAPER_RULE = "The order of a pair that is told apart agrees or disagrees with the order of the paper's means."

Verdict = Literal["agrees", "disagrees", "undecided", "cannot tell", "equal in the paper"]

# The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom; beyond, it goes to the normal distribution's.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two means and half the width of its 95 % interval; no width when a side has one seed."""

    value: float
    margin: float | None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.margin is not None and abs(self.value) > self.margin


def spread_of(values: Sequence[float]) -> tuple[float, float | None] | None:
    """Return mean and sample standard deviation; one value alone has no deviation, none at all has nothing."""
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return by how much the first algorithm's mean is above the second's; None when one has no result."""
    if not first or not second:
        return None
    value = statistics.fmean(first) - statistics.fmean(second)
    if len(first) < 2 or len(second) < 2:
        return Difference(value=value, margin=None)
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (first, second)]
    squared = sum(part for part, _ in parts)
    if squared == 0.0:
        return Difference(value=value, margin=0.0)
    # As shares of the whole: the square of a tiny variance is zero.
    freedom = 1 / sum((part / squared) ** 2 / count for part, count in parts)
    return Difference(value=value, margin=student_quantile(freedom) * math.sqrt(squared))


def student_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t; between whole degrees its logarithm is all but linear in 1/degrees."""
    most = len(_STUDENT)
    freedom = max(freedom, 1.0)
    below = min(int(freedom), most)
    low, high = _STUDENT[below - 1], _STUDENT[below] if below < most else _NORMAL
    reciprocal = 1 / (below + 1) if below < most else 0.0
    share = (1 / below - 1 / freedom) / (1 / below - reciprocal)
    return float(low ** (1 - share) * high**share)


def verdict(ours: Difference | None, paper: float) -> Verdict:
    """Judge a pair: ``paper`` is the paper's mean of the first minus that of the second."""
    if paper == 0.0:
        return "equal in the paper"
    if ours is None or ours.margin is None:
        return "cannot tell"
    if not ours.decided:
        return "undecided"
    return "agrees" if (ours.value > 0) == (paper > 0) else "disagrees"


def overall(verdicts: Sequence[Verdict]) -> str:
    """Say of all pairs together whether the order is the paper's."""
    counts = {word: verdicts.count(word) for word in ("agrees", "disagrees", "undecided", "cannot tell")}
    total = sum(counts.values())
    if total == 0:
        return "There is no pair to compare with the paper."
    if counts["agrees"] == total:
        return f"The order agrees with the paper's in all {total} pairs." if total > 1 else "The order is the paper's."
    if counts["cannot tell"] == total:
        return "Whether the order agrees with the paper's cannot be told: that takes at least two finished seeds each."
    words = [
        f"agrees in {counts['agrees']}",
        f"disagrees in {counts['disagrees']}",
        f"is within the seeds' spread in {counts['undecided']}",
        f"cannot be told in {counts['cannot tell']}",
    ]
    said = [word for word in words if not word.endswith(" 0")]
    start = (
        "Nothing contradicts the paper's order" if counts["agrees"] else "It cannot be told whether the order agrees"
    )
    if counts["disagrees"]:
        start = "The order does not agree with the paper's"
    return f"{start}: of {total} pairs it {', '.join(said)}."
