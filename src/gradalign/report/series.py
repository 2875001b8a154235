"""The curves as numbers: what the page draws and what the pictures draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gradalign.report.experiments import Experiment, Group
from gradalign.report.statistics import MOST_UNSORTED, ranked
from gradalign.runs.read import Run

MOST_POINTS, MOST_SEED_POINTS = 400, 200
MOST_SHOWN = 8  # lines in one figure that can still be followed; with many groups, the best are shown


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured: its column, its label, a short one for an axis, and how it is drawn."""

    key: str
    label: str
    short: str = ""
    percent: bool = False
    logarithmic: bool = False
    stepped: bool = False


CHOICES = (
    Quantity(key="test_accuracy", label="test accuracy", percent=True),
    Quantity(key="test_loss", label="test loss", logarithmic=True),
    Quantity(key="validation_accuracy", label="validation accuracy", percent=True),
    Quantity(key="validation_loss", label="validation loss", logarithmic=True),
    Quantity(key="train_accuracy", label="training accuracy", percent=True),
)
DRIFT = Quantity(key="drift", label="drift ‖ḡ − g₁‖ of the first client", short="drift", logarithmic=True)
VARIANCE = Quantity(key="r", label="r(x), half the variance of the gradients", short="r(x)", logarithmic=True)
BETA = Quantity(key="beta", label="β in force", stepped=True)
SMALL = (DRIFT, VARIANCE, BETA)
QUANTITIES = (*CHOICES, *SMALL)
IN_COMPARISONS = {
    quantity.key: quantity
    for quantity in (
        *QUANTITIES,
        Quantity(key="train_loss", label="training loss", logarithmic=True),
        Quantity(key="cosine", label="cosine of the clients' gradients with their mean", short="cosine"),
    )
}
"""What a recipe's ``compare.curves`` may name."""
AXES = {
    "communication_rounds": "communication rounds",
    "local_updates": "local updates, all clients together",
    "examples": "computation, examples whose gradient was taken",
    "bytes": "bytes sent, up and down",
    "seconds": "seconds",
}
SHORT_AXES = {axis: name.split(",")[0] for axis, name in AXES.items()}
"""Their names without what explains them."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One seed's curve."""

    seed: int
    state: str
    x: dict[str, list[float | None]]
    y: list[float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One group's curve: the mean over its finished seeds, lowest and highest, and every seed's own.

    ``x`` has the mean of every axis, None where a row lacks it.
    """

    rounds: list[int] = field(default_factory=list)
    x: dict[str, list[float | None]] = field(default_factory=dict)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def late(self) -> tuple[float, float] | None:
        """The lowest and the highest after the first quarter of the rounds: where accuracies begin to differ little."""
        since = [place for place, number in enumerate(self.rounds) if 4 * number >= self.rounds[-1]]
        return (min(self.low[i] for i in since), max(self.high[i] for i in since)) if since else None

    @property
    def changes(self) -> bool:
        """Whether its value changes over a run; in the first round, an algorithm that remembers has nothing yet."""
        means = {value for number, value in zip(self.rounds, self.mean, strict=True) if number > 1}
        return len(means) > 1 or any(len(set(line.y[1:])) > 1 for line in self.lines)


def mean_curve(runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> Curve:
    """Return the mean over the seeds, at the rounds where all of them were measured; ``runs`` has each seed's rows."""
    columns: dict[int, list[Mapping[str, Any]]] = {}
    for rows in runs:
        for row in rows:
            if row.get(key) is not None:
                columns.setdefault(row["round"], []).append(row)
    full = [(number, rows) for number, rows in sorted(columns.items()) if len(rows) == len(runs)]

    def each(reckon: Callable[[list[float]], float], name: str) -> list[Any]:
        values = [[row.get(name) for row in rows] for _, rows in full]
        return [None if None in own else reckon(own) for own in values]  # type: ignore[arg-type]

    return Curve(
        rounds=[int(number) for number, _ in full],
        x={axis: each(fmean, axis) for axis in AXES},
        mean=each(fmean, key),
        low=each(min, key),
        high=each(max, key),
    )


def curve_of(group: Group, quantity: Quantity) -> Curve:
    """Return the curve of one quantity; empty where it was not measured."""
    complete = [run.rows for run in group.complete]
    whole = mean_curve(complete, quantity.key)
    if quantity.stepped and not any(whole.high):
        whole = Curve()
    shown = thinned(whole.mean, MOST_POINTS, flat=quantity.stepped)
    # One finished seed is its own mean and needs no second line.
    alone = [run for run in group.runs if run.state != "complete" or len(complete) > 1]
    return Curve(
        rounds=[whole.rounds[i] for i in shown],
        x={axis: _short(xs, shown) for axis, xs in whole.x.items()},
        mean=_short(whole.mean, shown),
        low=_short(whole.low, shown),
        high=_short(whole.high, shown),
        lines=[line for run in alone if (line := _line(run, quantity)) is not None],
    )


def curves_of(experiment: Experiment, quantity: Quantity) -> list[Curve]:
    """Return every group's curve; empty ones of a setting that stays what it is, which needs no picture."""
    curves = [curve_of(group, quantity) for group in experiment.groups]
    constant = quantity.stepped and not any(curve.changes for curve in curves)
    return [Curve() for _ in curves] if constant else curves


def closer_range(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """Return a range for accuracies that shows how they differ: of all curves, what lies after their first climb."""
    ends = [late for curve in curves if (late := curve.late) is not None]
    if not ends:
        return None
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    beyond = max(0.05 * (high - low), 0.002)
    return low - beyond, high + beyond


def best_groups(experiment: Experiment) -> list[int]:
    """Return the places of the groups that ended highest, as many as one figure can show."""
    return [experiment.groups.index(group) for group in ranked(experiment)[:MOST_SHOWN]]


def shown_groups(experiment: Experiment) -> list[int]:
    """Return the places of the groups that are drawn at first: all, or of many the best."""
    count = len(experiment.groups)
    return list(range(count)) if count <= MOST_UNSORTED else sorted(best_groups(experiment))


def measured(curves: Sequence[Curve]) -> bool:
    """Return whether there is anything to draw."""
    return any(curve.mean or curve.lines for curve in curves)


def _line(run: Run, quantity: Quantity) -> Line | None:
    rows = [row for row in run.rows if quantity.key in row]
    values = [row[quantity.key] for row in rows]
    if not values or (quantity.stepped and not any(values)):
        return None
    shown = thinned(values, MOST_SEED_POINTS, flat=quantity.stepped)
    x = {axis: _short([row.get(axis) for row in rows], shown) for axis in AXES}
    return Line(seed=run.seed, state=run.state, x=x, y=_short(values, shown))


def thinned(values: Sequence[float], most: int, *, flat: bool = False) -> list[int]:
    """Return which points to draw: all when there are few, else the lowest and highest of equal stretches and the ends.

    So no peak and no dip is lost. With ``flat``, points between two equal ones go first: a step needs only its corners.
    """
    indices = list(range(len(values)))
    if flat:
        last = len(values) - 1
        indices = [i for i in indices if i in (0, last) or not values[i - 1] == values[i] == values[i + 1]]
    if len(indices) <= most:
        return indices
    stretches = most // 2 - 1
    shown = {indices[0], indices[-1]}
    for number in range(stretches):
        part = indices[number * len(indices) // stretches : (number + 1) * len(indices) // stretches]
        shown |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(shown)


def _short(values: Sequence[float | None], shown: Sequence[int]) -> list[Any]:
    """Return these of the values with six digits: a drawing has no more, and the page is half as large."""
    return [_rounded(values[i]) for i in shown]


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
