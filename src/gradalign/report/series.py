"""The curves as numbers: what the page draws and what the pictures for a paper draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradalign.report.curves import LABELS, over_seeds
from gradalign.report.experiments import Experiment, Group
from gradalign.report.table import MOST_UNSORTED, ranked
from gradalign.runs.read import Run

MOST_POINTS, MOST_SEED_POINTS = 400, 200
MOST_SHOWN = 8  # lines in one figure that can still be followed; with many groups, the best are shown


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured: its column, its label, and how it is drawn."""

    key: str
    label: str
    percent: bool = False
    logarithmic: bool = False
    stepped: bool = False


CHOICES = (
    Quantity(key="test_accuracy", label=LABELS["test_accuracy"], percent=True),
    Quantity(key="test_loss", label=LABELS["test_loss"], logarithmic=True),
    Quantity(key="validation_accuracy", label=LABELS["validation_accuracy"], percent=True),
    Quantity(key="validation_loss", label=LABELS["validation_loss"], logarithmic=True),
    Quantity(key="train_accuracy", label=LABELS["train_accuracy"], percent=True),
)
DRIFT = Quantity(key="drift", label="drift ‖ḡ − g₁‖ of the first client", logarithmic=True)
VARIANCE = Quantity(key="r", label=LABELS["r"], logarithmic=True)
BETA = Quantity(key="beta", label="β in force", stepped=True)
QUANTITIES = (*CHOICES, DRIFT, VARIANCE, BETA)
AXES = {
    "communication_rounds": "communication rounds",
    "local_updates": "local updates, all clients together",
    "bytes": "bytes sent, up and down",
    "seconds": "seconds",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One seed's curve."""

    seed: int
    state: str
    x: dict[str, list[float | None]]
    y: list[float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One group's curve: the mean over its finished seeds, lowest and highest, and every seed's own."""

    rounds: list[int]
    x: dict[str, list[float | None]]
    mean: list[float]
    low: list[float]
    high: list[float]
    lines: list[Line]


def curve_of(group: Group, quantity: Quantity) -> Curve:
    """Return the curve of one quantity; empty where it was not measured."""
    complete = [run.rows for run in group.complete]
    rounds, xs, mean, low, high = over_seeds(complete, list(AXES), quantity.key) if complete else ([], {}, [], [], [])
    if quantity.stepped and not any(high):
        rounds, xs, mean, low, high = [], {}, [], [], []
    keep = _kept(mean, quantity, MOST_POINTS)
    # One finished seed is its own mean and needs no second line.
    alone = [run for run in group.runs if run.state != "complete" or len(complete) > 1]
    return Curve(
        rounds=[rounds[i] for i in keep],
        x={axis: _short([xs[axis][i] for i in keep]) for axis in xs},
        mean=_short([mean[i] for i in keep]),
        low=_short([low[i] for i in keep]),
        high=_short([high[i] for i in keep]),
        lines=[line for run in alone if (line := _line(run, quantity)) is not None],
    )


Series = dict[str, list[Curve]]
"""Every quantity's curves, one for each group."""


def series_of(experiment: Experiment) -> Series:
    """Return all curves of an experiment."""
    return {quantity.key: curves_of(experiment, quantity) for quantity in QUANTITIES}


def curves_of(experiment: Experiment, quantity: Quantity) -> list[Curve]:
    """Return one curve for each group."""
    return [curve_of(group, quantity) for group in experiment.groups]


def best_groups(experiment: Experiment) -> list[int]:
    """Return the places of the groups that ended highest, as many as one figure can show."""
    places = {id(group): place for place, group in enumerate(experiment.groups)}
    return [places[id(group)] for group in ranked(experiment)[:MOST_SHOWN]]


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
    keep = _kept(values, quantity, MOST_SEED_POINTS)
    x = {axis: _short([rows[i].get(axis) for i in keep]) for axis in AXES}
    return Line(seed=run.seed, state=run.state, x=x, y=_short([values[i] for i in keep]))


def _kept(values: Sequence[float], quantity: Quantity, most: int) -> list[int]:
    return thinned([float(v) for v in values], most, flat=quantity.stepped)


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
    kept = {indices[0], indices[-1]}
    for number in range(stretches):
        part = indices[number * len(indices) // stretches : (number + 1) * len(indices) // stretches]
        kept |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept)


def _short(values: Sequence[Any]) -> list[Any]:
    """Round to six digits: a drawing has no more, and the page is half as large."""
    return [_rounded(value) for value in values]


def _rounded(value: float | None) -> float | int | None:
    if value is None:
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")
