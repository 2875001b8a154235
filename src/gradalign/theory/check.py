"""A check: what a claim predicts, what was measured, whether they agree, and the picture of all slopes."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gradalign.errors import GradalignError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLERANCE = 0.1
"""How far a measured order may be from the predicted one."""
HALVINGS = 7
"""How often the small quantity is halved for one slope."""
_FEWEST_POINTS = 7
"""Six halvings; smaller remainders may be left out when rounding has reached them."""
_NOISE = 10 * sys.float_info.epsilon
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D")
_COLUMNS = 4


@dataclass(frozen=True)
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
    _: KW_ONLY
    measured: float = math.nan
    passed: bool = False
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


def order(check: Check, start: float, remainder: Callable[[float], Tensor], *, scale: float) -> Check:
    """Measure the order of a remainder and fill in the check, which has ``predicted``.

    ``start`` is the largest value of the small quantity; ``scale`` is the norm of the points whose difference the
    remainder is, which tells how large rounding noise is.
    """
    grid = tuple(start * 0.5**k for k in range(HALVINGS + 1))
    sizes = tuple(float(remainder(value).norm()) for value in grid)
    floor = _NOISE * max(scale, 1e-300)
    seen = [(value, size) for value, size in zip(grid, sizes, strict=True) if size > floor]
    if len(seen) < _FEWEST_POINTS or not all(math.isfinite(size) for _, size in seen):
        note = f"only {len(seen)} of {len(grid)} remainders are finite and above rounding ({floor:.1e})"
        return replace(check, grid=grid, remainders=sizes, measured=math.nan, passed=False, note=note)
    used, left = zip(*seen, strict=True)
    measured, fit = slope_of(used, left)
    passed = check.predicted is not None and abs(measured - check.predicted) <= TOLERANCE
    return replace(check, grid=used, remainders=left, measured=measured, fit=fit, passed=passed)


def limit(number: str, problem: str, claim: str, symbol: str, measured: float, bound: float, note: str = "") -> Check:
    """Return a check that passes when measured ≤ bound."""
    return Check(number, problem, claim, symbol, measured=measured, bound=bound, passed=measured <= bound, note=note)


def _panel(axes: Axes, checks: Sequence[Check], problems: Sequence[str]) -> None:
    for check in checks:
        place = problems.index(check.problem) % len(_COLOURS)
        xs, ys = np.array(check.grid), np.array(check.remainders)
        axes.loglog(xs, ys, _MARKERS[place], color=_COLOURS[place], markersize=4.5)
        # Both lines go through the middle of the points: the fit always does, the prediction is only a slope.
        middle_x, middle_y = np.exp(np.log(xs).mean()), np.exp(np.log(ys).mean())
        if check.predicted is not None:
            guide = middle_y * (xs / middle_x) ** check.predicted
            axes.loglog(xs, guide, "-", color="0.75", linewidth=4, zorder=0, solid_capstyle="round")
        if math.isfinite(check.measured):
            axes.loglog(xs, middle_y * (xs / middle_x) ** check.measured, "-", color=_COLOURS[place], linewidth=1)
    first, passed = checks[0], all(check.passed for check in checks)
    title = textwrap.fill(f"{first.number}  {first.claim}", 48)
    axes.set_title(title, fontsize=8, loc="left", color="black" if passed else "#B00020")
    axes.set_xlabel(first.symbol, fontsize=8, labelpad=1)
    slopes = "\n".join(f"slope {check.measured:.3f}" for check in checks)
    axes.text(
        0.04, 0.95, f"predicted {first.predicted:g}\n{slopes}", transform=axes.transAxes, va="top", fontsize=7.5,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip
    axes.tick_params(labelsize=7)
    axes.minorticks_off()
    axes.grid(visible=True, which="major", alpha=0.25)


def require_plottable(path: Path) -> None:
    """Raise when the picture could not be written to this file: better now than after the measuring."""
    from matplotlib.figure import Figure

    if path.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
        raise GradalignError(f"--plot cannot write {path.name}; use an ending such as .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise GradalignError(f"--plot cannot write {path}: there is no folder {path.parent}; make it first")


def plot_checks(checks: Sequence[Check], path: Path) -> None:
    """Draw one log-log panel per claim about an order; the file's ending chooses the format."""
    from matplotlib.figure import Figure

    require_plottable(path)
    figure = Figure()
    orders = [check for check in checks if check.predicted is not None and check.grid]
    numbers = list(dict.fromkeys(check.number for check in orders))
    problems = list(dict.fromkeys(check.problem for check in orders))
    rows = max(1, math.ceil(len(numbers) / _COLUMNS))
    figure.set_size_inches(3.3 * _COLUMNS, 2.55 * rows + 0.5)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place < len(numbers):
            _panel(axes, [check for check in orders if check.number == numbers[place]], problems)
        else:
            axes.set_axis_off()
    for place, problem in enumerate(problems):
        marker, colour = _MARKERS[place % len(_MARKERS)], _COLOURS[place % len(_COLOURS)]
        grid[0, 0].plot([], [], f"{marker}-", color=colour, markersize=4.5, linewidth=1, label=problem)
    grid[0, 0].plot([], [], "-", color="0.75", linewidth=4, label="predicted slope")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper right", ncol=len(problems) + 1, frameon=False)
    figure.suptitle("Norm of the remainder, with its measured slope", x=0.01, ha="left", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path, dpi=130)
