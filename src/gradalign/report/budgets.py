"""What is reached for the same: at equal communication first, equal local updates second, equal computation third."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradalign.recipes import found
from gradalign.report.experiments import Experiment, Group
from gradalign.report.statistics import TableRow, in_order, in_percent, mean_and_std, pairs_of, told_apart
from gradalign.runs.read import Row
from gradalign.runs.untrusted import number_of

VIEWS = {"communication_rounds": "communication", "local_updates": "local updates", "examples": "computation"}
_UNITS = {"communication_rounds": "communication rounds", "local_updates": "local updates", "examples": "examples"}
_TO_TARGET = {"communication_rounds": "communication rounds", "local_updates": "local updates", "bytes": "MB sent"}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that every finished run of an experiment has spent in one coin."""

    axis: str
    most: float

    @property
    def words(self) -> str:
        return f"{self.most:,.0f} {_UNITS[self.axis]}"

    def scores(self, group: Group) -> list[float]:
        """Return what every finished run had within the budget."""
        found = (group.score_within(run, self.axis, self.most) for run in group.complete)
        return [score for score in found if score is not None]


def budgets_of(experiment: Experiment) -> list[Budget]:
    """Return the budgets that all groups with results can be compared at, in the order of ``VIEWS``."""
    complete = [run for group in experiment.groups if group.scores() for run in group.complete if run.rows]
    budgets = []
    for axis in VIEWS:
        spent = [run.rows[-1].get(axis) for run in complete]
        known = [value for value in spent if value is not None]
        if known and len(known) == len(spent) and min(known) > 0:
            budgets.append(Budget(axis=axis, most=min(known)))
    return budgets


def equal_views(experiment: Experiment) -> dict[str, Any] | None:
    """Compare the groups at equal budgets; None where no accuracy or no cost is known.

    The template gets a table, what the seeds tell, and the pairs, each with a cell for every view.
    """
    budgets = budgets_of(experiment)
    if not budgets:
        return None
    judged = budgets[:2]
    # The same pairs in every view, in one order; one that is known in none is left out.
    views = zip(*(pairs_of(experiment, one.scores) for one in judged), strict=True)
    pairs = [every for every in views if any(pair.ours for pair in every)]
    answers = [
        f"At {one.words} each, {told_apart(own)}" for one, own in zip(judged, zip(*pairs, strict=True), strict=False)
    ]
    return {
        "caption": f"{experiment.scored_on} accuracy, %, {_measured(experiment)}",
        "heads": [f"at {one.words}" for one in budgets],
        "rows": _rows(experiment, lambda group: [in_percent(one.scores(group)) for one in budgets]),
        "answer": " ".join(answers),
        "pair_heads": [head for one in judged for head in (f"at equal {VIEWS[one.axis]}", "told apart")],
        "pairs": [(every[0].names, [cell for pair in every for cell in (pair.cells[0], pair.word)]) for every in pairs],
    }


def _measured(experiment: Experiment) -> str:
    window = experiment.groups[0].window
    if not window:
        return "as last measured within the budget: what every run has spent"
    return f"mean over the last {100 * window:.0f} % of the budget: what every run has spent; –: not measured there"


def _rows(experiment: Experiment, cells: Callable[[Group], list[str]]) -> list[TableRow]:
    groups = [group for group in in_order(experiment) if group.complete]
    numbers = [experiment.groups.index(group) for group in groups]
    return [
        TableRow(number=number, label=group.label, seeds=str(len(group.complete)), cells=tuple(cells(group)))
        for number, group in zip(numbers, groups, strict=True)
    ]


def target_of(experiment: Experiment) -> float | None:
    """Return the accuracy to be reached: the recipe's, or 95 % of the lowest of the groups' best: all come that far."""
    given = (number_of(found(run.spec, "measure", "target_accuracy")) for run in experiment.runs)
    bests = [group.finals(f"best_{group.scored_on}_accuracy") for group in experiment.groups]
    means = [fmean(values) for values in bests if values]
    return next((target for target in given if target is not None), round(0.95 * min(means), 3) if means else None)


def to_target(experiment: Experiment) -> dict[str, Any] | None:
    """Return the target, and a table of what every group had spent when it first got there; None without accuracies."""
    target = target_of(experiment)
    if target is None or not any(group.scores() for group in experiment.groups):
        return None

    def cells(group: Group) -> list[str]:
        firsts = [_first(run.rows, f"{group.scored_on}_accuracy", target) for run in group.complete]
        return [_spent([row for row in firsts if row], axis, len(firsts)) for axis in _TO_TARGET]

    return {"accuracy": target, "heads": list(_TO_TARGET.values()), "rows": _rows(experiment, cells)}


def _first(rows: Sequence[Row], key: str, target: float) -> Mapping[str, Any] | None:
    return next((row for row in rows if row.get(key, -1.0) >= target), None)


def _spent(rows: Sequence[Mapping[str, Any]], axis: str, seeds: int) -> str:
    values = [row[axis] / (1e6 if axis == "bytes" else 1) for row in rows if axis in row]
    if not values:
        return "not reached" if not rows else "–"
    text = mean_and_std(values, ".3g" if axis == "bytes" else ",.0f")
    return text + (f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else "")
