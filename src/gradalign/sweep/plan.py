"""Everything a sweep has decided before its first trial, checked, and its folder."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from gradalign.errors import FolderInUseError, GradalignError
from gradalign.recipes.build import build_federation
from gradalign.recipes.recipe import Recipe, unused_changes
from gradalign.recipes.spec import Spec, SweepSpec, explain
from gradalign.runs import COMPARISON, SPEC, SWEEP
from gradalign.runs.folder import differing_fields, locked, read_toml, refuse_strangers, write_toml
from gradalign.sweep.grid import Lists, Point, choose_lists, combinations
from gradalign.sweep.protocol import Search, baseline_of
from gradalign.sweep.trial import trial_spec
from gradalign.tasks.task import Task

DATABASE = "study.db"
DEFAULT_TRIALS = 40


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a sweep stops trials and decides; None takes the recipe's [sweep] value, or the default."""

    sampler: str = "grid"
    trials: int | None = None
    holdout: float | None = None
    stop_after: float | None = None
    margin: float | None = None
    finalists: int | None = None
    seeds: int | None = None
    test_beta: bool = False


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep, checked.

    Attributes:
        recipe: What is tuned.
        search: The algorithm, the one it takes values from, the lists.
        seed: The seed of the search, and the first of the finalists'.
        holdout: The share of each client that is held out for validation.
        stop_after: The share of the rounds after which a trial may be ended early.
        margin: How far below the best that is; see ``clearly_below``.
        finalists: How many of the best trials go on.
        seeds: With how many seeds they do.
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
        """The sweep's name, also that of its study."""
        return f"{self.spec(self.search.entry, {}).name}-{self.search.entry}"

    def spec(self, entry: str, point: Point, seed: int | None = None, *, test: bool = False) -> Spec:
        """Return the experiment of one trial."""
        chosen = self.seed if seed is None else seed
        return trial_spec(self.recipe, entry, point, chosen, None if test else self.holdout)

    def entries(self) -> list[str]:
        """Return the algorithms that are trained."""
        return [self.search.entry] + ([self.search.baseline] if self.search.baseline else [])

    def describe(self) -> dict[str, Any]:
        """Return all that decides which trials are made and what comes of them, as plain values."""
        found: dict[str, Any] = plain(
            {
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
        )
        return found


def plain(data: Any) -> Any:
    """Leave out what is not set, which TOML cannot say."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items() if value is not None}
    return [plain(value) for value in data] if isinstance(data, list | tuple) else data


def plan_sweep(recipe: Recipe, algorithm: str | None, given: Lists, choices: Choices) -> SweepPlan:
    """Decide everything and check it, so that no mistake shows itself after hours."""
    numbers = {name: getattr(choices, name) for name in ("holdout", "stop_after", "margin", "finalists", "seeds")}
    try:
        SweepSpec.model_validate(numbers)
    except ValidationError as error:
        raise explain(error, "sweep", SweepSpec) from None
    own = recipe.spec()
    entry = algorithm or own.algorithm.name
    spec = recipe.spec_for(entry, own.seed)
    lists = choose_lists(spec, recipe.sweep, given)
    section = recipe.sweep

    def choose(name: str, default: float) -> Any:
        chosen, stated = getattr(choices, name), getattr(section, name)
        return chosen if chosen is not None else stated if stated is not None else default

    baseline = baseline_of(spec.algorithm.name)
    plan = SweepPlan(
        recipe=recipe,
        search=Search(entry=entry, baseline=baseline, lists=lists, trials=_trials(choices)),
        seed=own.seed,
        holdout=choose("holdout", 0.1),
        stop_after=choose("stop_after", 0.2),
        margin=choose("margin", 0.2),
        finalists=choose("finalists", 3),
        seeds=choose("seeds", 3),
        test_beta=choices.test_beta and baseline is not None,
    )
    unused = unused_changes(recipe, plan.entries())
    if unused:
        raise GradalignError(f"--set {unused[0]}: {' and '.join(plan.entries())} have no such parameter")
    _check(plan)
    return plan


def _trials(choices: Choices) -> int | None:
    if choices.sampler not in ("grid", "tpe"):
        raise GradalignError(f'--sampler must be grid or tpe, got "{choices.sampler}"')
    if choices.sampler == "grid" and choices.trials is not None:
        raise GradalignError("--trials belongs to --sampler tpe; a grid has as many trials as it has combinations")
    if choices.trials is not None and choices.trials < 1:
        raise GradalignError(f"--trials must be at least 1, got {choices.trials}")
    return None if choices.sampler == "grid" else choices.trials or DEFAULT_TRIALS


def _check(plan: SweepPlan) -> None:
    """Build what the trials will build, each value of each list once; the data is read once."""
    task: Task | None = None
    for entry in plan.entries():
        lists = plan.search.others if entry == plan.search.baseline else plan.search.lists
        lists = {name: values for name, values in lists.items() if name != "beta_fine"}
        first = combinations({name: values[:1] for name, values in lists.items()})[0]
        for point in [first] + [first | {name: value} for name, values in lists.items() for value in values[1:]]:
            task = build_federation(plan.spec(entry, point), task).task


def open_folder(folder: Path, plan: SweepPlan, storage: str, study: str) -> None:
    """Make the sweep's folder, or see that it holds this very sweep; several processes may do so at once."""
    description = tomllib.loads(tomli_w.dumps(plan.describe() | {"storage": storage, "study": study}))
    with locked_in_turn(folder, 10.0):
        _claim(folder, description)


@contextmanager
def locked_in_turn(folder: Path, seconds: float) -> Iterator[None]:
    """Hold a folder's lock, waiting up to so many seconds for a process that holds it for a moment."""
    until = time.monotonic() + seconds
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(folder))
                break
            except FolderInUseError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield


def _claim(folder: Path, description: Mapping[str, Any]) -> None:
    if (folder / SWEEP).exists():
        differing = differing_fields(read_toml(folder / SWEEP), description)
        if differing:
            raise GradalignError(f"{folder} holds another sweep: {'; '.join(differing[:3])}; choose another --out")
        return
    for file, what in ((SPEC, "a single run"), (COMPARISON, "a comparison")):
        if (folder / file).exists():
            raise GradalignError(f"{folder} holds {what}, not a sweep; choose another --out")
    refuse_strangers(folder, set())
    write_toml(folder / SWEEP, description)
