"""The sweep's pictures: accuracy over β, as in the paper, and over every value that was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from gradalign.report.curves import COLOURS
from gradalign.runs import write_atomically
from gradalign.sweep.conduct import Found
from gradalign.sweep.grid import describe_point, shown
from gradalign.sweep.plan import SweepPlan
from gradalign.sweep.protocol import Outcome, are_accuracies

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BETA, VALUES = "beta.png", "values.png"


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))


def _scored(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.score is not None]


def _height(score: float, accuracies: bool) -> float:
    return 100 * score if accuracies else -score


def _tidy(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Draw ratios evenly, with zero, where it was tried, at the left end."""
    positive = [value for value in values if value > 0]
    if not positive:
        return
    if min(values) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive) / 2)
    axes.set_xticks(sorted(set(values)), [shown(value) for value in sorted(set(values))], rotation=45, fontsize=8)
    axes.minorticks_off()


def draw_beta(folder: Path, plan: SweepPlan, found: Found, summary: dict[str, Any]) -> None:
    """Draw validation accuracy over β with all else fixed, and the finalists' test accuracy where they have it."""
    searched = [one for one in found.tuned if one.stage in ("beta-coarse", "beta-fine")]
    accuracies = are_accuracies(searched)
    scored = sorted(_scored(searched), key=lambda one: float(one.point["beta"]))
    if not scored:
        return
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    betas = [float(one.point["beta"]) for one in scored]
    heights = [_height(one.score or 0.0, accuracies) for one in scored]
    axes.plot(betas, heights, color=COLOURS[0], linewidth=1.2, label="validation, one seed")
    for stage, marker, filled in (("beta-coarse", "o", COLOURS[0]), ("beta-fine", "s", "white")):
        own = [(beta, y) for one, beta, y in zip(scored, betas, heights, strict=True) if one.stage == stage]
        xs, ys = [beta for beta, _ in own], [y for _, y in own]
        axes.plot(xs, ys, marker, color=COLOURS[0], markerfacecolor=filled, label=f"  {stage.removeprefix('beta-')}")
    ended = [float(one.point["beta"]) for one in searched if one.score is None]
    if ended:
        low: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(ended, [0.02] * len(ended), "x", color="#999999", label="ended early or diverged", **low)
    if summary["baseline_best"] is not None:
        level = _height(summary["baseline_best"]["validation_score"], accuracies)
        label = f"validation, tuned {plan.search.baseline}"
        axes.axhline(level, color=COLOURS[6], linestyle="--", linewidth=1, label=label)
    _draw_tested(axes, found, accuracies)
    all_betas = betas + ended + _draw_finalists(axes, summary, accuracies)
    _scale(axes, all_betas)
    axes.set_xlabel("β")
    _tidy(axes, "accuracy, %" if accuracies else "loss")
    axes.set_title(f"{plan.name}: {describe_point(_fixed(scored[0]))}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    _save(figure, folder / BETA)


def _draw_tested(axes: Axes, found: Found, accuracies: bool) -> None:
    """Draw the test accuracy of every β of the search, where it was asked for: the paper's figure."""
    known = sorted((float(one.point["beta"]), one.score) for one in found.tested_betas if one.score is not None)
    if known:
        heights = [_height(score, accuracies) for _, score in known]
        axes.plot([beta for beta, _ in known], heights, "^-", color=COLOURS[2], linewidth=1.2, label="test, one seed")


def _fixed(one: Outcome) -> dict[str, Any]:
    return {name: value for name, value in one.point.items() if name != "beta"}


def _draw_finalists(axes: Axes, summary: dict[str, Any], accuracies: bool) -> list[float]:
    """Draw the finalists' test results, mean and standard deviation over the seeds; return their β."""
    what, scale = ("test_accuracy", 100) if accuracies else ("test_loss", 1)
    seeds = len(summary["seeds"])
    rows = [row for row in summary["finalists"] if row[what] is not None]
    label = f"finalists on the test set, {seeds} seed{'s' if seeds > 1 else ''}, other values tuned too"
    drawn: list[float] = []
    for row in rows:
        beta = float(row["values"]["beta"])
        beside = 1.0 + 0.06 * drawn.count(beta)  # finalists often share their β: side by side
        drawn.append(beta)
        deviation = scale * (row[what]["std"] or 0.0)
        axes.errorbar(
            [beta * beside],
            [scale * row[what]["mean"]],
            yerr=[deviation],
            fmt="D",
            color=COLOURS[1],
            markerfacecolor=COLOURS[1] if row["chosen"] else "white",
            capsize=3,
            label=label if row is rows[0] else None,
        )
    return drawn


def draw_values(folder: Path, plan: SweepPlan, found: Found) -> None:
    """Draw a panel for each varied value: every complete trial of the algorithm, and the best at each value."""
    outcomes = _scored(found.tuned)
    accuracies = are_accuracies(outcomes)
    names = [name for name in plan.search.lists if len({one.point.get(name) for one in outcomes}) > 1]
    if not names:
        return
    rows = (len(names) + 2) // 3
    figure = Figure(figsize=(4 * min(3, len(names)), 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, min(3, len(names)), squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_value(axes, name, [one for one in outcomes if name in one.point], accuracies)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    figure.suptitle(f"{plan.name}: trials of the search, and the best at each value", fontsize=10)
    _save(figure, folder / VALUES)


def _draw_value(axes: Axes, name: str, outcomes: Sequence[Outcome], accuracies: bool) -> None:
    found = {one.point[name] for one in outcomes}
    numbers = sorted(value for value in found if not isinstance(value, str))
    words = sorted(value for value in found if isinstance(value, str))
    ordered = [*numbers, *words]
    by_number = name in ("lr", "beta", "mu", "alpha", "server_lr", "clip_norm", "weight_decay") and not words
    places = {value: float(value) if by_number else place for place, value in enumerate(ordered)}
    heights = [_height(one.score or 0.0, accuracies) for one in outcomes]
    axes.plot([places[one.point[name]] for one in outcomes], heights, "o", color=COLOURS[0], alpha=0.35, markersize=4)
    better = max if accuracies else min
    best = [better(y for one, y in zip(outcomes, heights, strict=True) if one.point[name] == v) for v in ordered]
    axes.plot([places[value] for value in ordered], best, color=COLOURS[1], linewidth=1.2)
    if by_number and len(numbers) <= 12:
        _scale(axes, [float(value) for value in numbers])
    elif by_number:
        axes.set_xscale("log" if min(numbers) > 0 else "linear")
    else:
        axes.set_xticks(range(len(ordered)), [shown(value) for value in ordered])
    axes.set_xlabel({"beta": "β", "batch": "batch size", "weight_decay": "weight decay"}.get(name, name))
    _tidy(axes, "validation accuracy, %" if accuracies else "validation loss")
