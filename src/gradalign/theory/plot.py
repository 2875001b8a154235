"""The checks as a picture: one log-log panel per claim about an order."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from gradalign.errors import GradalignError
from gradalign.theory.check import Check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D")
_COLUMNS = 4


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
    first = checks[0]
    failed = any(not check.passed for check in checks)
    title = textwrap.fill(f"{first.number}  {first.claim}", 48)
    axes.set_title(title, fontsize=8, loc="left", color="#B00020" if failed else "black")
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
    if path.suffix.lstrip(".").lower() not in Figure().canvas.get_supported_filetypes():
        raise GradalignError(f"--plot cannot write {path.name}; use an ending such as .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise GradalignError(f"--plot cannot write {path}: there is no folder {path.parent}; make it first")


def plot_checks(checks: Sequence[Check], path: Path) -> None:
    """Write the picture; the file's ending chooses the format.

    Args:
        checks: What ``verify`` returned.
        path: A file such as theory.png, theory.svg or theory.pdf.
    """
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
        style = place % len(_COLOURS)
        grid[0, 0].plot(
            [], [], _MARKERS[style] + "-", color=_COLOURS[style], markersize=4.5, linewidth=1, label=problem
        )
    grid[0, 0].plot([], [], "-", color="0.75", linewidth=4, label="predicted slope")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="upper right", ncol=len(problems) + 1, frameon=False)
    figure.suptitle("Norm of the remainder, with its measured slope", x=0.01, ha="left", fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path, dpi=130)
