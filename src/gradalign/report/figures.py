"""The page's figures for a paper, as PDF (vectors) and PNG: the same numbers, drawn without a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from gradalign.report.curves import COLOURS, STYLES
from gradalign.report.experiments import Experiment
from gradalign.report.plots import divisions
from gradalign.report.series import AXES, QUANTITIES, Curve, Quantity, curves_of, shown_groups
from gradalign.runs import readable_name, write_atomically
from gradalign.runs.read import HeldClassCounts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_SIZE = (5.5, 3.6)  # inches: a column of a paper, with labels that stay readable


def write_figures(
    experiments: Sequence[Experiment], folder: Path, on_file: Callable[[Path], None] | None = None
) -> list[Path]:
    """Write every curve over every axis, and who holds what; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    # A dollar sign in a name is a dollar sign, and letters stay letters in the PDF.
    with matplotlib.rc_context({"text.parse_math": False, "pdf.fonttype": 42, "font.size": 9}):
        for prefix, experiment in zip(_prefixes(experiments), experiments, strict=True):
            for name, figure in _figures(experiment):
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, not again for every format
                for suffix in ("pdf", "png"):
                    path = folder / f"{prefix}{name}.{suffix}"
                    _save(figure, path, suffix)
                    written.append(path)
                    if on_file is not None:
                        on_file(path)
    return written


def _save(figure: Figure, path: Path, suffix: str) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format=suffix, dpi=200))


def _prefixes(experiments: Sequence[Experiment]) -> list[str]:
    """Return what the files' names begin with: the experiment's name, with a number where it is there twice."""
    taken: list[str] = []
    for experiment in experiments:
        name = readable_name(experiment.name, "experiment")
        same = sum(one == name or one.startswith(f"{name}-") for one in taken)
        taken.append(name if same == 0 else f"{name}-{same + 1}")
    return [f"{name}-" for name in taken]


def _figures(experiment: Experiment) -> list[tuple[str, Figure]]:
    found: list[tuple[str, Figure]] = []
    for quantity in QUANTITIES:
        curves = curves_of(experiment, quantity)
        for axis in AXES:
            if _known(curves, axis):
                found.append((f"{quantity.key}-over-{axis}", curve_figure(experiment, quantity, curves, axis)))
    held = divisions(experiment)
    return [*found, ("who-holds-what", _class_counts_figure(held[0][1]))] if held else found


def _known(curves: Sequence[Curve], axis: str) -> bool:
    """Return whether there is a point with a place on the axis; rows that others wrote may lack one."""
    places = (x for curve in curves for x in (curve.x, *(line.x for line in curve.lines)))
    return any(value is not None for x in places for value in x.get(axis, ()))


def curve_figure(experiment: Experiment, quantity: Quantity, curves: Sequence[Curve], axis: str) -> Figure:
    """Draw one quantity over one axis."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    handles, labels = [], []
    for number in shown_groups(experiment):
        curve, label = curves[number], experiment.groups[number].label
        drawn = _draw_curve(axes, curve, axis, number, quantity)
        if drawn is not None:
            handles.append(drawn)
            labels.append(
                f" {label}" if label.startswith("_") else label
            )  # matplotlib leaves out names with _ in front
    values = [value for curve in curves for value in (*curve.low, *(y for line in curve.lines for y in line.y))]
    if quantity.logarithmic and values and min(values) > 0:
        axes.set_yscale("log")
        steps = (1.0, 2.0, 5.0) if max(values) < 1000 * min(values) else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(PLAIN)  # matplotlib's own would be mathematics, which is off
        axes.yaxis.set_minor_formatter(NullFormatter())
    if quantity.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    if axis == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(quantity.label)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if handles:
        columns = min(len(labels), 4) if max(map(len, labels)) < 20 else 1
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw_curve(axes: Axes, curve: Curve, axis: str, number: int, quantity: Quantity) -> Line2D | None:
    """Draw one group: its mean and its band, and by itself every run that ended early."""
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
    steps = "steps-post" if quantity.stepped else "default"
    drawn: Line2D | None = None
    for line in curve.lines:
        if line.state != "complete":
            xs, ys = _numbers(line.x[axis]), _numbers(line.y)
            (drawn,) = axes.plot(xs, ys, ":", color=colour, linewidth=0.9, drawstyle=steps)
            axes.plot(xs[-1:], ys[-1:], "x", color=colour, markersize=5)
    if curve.mean:
        xs = _numbers(curve.x[axis])
        (drawn,) = axes.plot(xs, _numbers(curve.mean), style, color=colour, linewidth=1.4, drawstyle=steps)
        if not quantity.stepped:
            axes.fill_between(xs, _numbers(curve.low), _numbers(curve.high), color=colour, alpha=0.15, linewidth=0)
    return drawn


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def _class_counts_figure(held: HeldClassCounts) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    counts = np.array(held.counts, dtype=np.float64).T
    shown = np.ma.masked_equal(counts, 0)  # an empty square is white: not held at all
    wide = counts.max() > 50 * max(1.0, float(shown.min()) if shown.count() else 1.0)
    mesh = axes.imshow(
        shown,
        aspect="auto",
        cmap="viridis_r",
        interpolation="nearest",
        norm=LogNorm(vmin=1, vmax=counts.max()) if wide else None,
        vmin=None if wide else 0,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(held.names) <= 30:
        axes.set_yticks(range(len(held.names)), held.names, fontsize=7)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    figure.colorbar(mesh, ax=axes, label="examples of the class at the client", format=PLAIN)
    return figure
