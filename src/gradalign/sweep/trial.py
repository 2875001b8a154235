"""One trial: a run of its own, with its run folder, that may be ended early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import optuna

from gradalign.api import RunOptions, run_spec
from gradalign.errors import DivergedError
from gradalign.recipes.build import task_of
from gradalign.recipes.recipe import Recipe
from gradalign.recipes.scale import apply_scale
from gradalign.recipes.spec import Spec, merge, validate
from gradalign.runs import METRICS, safe_name
from gradalign.runs.folder import read_metrics
from gradalign.server.measure import Row
from gradalign.sweep.grid import Point, apply_point, shown
from gradalign.sweep.protocol import State
from gradalign.tasks.task import Task

Scored = Literal["validation", "test"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    state: State
    score: float | None
    facts: Mapping[str, Any]


_SCORES = 20  # validation scores in a trial: often enough that one lies near the round where trials may end early


def score_of(row: Mapping[str, Any], scored: Scored) -> float | None:
    """Return what is maximised: the accuracy, or minus the loss of a task that has no accuracy."""
    accuracy, loss = row.get(f"{scored}_accuracy"), row.get(f"{scored}_loss")
    if accuracy is not None:
        return float(accuracy)
    return None if loss is None else -float(loss)


def trial_spec(recipe: Recipe, entry: str, point: Point, seed: int, holdout: float | None) -> Spec:
    """Return the experiment of one trial.

    A trial of the search holds validation examples out and measures nothing but them, about twenty times. Without
    ``holdout`` it is the recipe's own experiment on all training data, scored on the test set.
    """
    data = apply_point(recipe.tables_for(entry), point)
    if holdout is not None:
        searching = {"clients": {"holdout": holdout}, "measure": {"train_every": 0}}
        data = merge(data, searching)
    source = f"{recipe.source} ({entry})"
    data = apply_scale(data, source) | {"seed": seed}
    if holdout is not None:
        rounds = validate(data, source).rounds
        data = merge(data, {"measure": {"test_every": max(1, rounds // _SCORES)}})
    return validate(data, source)


def folder_name(slot: int, point: Point) -> str:
    """Return a readable name for a trial's run folder."""
    words = "_".join(f"{name}{shown(value)}" for name, value in point.items())
    return safe_name(f"{slot:03d}_{words}")


class TrialRunner:
    """Runs trials in this process; tasks are made once for each seed."""

    def __init__(self, where: RunOptions, stop_after: float) -> None:
        self._where, self._stop_after = where, stop_after
        self._tasks: dict[str, Task] = {}

    def task(self, spec: Spec) -> Task:
        """Return a trial's task."""
        key = repr((spec.seed, spec.task, spec.clients.holdout))
        if key not in self._tasks:
            self._tasks[key] = task_of(spec)
        return self._tasks[key]

    def run(
        self,
        spec: Spec,
        folder: Path,
        trial: optuna.Trial | None = None,
        on_row: Callable[[Row], None] | None = None,
    ) -> Ended:
        """Run a spec, or what its folder leaves to do; with a trial given, it may be ended early."""
        scored: Scored = "test" if spec.clients.holdout is None else "validation"
        threshold = self._stop_after * spec.rounds
        checked = trial is None

        def note(row: Row) -> None:
            nonlocal checked
            if on_row is not None:
                on_row(row)
            if not checked and row["round"] >= threshold:
                # From the file, because a resumed run's check may lie before the round that it goes on with.
                checked = _report(trial, read_metrics(folder), threshold, spec.rounds, scored)
                if checked and trial is not None and trial.should_prune():
                    raise optuna.TrialPruned

        state: State = "complete"
        try:
            name = f"{folder.parent.name}-{folder.name}"  # of the stage and the trial, for trackers
            where = replace(self._where, out=folder, resume=True, progress=False, name=name)
            run_spec(spec, where, task=self.task(spec), on_row=note)
        except DivergedError:
            state = "diverged"
        except optuna.TrialPruned:
            state = "pruned"
        rows = read_metrics(folder) if (folder / METRICS).exists() else []
        if not checked:  # the run was complete already, in a process that died before it could say so
            _report(trial, rows, threshold, spec.rounds, scored)
        score = score_of(rows[-1], scored) if state == "complete" else None
        return Ended(state=state, score=score, facts=_facts(rows, scored, spec))


def _report(trial: optuna.Trial | None, rows: list[Row], threshold: float, rounds: int, scored: Scored) -> bool:
    """Report the first score at or after the threshold and before the end; return whether there is one."""
    for row in rows:
        score = score_of(row, scored)
        if trial is not None and threshold <= row["round"] < rounds and score is not None:
            trial.report(score, row["round"])
            return True
    return False


def _facts(rows: list[Row], scored: Scored, spec: Spec) -> dict[str, Any]:
    measured = [row for row in rows if score_of(row, scored) is not None]
    last = measured[-1] if measured else {}
    return {
        f"{scored}_accuracy": last.get(f"{scored}_accuracy"),
        f"{scored}_loss": last.get(f"{scored}_loss"),
        "rounds_done": rows[-1]["round"] if rows else 0,
        "rounds": spec.rounds,
        "seconds": rows[-1]["seconds"] if rows else 0.0,
    }
