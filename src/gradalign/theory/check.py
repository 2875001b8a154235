"""A check: what a claim predicts, what was measured, and whether they agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

TOLERANCE = 0.1
"""How far a measured order may be from the predicted one."""
HALVINGS = 7
"""How often the small quantity is halved for one slope."""
_FEWEST_POINTS = 7
"""Six halvings; smaller remainders may be left out when rounding has reached them."""
_NOISE = 10 * sys.float_info.epsilon


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim and its measurement.

    A claim is either an order (``predicted`` is a slope on a log-log grid) or a limit (``measured`` must not exceed
    ``bound``).
    """

    number: str
    """The claim's number in docs/theory.md, such as 5b."""
    problem: str
    claim: str
    """The claim in one line, with its formula."""
    symbol: str
    """What shrinks (α, β, ‖v‖), or what is measured when the claim is a limit."""
    measured: float
    passed: bool
    predicted: float | None = None
    bound: float | None = None
    grid: tuple[float, ...] = ()
    remainders: tuple[float, ...] = ()
    fit: float | None = None
    """R² of the straight line through the logarithms."""
    note: str = ""
    finding: bool = False
    """Whether the note corrects or sharpens the paper and should be read."""


def slope_of(grid: tuple[float, ...], remainders: tuple[float, ...]) -> tuple[float, float]:
    """Return the least-squares slope of log(remainder) over log(grid), and R²."""
    xs, ys = np.log2(np.array(grid)), np.log2(np.array(remainders))
    slope, offset = np.polyfit(xs, ys, 1)
    residual = float(np.square(ys - slope * xs - offset).sum())
    total = float(np.square(ys - ys.mean()).sum())
    return float(slope), 1.0 - residual / total if total > 0.0 else 1.0


def halvings(start: float, count: int = HALVINGS) -> tuple[float, ...]:
    """Return start, start/2, …: ``count`` halvings."""
    return tuple(start * 0.5**k for k in range(count + 1))


def order(
    check: Check, start: float, remainder: Callable[[float], Tensor], *, scale: float, count: int = HALVINGS
) -> Check:
    """Measure the order of a remainder and fill in the check.

    Args:
        check: The claim, with ``predicted``.
        start: The largest value of the small quantity.
        remainder: The remainder vector at one value of it.
        scale: The norm of the points whose difference the remainder is; it tells how large rounding noise is.
        count: The number of halvings.
    """
    grid = halvings(start, count)
    sizes = tuple(float(remainder(value).norm()) for value in grid)
    floor = _NOISE * max(scale, 1e-300)
    seen = [(value, size) for value, size in zip(grid, sizes, strict=True) if size > floor]
    if len(seen) < _FEWEST_POINTS or not all(math.isfinite(size) for _, size in seen):
        note = f"only {len(seen)} of {len(grid)} remainders are finite and above rounding ({floor:.1e})"
        return replace(check, grid=grid, remainders=sizes, measured=math.nan, passed=False, note=note)
    used, left = tuple(value for value, _ in seen), tuple(size for _, size in seen)
    measured, fit = slope_of(used, left)
    passed = check.predicted is not None and abs(measured - check.predicted) <= TOLERANCE
    return replace(check, grid=used, remainders=left, measured=measured, fit=fit, passed=passed)


def order_claim(
    number: str, problem: str, claim: str, symbol: str, predicted: float, *, note: str = "", finding: bool = False
) -> Check:
    """Return a claim about an order, not yet measured."""
    return Check(
        number=number,
        problem=problem,
        claim=claim,
        symbol=symbol,
        predicted=predicted,
        measured=math.nan,
        passed=False,
        note=note,
        finding=finding,
    )


def limit(number: str, problem: str, claim: str, symbol: str, measured: float, bound: float, note: str = "") -> Check:
    """Return a check that passes when measured ≤ bound."""
    return Check(
        number=number,
        problem=problem,
        claim=claim,
        symbol=symbol,
        measured=measured,
        bound=bound,
        passed=measured <= bound,
        note=note,
    )
