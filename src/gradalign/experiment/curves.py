"""The curves of a comparison as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from gradalign.experiment.store import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradalign.experiment.compare import Finished

# Okabe & Ito's palette: told apart by colour-blind readers too; line styles help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")

PANELS = (
    ("communication_rounds", "test_accuracy", "communication rounds", "test accuracy"),
    ("local_updates", "test_accuracy", "local updates, all clients together", "test accuracy"),
    ("communication_rounds", "test_loss", "communication rounds", "test loss"),
    ("communication_rounds", "r", "communication rounds", "r(x), variance of the gradients"),
)


def _curve(runs: Sequence[Finished], x: str, y: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return x, mean, lowest and highest of y over the seeds, where all seeds were measured."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for row in run.rows:
            if row[y] is not None:
                columns.setdefault(row["round"], []).append((row[x], row[y]))
    full = [points for _, points in sorted(columns.items()) if len(points) == len(runs)]
    return (
        [statistics.fmean(p[0] for p in points) for points in full],
        [statistics.fmean(p[1] for p in points) for points in full],
        [min(p[1] for p in points) for points in full],
        [max(p[1] for p in points) for points in full],
    )


def _draw_panel(axes: Axes, finished: Sequence[Finished], panel: tuple[str, str, str, str]) -> None:
    x, y, x_label, y_label = panel
    entries = list(dict.fromkeys(run.planned.entry for run in finished))
    for number, entry in enumerate(entries):
        runs = [run for run in finished if run.planned.entry == entry]
        xs, mean, low, high = _curve(runs, x, y)
        colour, style = COLOURS[number % len(COLOURS)], STYLES[(number // len(COLOURS)) % len(STYLES)]
        axes.plot(xs, mean, style, color=colour, label=entry, linewidth=1.6)
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    if y in ("r", "test_loss") and any(row[y] for run in finished for row in run.rows):
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="major", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_comparison(path: Path, summary: dict[str, Any], finished: Sequence[Finished]) -> None:
    """Draw accuracy, loss and r(x): mean over the seeds, the shade from the lowest to the highest."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.subplots(2, 2)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, finished, panel)
    target = summary["target_accuracy"]
    if target is not None:
        for axes in grid.flat[:2]:
            axes.axhline(target, color="#666666", linewidth=0.8, linestyle=":")
    seeds = len(summary["seeds"])
    figure.suptitle(f"{summary['name']}: mean of {seeds} seed{'s' if seeds > 1 else ''}, shade from lowest to highest")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))
