"""The paper's order of tuning, without any training: which trials belong to a stage, what one stage tells the next.

For an algorithm with β: the other values are tuned on the algorithm without alignment (FedAvg for FedGA, large-batch
SGD for GradAlign) and transferred; β is searched on a coarse list, then on a fine one around the best; then, where that
is asked for, how it changes over the run, which is not the paper's; then the other values are tuned again with β fixed.
An algorithm without β has one stage; with one that sets itself the other values are tuned with and without alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from gradalign.errors import GradalignError
from gradalign.recipes.names import algorithm_names
from gradalign.sweep.grid import FINE, SCHEDULE, Lists, Point, Value, combinations, fine_values, ordered

State = Literal["complete", "pruned", "diverged", "running"]
# The stages after the search.
FINAL = FINALISTS, TEST, TEST_BASELINE, TEST_BETA = "finalists", "test", "test-baseline", "test-beta"
BEGUN = "begun"  # the score from which trials have learned something
_WITHOUT_ALIGNMENT = {"fedga": "fedavg", "gradalign": "largebatchsgd"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A set of trials that are chosen together; ``entry`` is the algorithm, or the entry of the recipe's comparisons.

    ``trials`` is how many the TPE sampler makes; None tries every combination. ``rounds`` replaces the recipe's.
    """

    name: str
    entry: str
    lists: Mapping[str, Sequence[Value]]
    fixed: Point = field(default_factory=dict)
    trials: int | None = None
    rounds: int | None = None

    def points(self) -> list[Point]:
        return [ordered(self.fixed | point) for point in combinations(self.lists)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one trial.

    Attributes:
        slot: Its place in the stage, which decides between equal scores.
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """All outcomes of a sweep.

    Attributes:
        tuned: The search's trials of the algorithm.
        baseline: The search's trials of the algorithm without alignment.
        finalists: The best of ``tuned``, best first.
        validated: The finalists with the further seeds, on held-out training data.
        tested: The finalists with all seeds, trained on all training data and scored on the test set.
        tested_baseline: The best of ``baseline`` likewise, with as much communication.
        tested_betas: Every β of the search likewise, with one seed, when it was asked for.
    """

    tuned: list[Outcome]
    baseline: list[Outcome]
    finalists: list[Outcome]
    validated: list[Outcome]
    tested: list[Outcome]
    tested_baseline: list[Outcome]
    tested_betas: list[Outcome]

    def all(self) -> list[Outcome]:
        tested = [*self.tested, *self.tested_baseline, *self.tested_betas]
        return [*self.baseline, *self.tuned, *self.validated, *tested]


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
        apart = (FINE,) if self.baseline is None else ("beta", FINE, SCHEDULE)
        return {name: values for name, values in self.lists.items() if name not in apart}

    def sizes(self) -> list[tuple[str, str, int]]:
        """Return (stage, algorithm, trials) as far as they are known before the first trial."""
        others = self.trials or len(combinations(self.others))
        if self.baseline is None:
            return [("grid", self.entry, others)]
        beta, fine, schedules = (len(self.lists.get(name, [])) for name in ("beta", FINE, SCHEDULE))
        searched = {"beta-coarse": beta, "beta-fine": fine or 4, "beta-schedule": schedules - 1} if beta else {}
        stages = [(name, self.entry, trials) for name, trials in searched.items() if trials > 0]
        known = 1 if beta and not self.trials else 0
        return [("baseline", self.baseline, others), *stages, ("others", self.entry, others - known)]


def baseline_of(algorithm: str) -> str | None:
    """Return the algorithm without its alignment, None when it has none."""
    names = algorithm_names(algorithm)
    if not any(name in _WITHOUT_ALIGNMENT for name in names):
        return None
    plain = [_WITHOUT_ALIGNMENT.get(name, name) for name in names]
    return "+".join([name for name in plain if name != "fedavg"] or ["fedavg"])


def count_states(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many trials ended in each way."""
    return {state: sum(one.state == state for one in outcomes) for state in ("complete", "pruned", "diverged")}


@dataclass(frozen=True)
class Scoring:
    """What a search goes by, and how its scores, of which the largest is the best, are shown."""

    name: str
    larger: bool

    @property
    def factor(self) -> float:
        """What a score is multiplied with to be shown: accuracies in percent, losses as they are."""
        return (100.0 if self.name == "accuracy" else 1.0) * (1.0 if self.larger else -1.0)

    @property
    def words(self) -> str:
        return "accuracy, %" if self.name == "accuracy" else self.name

    def shown(self, score: float | None) -> float:
        return self.factor * (score or 0.0)


def scoring_of(outcomes: Sequence[Outcome]) -> Scoring:
    """Return what these outcomes were scored by: a monitored metric, else accuracy where there is one, else loss."""
    for one in outcomes:
        if "scored_by" in one.facts:
            return Scoring(*one.facts["scored_by"])
    accuracies = any(one.facts.get("validation_accuracy") is not None for one in outcomes)
    return Scoring("accuracy", True) if accuracies else Scoring("loss", False)


def rank(outcome: Outcome) -> tuple[float, float]:
    """Return what outcomes are ordered by: the score, and where accuracies are equal the lower loss."""
    loss = outcome.facts.get("validation_loss")
    score = -math.inf if outcome.score is None else outcome.score
    return score, -math.inf if loss is None else -float(loss)


def finalists_of(outcomes: Sequence[Outcome], count: int, what: str = "the sweep") -> list[Outcome]:
    """Return the best trials, best first; of equal ones the first tried."""
    complete = [outcome for outcome in outcomes if outcome.score is not None]
    if not complete:
        raise GradalignError(f"no trial of {what} came to an end with a score; try lower lr or beta")
    return sorted(complete, key=rank, reverse=True)[:count]  # stable, also in reverse


def best_of(outcomes: Sequence[Outcome], what: str) -> Outcome:
    """Return the best outcome; of equal ones the first tried."""
    return finalists_of(outcomes, 1, what)[0]


def at_ends(outcomes: Sequence[Outcome], chosen: Point) -> list[str]:
    """Say which of the chosen numbers are the smallest or the largest tried: a better one may lie beyond.

    A gain over a baseline whose lr is the end of its list may be one that a larger lr has as well.
    """
    words = []
    for name, value in chosen.items():
        tried = {number for one in outcomes if isinstance(number := one.point.get(name), int | float)}
        if len(tried) < 2:
            continue
        least = 1 if all(isinstance(number, int) for number in tried) else 0  # of steps, and of all else
        ends = {max(tried): "largest"} | ({min(tried): "smallest"} if min(tried) > least else {})
        if isinstance(value, int | float) and value in ends:
            words.append(f"{name} {value:g} is the {ends[value]} tried")
    return words


def tune(search: Search, evaluate: Evaluate) -> tuple[list[Outcome], list[Outcome]]:
    """Go through the stages; return the outcomes of the algorithm, and those of the one it takes values from."""
    if search.baseline is None:
        return evaluate(Stage(name="grid", entry=search.entry, lists=search.others, trials=search.trials), []), []
    before = evaluate(Stage(name="baseline", entry=search.baseline, lists=search.others, trials=search.trials), [])
    if "beta" not in search.lists:  # it sets itself
        return evaluate(Stage(name="others", entry=search.entry, lists=search.others, trials=search.trials), []), before
    transferred = best_of(before, f"the baseline {search.baseline}").point
    schedules = search.lists.get(SCHEDULE, [])
    transferred = transferred | ({SCHEDULE: schedules[0]} if schedules else {})
    coarse = [float(value) for value in search.lists["beta"]]
    found = evaluate(Stage(name="beta-coarse", entry=search.entry, lists={"beta": coarse}, fixed=transferred), [])
    best = float(best_of(found, "the coarse search for beta").point["beta"])
    fine = [value for value in search.lists.get(FINE) or fine_values(best, coarse) if value not in coarse]
    if fine:
        stage = Stage(name="beta-fine", entry=search.entry, lists={"beta": fine}, fixed=transferred)
        found = found + evaluate(stage, found)
    beta = {"beta": best_of(found, "the search for beta").point["beta"]}
    if schedules[1:]:
        stage = Stage(
            name="beta-schedule", entry=search.entry, lists={SCHEDULE: schedules[1:]}, fixed=transferred | beta
        )
        found = found + evaluate(stage, found)
    if schedules:
        beta |= {SCHEDULE: best_of(found, "the search for beta's schedule").point[SCHEDULE]}
    rest = Stage(name="others", entry=search.entry, lists=search.others, fixed=beta, trials=search.trials)
    return found + evaluate(rest, found), before


def equal_rounds(tuned: Sequence[Outcome], baseline: Outcome) -> int | None:
    """Return the rounds in which the baseline spends as much communication as these runs; None where it is not known.

    A round with a gradient phase costs two communications, one without it costs one.
    """
    budget = max((one.facts.get("communication_rounds") or 0 for one in tuned), default=0)
    spent, rounds = (baseline.facts.get(name) or 0 for name in ("communication_rounds", "rounds_done"))
    return max(1, budget * rounds // spent) if budget and spent else None


def clearly_below(score: float, others: Iterable[float], margin: float, begun: float = -math.inf) -> bool:
    """Return whether a score is below the best of the others by more than ``margin`` of that best.

    With a margin of 0.2 and a best accuracy of 80 %, below 64 %. Where scores are minus a loss: a loss 20 % larger.
    Nobody is while the best is below ``begun``: near chance the first rounds say nothing about the last.
    """
    best = max(others, default=score)
    return best >= begun and score < best - margin * abs(best)


class BelowBestPruner(BasePruner):
    """Ends a trial whose last report is clearly below the best report of any trial at the same round.

    ``earlier`` has reports of the same algorithm in earlier stages, as (round, score).
    """

    def __init__(self, margin: float, earlier: Iterable[tuple[int, float]] = ()) -> None:
        self.margin, self.earlier = margin, list(earlier)

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        if (step := trial.last_step) is None:
            return False
        others = [score for round_index, score in self.earlier if round_index == step]
        known = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        others += [other.intermediate_values[step] for other in known if step in other.intermediate_values]
        own, begun = trial.intermediate_values[step], trial.user_attrs.get(BEGUN, -math.inf)
        return clearly_below(own, others, self.margin, begun)
