"""Every matplotlib picture of runs, in one style: the page's figures for a paper, comparisons, classes per client."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from gradalign.errors import shown_text
from gradalign.report import series
from gradalign.report.experiments import Experiment, divisions
from gradalign.report.series import Curve, Quantity, mean_curve, measured
from gradalign.runs import readable_name, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

    from gradalign.tasks.divide import ClassCounts
    from gradalign.tasks.task import Task

STYLE: dict[Any, Any] = {"text.parse_math": False, "pdf.fonttype": 42, "font.size": 9}
"""Of all pictures: a dollar sign in a name is a dollar sign, and letters stay letters in a PDF."""
# Okabe & Ito's palette: told apart by colour-blind readers too; line styles help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_SIZE = (5.5, 3.6)  # inches: a column of a paper, with labels that stay readable
_SAMPLED_CLIENTS, _SAMPLES = 10, 3
_LETTERS_PER_INCH, _SWATCH, _LINE_INCHES = 13, 6, 0.18  # of a legend's text; a swatch is as wide as six letters
_SCORES = ("test_accuracy", "validation_accuracy")


def tidy(axes: Axes, x_label: str = "", y_label: str = "") -> None:
    """Name the axes, draw a faint grid and no box."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path, kind: str = "png", dpi: int = 150) -> None:
    """Write a picture at once or not at all, as a PNG or PDF whatever the file is called."""
    write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=dpi))


def write_figures(experiments: Sequence[Experiment], folder: Path, on_file: Callable[[Path], None] | None) -> None:
    """Write every curve over every axis, and the classes per client, as PDF and PNG; ``on_file`` hears of each."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for prefix, experiment in zip(_prefixes(experiments), experiments, strict=True):
            for name, figure in _figures(experiment):
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, not again for every format
                for suffix in ("pdf", "png"):
                    path = folder / f"{prefix}-{name}.{suffix}"
                    save(figure, path, suffix, dpi=200)
                    if on_file is not None:
                        on_file(path)


def _prefixes(experiments: Sequence[Experiment]) -> list[str]:
    """Return what the files' names begin with: the experiment's name, with a number where it is there twice."""
    taken: list[str] = []
    for experiment in experiments:
        name = readable_name(experiment.name, "experiment")
        same = sum(one == name or one.startswith(f"{name}-") for one in taken)
        taken.append(name if same == 0 else f"{name}-{same + 1}")
    return taken


def _figures(experiment: Experiment) -> Iterator[tuple[str, Figure]]:
    for quantity in series.QUANTITIES:
        curves = series.curves_of(experiment, quantity)
        for axis in series.AXES:
            if _known(curves, axis):
                yield f"{quantity.key}-over-{axis}", curve_figure(experiment, quantity, curves, axis)
    for _, counts in divisions(experiment)[:1]:
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        mesh = _draw_counts(axes, np.array(counts.counts), counts.names if len(counts.names) <= 30 else ())
        _draw_scale(figure, mesh, axes)
        yield "classes-per-client", figure


def _known(curves: Sequence[Curve], axis: str) -> bool:
    """Return whether there is a point with a place on the axis; rows that others wrote may lack one."""
    places = (x for curve in curves for x in (curve.x, *(line.x for line in curve.lines)))
    return any(value is not None for x in places for value in x.get(axis, ()))


def curve_figure(experiment: Experiment, quantity: Quantity, curves: Sequence[Curve], axis: str) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    drawn = {
        n: _draw_curve(axes, curves[n], axis, n, stepped=quantity.stepped) for n in series.shown_groups(experiment)
    }
    _label(axes, quantity, curves, axis)
    _legend(figure, [(line, experiment.groups[n].short) for n, line in drawn.items() if line is not None], 4)
    return figure


def _draw_curve(axes: Axes, curve: Curve, axis: str, number: int, *, stepped: bool) -> Line2D | None:
    """Draw one group: its mean and its band, and by itself every run that ended early."""
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    steps = "steps-post" if stepped else "default"
    drawn: Line2D | None = None
    for line in curve.lines:
        if line.state != "complete":
            xs, ys = _numbers(line.x[axis]), _numbers(line.y)
            (drawn,) = axes.plot(xs, ys, ":", color=colour, linewidth=0.9, drawstyle=steps)
            axes.plot(xs[-1:], ys[-1:], "x", color=colour, markersize=5)
    if curve.mean:
        xs = _numbers(curve.x[axis])
        (drawn,) = axes.plot(xs, _numbers(curve.mean), dashes, color=colour, linewidth=1.4, drawstyle=steps)
        if not stepped:
            axes.fill_between(xs, _numbers(curve.low), _numbers(curve.high), color=colour, alpha=0.15, linewidth=0)
    return drawn


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _label(axes: Axes, quantity: Quantity, curves: Sequence[Curve], axis: str) -> None:
    values = [value for curve in curves for value in (*curve.low, *(y for line in curve.lines for y in line.y))]
    if quantity.logarithmic and values and min(values) > 0:
        axes.set_yscale("log")
        steps = (1.0, 2.0, 5.0) if max(values) < 1000 * min(values) else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(_PLAIN)  # matplotlib's own would be mathematics, which is off
        axes.yaxis.set_minor_formatter(NullFormatter())
    if quantity.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        axes.set_ylim(series.closer_range(curves))
    if axis in ("bytes", "examples"):
        axes.xaxis.set_major_formatter(EngFormatter(unit="B" if axis == "bytes" else ""))
    tidy(axes, series.AXES[axis], quantity.label)


def _legend(figure: Figure, entries: Sequence[tuple[Line2D, str]], most: int) -> None:
    """Name the curves below the picture, in at most so many columns; the picture grows by what the names need."""
    letters = round(_LETTERS_PER_INCH * figure.get_figwidth())
    labels = [f" {label}" if label.startswith("_") else label for _, label in entries]  # "_" would hide it
    if labels:
        columns = min(len(labels), most, max(1, letters // (max(map(len, labels)) + _SWATCH)))
        wrapped = ["\n".join(textwrap.wrap(label, letters - _SWATCH) or [label]) for label in labels]
        lines = math.ceil(sum(label.count("\n") + 1 for label in wrapped) / columns)
        figure.set_figheight(figure.get_figheight() + _LINE_INCHES * max(0, lines - 2))
        handles = [line for line, _ in entries]
        figure.legend(handles, wrapped, loc="outside lower center", ncols=columns, frameon=False)


def draw_comparison(
    path: Path,
    title: str,
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    curves: Sequence[str],
    target: float | None = None,
) -> None:
    """Draw a comparison's curves, accuracies also over local updates, and write the PNG.

    ``runs`` has the rows of every seed's metrics by the algorithm's name, ``curves`` the columns to draw (those that
    nobody measured are left out), ``target`` is an accuracy to mark.
    """
    drawn = {key: [mean_curve(seeds, key) for seeds in runs.values()] for key in curves}
    panels = [
        (series.IN_COMPARISONS[key], axis)
        for key in [key for key in curves if measured(drawn[key])] or curves
        for axis in (("communication_rounds", "local_updates") if key in _SCORES else ("communication_rounds",))
    ]
    height = (len(panels) + 1) // 2
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.75 * height), layout="constrained")
        grid = figure.subplots(height, 2, squeeze=False).ravel()
        lines: dict[str, Line2D | None] = {}
        for axes, (quantity, axis) in zip(grid, panels, strict=False):
            for number, (name, curve) in enumerate(zip(runs, drawn[quantity.key], strict=True)):
                lines[name] = _draw_curve(axes, curve, axis, number, stepped=False) or lines.get(name)
            _label(axes, quantity, drawn[quantity.key], axis)
            if target is not None and quantity.key in _SCORES:
                axes.axhline(target, color="#666666", linewidth=0.8, linestyle=":")
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.suptitle(shown_text(title))  # matplotlib's warning of a missing glyph would print the character
        _legend(figure, [(line, shown_text(name)) for name, line in lines.items() if line], 6)
        save(figure, path)


def draw_class_counts(path: Path, task: Task, counts: ClassCounts) -> None:
    """Draw the classes per client, sizes, and some examples where they are images; write the PNG."""
    clients: Any = task.clients
    has_images = hasattr(clients, "tensors") and clients.tensors[0].ndim == 4
    facts = ", ".join(str(task.facts[key]) for key in ("partition", "kept") if key in task.facts)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 9.5 if has_images else 7.5), layout="constrained")
        bottom: FigureBase = figure
        if has_images:
            top, bottom = np.ravel(np.asarray(figure.subfigures(2, 1, height_ratios=(1, 3.4)), dtype=object))
            _draw_samples(top, clients)
        _draw_counts_and_sizes(bottom, counts)
        figure.suptitle(f"{task.name}: classes per client" + (f" ({facts})" if facts else ""))
        save(figure, path)


def _draw_counts(axes: Axes, counts: np.ndarray, names: Sequence[str]) -> AxesImage:
    """Draw how many examples of each class each client has, as a heat map."""
    shown = np.ma.masked_equal(counts.T, 0)  # an empty square is white: the client has none
    most = float(counts.max())
    wide = most > 50 * (max(1.0, float(shown.min())) if shown.count() else 1.0)
    scale: dict[str, Any] = {"norm": LogNorm(vmin=1, vmax=most)} if wide else {"vmin": 0}
    mesh = axes.imshow(shown, aspect="auto", cmap="viridis_r", interpolation="nearest", **scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if names:
        axes.set_yticks(range(len(names)), names, fontsize=7 if len(names) <= 30 else 6)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    return mesh


def _draw_counts_and_sizes(figure: FigureBase, counts: ClassCounts) -> None:
    """Draw the heat map with the clients' sizes above and the classes' beside."""
    ratios = {"height_ratios": (1, 4), "width_ratios": (6, 1)}
    grid = figure.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=ratios)
    (above, corner), (heat_map, beside) = grid
    corner.set_visible(False)
    sizes, totals = counts.counts.sum(axis=1), counts.counts.sum(axis=0)
    above.bar(np.arange(len(sizes)), sizes, width=1.0 if len(sizes) > 100 else 0.8, color=COLOURS[0])
    tidy(above, y_label="examples")
    beside.barh(np.arange(len(totals)), totals, color=COLOURS[0])
    tidy(beside, x_label="examples")
    mesh = _draw_counts(heat_map, counts.counts, counts.names if len(counts.names) <= 85 else ())
    _draw_scale(figure, mesh, grid[1, :], pad=0.01, fraction=0.04)


def _draw_scale(figure: FigureBase, mesh: AxesImage, axes: Any, **place: Any) -> None:
    figure.colorbar(mesh, ax=axes, label="examples of the class at the client", format=_PLAIN, **place)


def _draw_samples(figure: FigureBase, clients: Any) -> None:
    """Draw the first images of the first clients, upright."""
    images = clients.tensors[0].numpy()
    count = min(_SAMPLED_CLIENTS, len(clients))
    grid = figure.subplots(_SAMPLES, count, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for client in range(count):
        rows = clients.rows[clients.offsets[client] : clients.offsets[client + 1]].numpy()
        for axes, picture in zip(grid[:, client], images[rows[:_SAMPLES]], strict=False):
            axes.imshow(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0), cmap="gray")
        grid[0, client].set_title(f"client {client}", fontsize=8)
