"""The curves of a comparison as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradalign.errors import shown_text
from gradalign.runs import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradalign.compare import Finished

# Okabe & Ito's palette: told apart by colour-blind readers too; line styles help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")

LABELS = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "validation_accuracy": "validation accuracy",
    "validation_loss": "validation loss",
    "train_accuracy": "training accuracy",
    "train_loss": "training loss",
    "r": "r(x), variance of the gradients",
    "drift": "drift ‖∇f(x) − ∇f₁(x)‖ of the first client",
    "cosine": "cosine of the clients' gradients with their mean",
}
_SCORES = ("test_accuracy", "validation_accuracy")


def _panels(curves: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Return what to draw: accuracy also over local updates, then one panel for each further curve."""
    panels = []
    for name in curves:
        panels.append(("communication_rounds", name, "communication rounds", LABELS[name]))
        if name in _SCORES:
            panels.append(("local_updates", name, "local updates, all clients together", LABELS[name]))
    return panels


def over_seeds(
    runs: Sequence[Sequence[Mapping[str, Any]]], axes: Sequence[str], y: str
) -> tuple[list[int], dict[str, list[Any]], list[float], list[float], list[float]]:
    """Return rounds, the mean of every x axis, and mean, lowest and highest of y, where all seeds were measured.

    Args:
        runs: The rows of each seed's metrics.
        axes: The columns that serve as x; one that a row lacks is None there.
        y: The column that is drawn.
    """
    columns: dict[int, list[Mapping[str, Any]]] = {}
    for rows in runs:
        for row in rows:
            if row.get(y) is not None:
                columns.setdefault(row["round"], []).append(row)
    full = [(number, rows) for number, rows in sorted(columns.items()) if len(rows) == len(runs)]

    def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [row.get(name) for row in rows]
        return None if None in values else statistics.fmean(values)  # type: ignore[arg-type]

    return (
        [int(number) for number, _ in full],
        {axis: [mean_of(rows, axis) for _, rows in full] for axis in axes},
        [statistics.fmean(row[y] for row in rows) for _, rows in full],
        [min(row[y] for row in rows) for _, rows in full],
        [max(row[y] for row in rows) for _, rows in full],
    )


def _draw_panel(axes: Axes, finished: Sequence[Finished], panel: tuple[str, str, str, str]) -> None:
    x, y, x_label, y_label = panel
    entries = list(dict.fromkeys(run.planned.entry for run in finished))
    for number, entry in enumerate(entries):
        runs = [run for run in finished if run.planned.entry == entry]
        _, xs, mean, low, high = over_seeds([run.rows for run in runs], [x], y)
        colour, style = COLOURS[number % len(COLOURS)], STYLES[(number // len(COLOURS)) % len(STYLES)]
        axes.plot(xs[x], mean, style, color=colour, label=shown_text(entry), linewidth=1.6)
        axes.fill_between(xs[x], low, high, color=colour, alpha=0.15, linewidth=0)
    logarithmic = y in ("r", "drift") or y.endswith("_loss")
    if logarithmic and any(row[y] for run in finished for row in run.rows):
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="major", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_comparison(path: Path, summary: dict[str, Any], finished: Sequence[Finished], curves: Sequence[str]) -> None:
    """Draw the named curves: mean over the seeds, the shade from the lowest to the highest."""
    from matplotlib.figure import Figure  # slow to import, and the labels above are wanted without it

    measured = [name for name in curves if any(row.get(name) is not None for run in finished for row in run.rows)]
    panels = _panels(measured or list(curves))
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(11, 3.75 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    target = summary["target_accuracy"]
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, finished, panel)
        if target is not None and panel[1] in _SCORES:
            axes.axhline(target, color="#666666", linewidth=0.8, linestyle=":")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    seeds = len(summary["seeds"])
    name = shown_text(summary["name"])  # matplotlib's warning of a missing glyph would print the character
    figure.suptitle(f"{name}: mean of {seeds} seed{'s' if seeds > 1 else ''}, shade from lowest to highest")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))
