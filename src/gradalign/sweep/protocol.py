"""The paper's order of tuning, as pure logic: which trials belong to a stage, and what one stage tells the next.

For an algorithm with β: the other values are tuned on the algorithm without alignment (FedAvg for FedGA, large-batch
SGD for GradAlign) and transferred; β is searched on a coarse list, then on a fine one around the best; then the other
values are tuned again with β fixed. An algorithm without β has one stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradalign.errors import GradalignError
from gradalign.recipes.build import algorithm_names
from gradalign.sweep.grid import FINE, Lists, Point, Value, combinations, fine_values, ordered

State = Literal["complete", "pruned", "diverged", "running"]
_WITHOUT_ALIGNMENT = {"fedga": "fedavg", "gradalign": "largebatchsgd"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A set of trials that are chosen together.

    Attributes:
        name: What it is called in tables and folders.
        entry: The algorithm, or the entry of the recipe's comparisons, that is tuned.
        lists: The values that vary.
        fixed: The values that do not.
        trials: How many trials the TPE sampler makes; None tries every combination.
    """

    name: str
    entry: str
    lists: Mapping[str, Sequence[Value]]
    fixed: Point = field(default_factory=dict)
    trials: int | None = None

    def points(self) -> list[Point]:
        """Return every combination of the stage's values."""
        return [ordered(self.fixed | point) for point in combinations(self.lists)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one trial.

    Attributes:
        stage: The stage's name.
        slot: Its place in the stage, which decides between equal scores.
        entry: The algorithm.
        seed: The seed it ran with.
        point: The values it ran with.
        state: How it ended.
        score: What is maximised, known when it is complete: validation accuracy, or minus the loss where there is none.
        check: The round at which early termination is decided, and the score there.
        facts: What else is worth a column: accuracies, rounds done, seconds, folder.
    """

    stage: str
    slot: int
    entry: str
    seed: int
    point: Point
    state: State
    score: float | None = None
    check: tuple[int, float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


Evaluate = Callable[[Stage, Sequence[Outcome]], list[Outcome]]
"""Carries out a stage, given the earlier outcomes of the same algorithm, which are not tried again."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched: the algorithm, the one it takes values from, and all lists."""

    entry: str
    baseline: str | None
    lists: Lists
    trials: int | None = None

    @property
    def others(self) -> Lists:
        """The lists of everything but β."""
        return {name: values for name, values in self.lists.items() if name not in ("beta", FINE)}

    def sizes(self) -> list[tuple[str, str, int]]:
        """Return (stage, algorithm, trials) as far as they are known before the first trial."""
        others = self.trials or len(combinations(self.others))
        if self.baseline is None:
            return [("grid", self.entry, others)]
        fine = len(self.lists[FINE]) if FINE in self.lists else 4
        return [
            ("baseline", self.baseline, others),
            ("beta-coarse", self.entry, len(self.lists["beta"])),
            ("beta-fine", self.entry, fine),
            ("others", self.entry, others - (0 if self.trials else 1)),
        ]


def baseline_of(algorithm: str) -> str | None:
    """Return the algorithm without its alignment, None when it has none."""
    names = algorithm_names(algorithm)
    if not any(name in _WITHOUT_ALIGNMENT for name in names):
        return None
    plain = [_WITHOUT_ALIGNMENT.get(name, name) for name in names]
    return "+".join([name for name in plain if name != "fedavg"] or ["fedavg"])


def are_accuracies(outcomes: Sequence[Outcome]) -> bool:
    """Return whether the scores of a search are accuracies, or else minus losses."""
    return any(one.facts.get("validation_accuracy") is not None for one in outcomes)


def rank(outcome: Outcome) -> tuple[float, float]:
    """Return what outcomes are ordered by: the score, and where accuracies are equal the lower loss."""
    loss = outcome.facts.get("validation_loss")
    score = -math.inf if outcome.score is None else outcome.score
    return score, -math.inf if loss is None else -float(loss)


def best_of(outcomes: Sequence[Outcome], what: str) -> Outcome:
    """Return the best outcome; of equal ones the first tried."""
    complete = [outcome for outcome in outcomes if outcome.score is not None]
    if not complete:
        raise GradalignError(f"no trial of {what} came to an end with a score; try lower lr or beta")
    return max(complete, key=rank)  # max keeps the first of equals


def tune(search: Search, evaluate: Evaluate) -> tuple[list[Outcome], list[Outcome]]:
    """Go through the stages; return the outcomes of the algorithm, and those of the one it takes values from."""
    if search.baseline is None:
        return evaluate(Stage(name="grid", entry=search.entry, lists=search.others, trials=search.trials), []), []
    before = evaluate(Stage(name="baseline", entry=search.baseline, lists=search.others, trials=search.trials), [])
    transferred = best_of(before, f"the baseline {search.baseline}").point
    coarse = [float(value) for value in search.lists["beta"]]
    found = evaluate(Stage(name="beta-coarse", entry=search.entry, lists={"beta": coarse}, fixed=transferred), [])
    best = float(best_of(found, "the coarse search for beta").point["beta"])
    fine = search.lists.get(FINE) or fine_values(best, coarse)
    fine = [value for value in fine if value not in coarse]
    if fine:
        stage = Stage(name="beta-fine", entry=search.entry, lists={"beta": fine}, fixed=transferred)
        found = found + evaluate(stage, found)
    beta = best_of(found, "the search for beta").point["beta"]
    rest = Stage(name="others", entry=search.entry, lists=search.others, fixed={"beta": beta}, trials=search.trials)
    return found + evaluate(rest, found), before


def finalists_of(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Return the best trials, best first."""
    best_of(outcomes, "the sweep")
    complete = [outcome for outcome in outcomes if outcome.score is not None]
    return sorted(complete, key=rank, reverse=True)[:count]  # stable, also in reverse: the first of equals first
