"""A sweep decided and checked before its first trial; and one trial, which is a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from gradalign.api import run_spec
from gradalign.errors import DivergedError, GradalignError
from gradalign.recipes import Recipe, found, merge
from gradalign.recipes.build import build_federation, task_of
from gradalign.recipes.names import fitting, require_used, settle_server
from gradalign.recipes.scale import apply_scale, lay_over, unscaled
from gradalign.recipes.spec import Spec, SweepSpec, checked, validate
from gradalign.report.experiments import shown_value
from gradalign.runs import METRICS, safe_name
from gradalign.runs.metrics import read_metrics
from gradalign.server.measure import TRAIN_COLUMNS, Measure, Row, require_measurable
from gradalign.server.monitor import Monitor
from gradalign.server.runner import RunOptions
from gradalign.sweep.grid import FINE, Lists, Point, apply_point, choose_lists, combinations
from gradalign.sweep.protocol import BEGUN, Search, State, baseline_of
from gradalign.tasks.task import Task, with_metrics

_DEFAULT_TRIALS = 40
_SCORES = 20  # validation scores in a trial: often enough that one lies near the round where trials may end early


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep, checked.

    Attributes:
        seed: The seed of the search, and the first of the finalists'.
        holdout: The share of each client that is held out for validation.
        stop_after: The share of the rounds after which a trial may be ended early.
        margin: How far below the best that is; see ``clearly_below``.
        finalists: How many of the best trials go on, with ``seeds`` seeds each.
        test_beta: Whether every β of the search is scored on the test set in the end, for the paper's figure.
    """

    recipe: Recipe
    search: Search
    seed: int
    holdout: float
    stop_after: float
    margin: float
    finalists: int
    seeds: int
    test_beta: bool = False

    @property
    def name(self) -> str:
        return f"{self.spec(self.search.entry, {}).name}-{self.search.entry}"

    def spec(
        self, entry: str, point: Point, seed: int | None = None, *, test: bool = False, rounds: int | None = None
    ) -> Spec:
        """Return the experiment of one trial.

        A trial of the search holds validation examples out and measures nothing but them, about twenty times, and what
        is monitored. A ``test`` is the recipe's own experiment on all training data, scored on the test set, which
        then decides nothing: neither when the run ends nor which model is kept.
        """
        data = apply_point(self.recipe.tables_for(entry), point)
        measure: dict[str, Any] = {}
        if test:
            measure = {"early_stopping": None, "keep_best": False}
        elif found(data, "measure", "monitor") not in TRAIN_COLUMNS:
            measure = {"train_every": 0}
        data = merge(data, {"clients": {"holdout": None if test else self.holdout}, "measure": measure})
        source = f"{self.recipe.source} ({entry})"
        data = apply_scale(data, source) | {"seed": self.seed if seed is None else seed}
        data = data if rounds is None else lay_over(data, {"rounds": rounds})
        if not test:
            every = max(1, validate(data, source).rounds // _SCORES)
            data = merge(data, {"measure": {"test_every": every}})
        return validate(data, source)

    def entries(self) -> list[str]:
        return [self.search.entry] + ([self.search.baseline] if self.search.baseline else [])

    def describe(self) -> dict[str, Any]:
        """Return all that decides which trials are made and what comes of them, as plain values."""
        told = {
            "name": self.name,
            "algorithm": self.search.entry,
            "seed": self.seed,
            "sampler": "grid" if self.search.trials is None else "tpe",
            "trials": self.search.trials,
            "holdout": self.holdout,
            "stop_after": self.stop_after,
            "margin": self.margin,
            "grid": self.search.lists,
            "recipes": {entry: self.recipe.tables_for(entry) for entry in self.entries()},
        }
        return dict(plain(told))


def plain(data: Any) -> Any:
    """Leave out what is not set, which TOML cannot say."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items() if value is not None}
    return [plain(value) for value in data] if isinstance(data, list | tuple) else data


def plan_sweep(
    recipe: Recipe,
    algorithm: str | None,
    given: Lists,
    *,
    sampler: str,
    trials: int | None,
    test_beta: bool,
    **chosen: float | None,
) -> SweepPlan:
    """Decide everything and check it, so that no mistake shows itself after hours.

    ``chosen`` says how trials are stopped and finalists decided; None takes the recipe's [sweep] value, or the default.
    """
    checked(SweepSpec, chosen, "sweep")
    own = recipe.spec()
    entry = algorithm or own.algorithm.name
    spec = unscaled(recipe.tables_for(entry), f"{recipe.source} ({entry})")  # trials are scaled, values before that
    defaults: dict[str, Any] = {"stop_after": 0.2, "margin": 0.2, "finalists": 3, "seeds": 3}
    defaults["holdout"] = spec.clients.holdout or 0.1
    for layer in (recipe.sweep.model_dump(include=set(defaults)), chosen):
        defaults |= {name: value for name, value in layer.items() if value is not None}
    baseline = baseline_of(spec.algorithm.name)
    recipe = recipe if baseline is None else _with_baseline(recipe, entry, baseline, spec.algorithm.name)
    lists = choose_lists(spec, recipe.sweep, given, _fixed(recipe, entry, spec.algorithm.name))
    plan = SweepPlan(
        recipe=recipe,
        search=Search(entry=entry, baseline=baseline, lists=lists, trials=_trials(sampler, trials)),
        seed=own.seed,
        test_beta=test_beta and baseline is not None and "beta" in lists,
        **defaults,
    )
    require_used(recipe, plan.entries())
    _check(plan)
    return plan


def _fixed(recipe: Recipe, entry: str, name: str) -> dict[str, Any]:
    """Return what is not searched unasked: what the command line sets, an entry's number of steps and β's schedule."""
    stated = recipe.stated_of(entry)
    steps = {key: one for key in ("steps", "epochs") if (one := found(stated, "local", key)) is not None}
    beta = found(stated, "algorithm", "beta")
    stated = {"local": steps, "algorithm": {"beta": beta} if isinstance(beta, Mapping) else {}}
    return merge(stated, recipe.changes_for(entry, name))


def _with_baseline(recipe: Recipe, entry: str, baseline: str, name: str) -> Recipe:
    """Return a recipe whose baseline has what the entry states beside its alignment, under what it states itself."""
    shared = {key: value for key, value in recipe.stated_of(entry).items() if key != "measure"}
    shared["algorithm"] = {key: value for key, value in shared.get("algorithm", {}).items() if key != "name"}
    shared = settle_server(fitting(settle_server(shared, name), baseline, name), baseline)
    if "rounds" in shared:  # are not shared, and schedules follow the recipe's
        shared = lay_over(shared, {"rounds": recipe.settings_of(baseline).get("rounds", Spec().rounds)})
        del shared["rounds"]
    own = settle_server(recipe.stated_of(baseline), baseline)
    rounds = {"rounds": own.pop("rounds")} if "rounds" in own else {}
    settings = {**recipe.compare.settings, baseline: lay_over(shared, own) | rounds}
    return replace(recipe, compare=recipe.compare.model_copy(update={"settings": settings}))


def _trials(sampler: str, trials: int | None) -> int | None:
    if sampler not in ("grid", "tpe"):
        raise GradalignError(f'--sampler must be grid or tpe, got "{sampler}"')
    if sampler == "grid" and trials is not None:
        raise GradalignError("--trials belongs to --sampler tpe; a grid has as many trials as it has combinations")
    return None if sampler == "grid" else trials or _DEFAULT_TRIALS


def _check(plan: SweepPlan) -> None:
    """Build what the trials will build, each value of each list once; the data is read once with a hold-out, once not.

    What the trials are scored by must be measured in all of them.
    """
    made: dict[str, Task] = {}
    for entry in plan.entries():
        lists = plan.search.others if entry == plan.search.baseline else plan.search.lists
        lists = {name: values for name, values in lists.items() if name != FINE}
        first = combinations({name: values[:1] for name, values in lists.items()})[0]
        points = [first] + [first | {name: value} for name, values in lists.items() for value in values[1:]]
        for spec in [*(plan.spec(entry, point) for point in points), plan.spec(entry, first, test=True)]:
            federation = build_federation(spec, task_of(spec, made))
            require_measurable(Measure(**spec.measure.model_dump()), federation, score=True)


def folder_name(slot: int, point: Point) -> str:
    words = "_".join(f"{name}{shown_value(value)}" for name, value in point.items())
    return safe_name(f"{slot:03d}_{words}")


class TrialRunner:
    """Runs trials in this process; tasks are made once for each seed."""

    def __init__(self, options: RunOptions, stop_after: float) -> None:
        self._options, self._stop_after = options, stop_after
        self._tasks: dict[str, Task] = {}

    def run(
        self, spec: Spec, folder: Path, trial: optuna.Trial | None, on_row: Callable[[Row], None]
    ) -> tuple[State, float | None, dict[str, Any]]:
        """Run a spec, or what its folder leaves to do; return how it ended, its score, and what else is worth a column.

        With a trial given, it may be ended early.
        """
        scored = "test" if spec.clients.holdout is None else "validation"
        threshold = self._stop_after * spec.rounds
        checked = trial is None

        def note(row: Row) -> None:
            nonlocal checked
            on_row(row)
            if not checked and row["round"] >= threshold:
                # From the file, because a resumed run's check may lie before the round that it goes on with.
                checked = _report(trial, read_metrics(folder), threshold, spec.rounds, monitor)
                if checked and trial is not None and trial.should_prune():
                    raise optuna.TrialPruned

        task = task_of(spec, self._tasks)
        monitor = Monitor(Measure(**spec.measure.model_dump()), with_metrics(task, spec.measure.metrics))
        state: State = "complete"
        try:
            name = f"{folder.parent.name}-{folder.name}"  # of the stage and the trial, for trackers
            options = replace(self._options, out=folder, resume=True, progress=False, name=name, keep_state=False)
            run_spec(spec, options, task=task, on_row=note)
        except DivergedError:
            state = "diverged"
        except optuna.TrialPruned:
            state = "pruned"
        rows = read_metrics(folder) if (folder / METRICS).exists() else []
        if not checked:  # the run was complete already, in a process that died before it could say so
            _report(trial, rows, threshold, spec.rounds, monitor)
        last: Row = next((row for row in reversed(rows) if monitor.value(row) is not None), {})
        facts = {
            f"{scored}_accuracy": last.get(f"{scored}_accuracy"),
            f"{scored}_loss": last.get(f"{scored}_loss"),
            "rounds_done": rows[-1]["round"] if rows else 0,
            "communication_rounds": rows[-1]["communication_rounds"] if rows else 0,
            "rounds": spec.rounds,
            "seconds": rows[-1]["seconds"] if rows else 0.0,
        }
        if spec.measure.monitor is not None:
            name = monitor.name.removeprefix(f"{scored}_")
            facts |= {f"{scored}_{name}": last.get(monitor.name), "scored_by": [name, monitor.larger]}
        return state, monitor.value(rows[-1]) if state == "complete" else None, facts


def _report(trial: optuna.Trial | None, rows: list[Row], threshold: float, rounds: int, monitor: Monitor) -> bool:
    """Report the first score at or after the threshold and before the end; return whether there is one."""
    for row in rows:
        if trial is not None and threshold <= row["round"] < rounds and (score := monitor.value(row)) is not None:
            # Trials have begun a tenth of the way from the untrained model's score to a perfect one: 1, or no loss.
            if rows[0]["round"] == 0 and (start := monitor.value(rows[0])) is not None:
                perfect = float(monitor.larger and rows[0].get(monitor.name) is not None)
                trial.set_user_attr(BEGUN, start + 0.1 * (perfect - start))
            trial.report(score, row["round"])
            return True
    return False
