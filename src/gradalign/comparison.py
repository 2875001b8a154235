"""Comparing algorithms: every one with every seed, then means, deviations and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradalign.api import run_spec
from gradalign.errors import DivergedError, GradalignError, whole
from gradalign.recipes import Recipe, paper_note, paper_number
from gradalign.recipes.build import build_federation, task_of
from gradalign.recipes.names import require_used
from gradalign.recipes.scale import describe_scale
from gradalign.recipes.spec import Spec
from gradalign.report import need_packages
from gradalign.report.budgets import usual_target
from gradalign.report.statistics import spread_of
from gradalign.runs import CURVES, METRICS, SUMMARY, safe_name, write_json
from gradalign.runs.compared import comparison_folder
from gradalign.runs.metrics import read_metrics
from gradalign.server.measure import Row, rounds_to, versions
from gradalign.server.runner import RunOptions
from gradalign.tasks.task import Task

_MOST_SEEDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a comparison."""

    entry: str
    seed: int
    spec: Spec
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One run of a comparison when it has ended; ``failure`` says how, when it diverged."""

    planned: Planned
    rows: list[Row]
    summary: Mapping[str, Any]
    failure: str | None = None


def plan_comparison(
    recipe: Recipe, entries: Sequence[str], seeds: int, folder: Path, *, check: bool = True
) -> list[Planned]:
    """Return all runs, each checked, before any is started; so are the packages that the curves and the page need.

    Without ``check`` no data is read, and what does not fit it is not seen.
    """
    need_packages(figures=True)
    if not entries:
        raise GradalignError("--algorithms names no algorithm; give for example fedga,fedavg")
    whole("--seeds", seeds, 1, _MOST_SEEDS)
    if len(set(entries)) < len(entries):
        raise GradalignError("--algorithms names the same algorithm twice; variants need names of their own")
    recipe = replace(recipe, compare=recipe.compare.model_copy(update={"algorithms": list(entries)}))
    first = recipe.spec().seed
    folders = {entry: folder / safe_name(entry) for entry in entries}
    if len({path.name.casefold() for path in folders.values()}) < len(entries):  # some systems see no other difference
        raise GradalignError("--algorithms has names that would share a folder; choose names that differ in letters")
    require_used(recipe, entries)
    planned = [
        Planned(entry=entry, seed=seed, spec=recipe.spec_for(entry, seed), folder=folders[entry] / f"seed{seed}")
        for entry in entries
        for seed in range(first, first + seeds)
    ]
    made: dict[str, Task] = {}
    for one in planned[::seeds] if check else ():  # one seed is enough to know that sizes and names fit
        build_federation(one.spec, task_of(one.spec, made))
    return planned


def claimed_folder(folder: Path, planned: Sequence[Planned], *, resume: bool) -> AbstractContextManager[None]:
    """Hold a comparison's folder: refuse what is not ours to overwrite, and a second writer."""
    description = {
        "name": planned[0].spec.name,
        "algorithms": list(dict.fromkeys(one.entry for one in planned)),
        "seeds": sorted({one.seed for one in planned}),
    }
    return comparison_folder(folder, description, resume=resume)


def run_comparison(
    planned: Sequence[Planned], options: RunOptions, *, on_row: Callable[[Planned, Row], None]
) -> list[Finished]:
    """Run everything in turn; a run that diverges is recorded and the others go on."""
    made: dict[str, Task] = {}
    finished: list[Finished] = []
    for one in planned:
        failure, summary = None, {}
        own = replace(options, out=one.folder, progress=False, name=f"{one.entry}-seed{one.seed}")
        try:
            summary = run_spec(one.spec, own, task=task_of(one.spec, made), on_row=partial(on_row, one)).summary
        except DivergedError as error:
            failure = str(error)
        rows = read_metrics(one.folder) if (one.folder / METRICS).exists() else []
        finished.append(Finished(planned=one, rows=rows, summary=summary, failure=failure))
    return finished


def _by_entry(finished: Sequence[Finished]) -> dict[str, list[Finished]]:
    found: dict[str, list[Finished]] = {}
    for run in finished:
        found.setdefault(run.planned.entry, []).append(run)
    return found


def _known(runs: Sequence[Finished], name: str) -> list[float]:
    return [run.summary[name] for run in runs if run.summary.get(name) is not None]


def scored_on(finished: Sequence[Finished]) -> str:
    """Return what the runs were scored on: "validation" where training examples were held out for that, else "test"."""
    return "validation" if any("final_validation_loss" in run.summary for run in finished) else "test"


def choose_target(finished: Sequence[Finished]) -> float | None:
    """Return the recipe's target accuracy, or 95 % of the lowest of the algorithms' best."""
    given = next((run.planned.spec.measure.target_accuracy for run in finished), None)
    if given is not None:
        return given
    best = [_known(runs, f"best_{scored_on(finished)}_accuracy") for runs in _by_entry(finished).values()]
    return usual_target(best)


def summarise_comparison(finished: Sequence[Finished]) -> dict[str, Any]:
    target, on = choose_target(finished), scored_on(finished)
    first = finished[0].planned.spec
    # The paper's numbers are of test data: nothing else is set beside them.
    paper = paper_note(first) if on == "test" else None
    entries = [_entry_summary(name, runs, on, target) for name, runs in _by_entry(finished).items()]
    return {
        "name": first.name,
        "terms": terms_of([entry for entry in entries if any(run["failure"] is None for run in entry["runs"])]),
        "seeds": sorted({run.planned.seed for run in finished}),
        "rounds": first.rounds,
        "scale": describe_scale(first),
        "paper": paper,
        "scored_on": on,
        "target_accuracy": target,
        "algorithms": entries,
        "task": next((run.summary["task"] for run in finished if run.summary), None),
        "versions": versions(),
    }


def terms_of(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words what the algorithms of a comparison had the same of, as they were in fact run."""
    spent = sorted({entry["communication_rounds"] for entry in entries})
    if not spent:
        return None
    if len(spent) == 1:
        return f"at equal communication ({spent[0]:,} rounds of it each)"
    rounds = {entry["settings"]["rounds"] for entry in entries}
    words = f"{spent[0]:,} to {spent[-1]:,} rounds of communication"
    return f"at equal updates ({rounds.pop():,} rounds, {words})" if len(rounds) == 1 else f"at {words}"


def _entry_summary(name: str, runs: Sequence[Finished], on: str, target: float | None) -> dict[str, Any]:
    reached = [rounds_to(run.rows, target) for run in runs if run.failure is None]
    counted = [float(rounds) for rounds in reached if rounds is not None]
    spec = runs[0].planned.spec
    scores = (f"best_{on}_accuracy", f"final_{on}_accuracy", f"final_{on}_loss")
    known = dict.fromkeys(key for run in runs for key in run.summary)
    by_client = [key for key in known if key.startswith(("final_clients_", "final_personalized_"))]
    return {
        "name": name,
        **{score: spread_of(_known(runs, score)) for score in (*scores, *by_client)},
        "communication_rounds_to_target": spread_of(counted),
        "reached_target": len(counted),
        "final_r": spread_of(_known(runs, "final_r")),
        "communication_rounds": max((run.rows[-1]["communication_rounds"] for run in runs if run.rows), default=0),
        "paper_test_accuracy": paper_number(spec, name),
        "settings": spec.to_dict(),
        "runs": [
            {
                "seed": run.planned.seed,
                "folder": str(run.planned.folder.relative_to(run.planned.folder.parents[1])),
                "failure": run.failure,
            }
            for run in runs
        ],
    }


def write_comparison(folder: Path, finished: Sequence[Finished], curves: Sequence[str]) -> dict[str, Any]:
    """Write summary.json and the curves; return the summary."""
    summary = summarise_comparison(finished)
    if curves and any(run.rows for run in finished):
        from gradalign.report.figures import draw_comparison  # slow to import

        shown = [name.replace("test_", f"{summary['scored_on']}_") for name in curves]
        ended = [run for run in finished if run.failure is None] or finished
        counts = {len(runs) for runs in _by_entry(ended).values()}
        seeds = f"{max(counts)} seed{'s' * (max(counts) > 1)}" if len(counts) == 1 else "the seeds that finished"
        scale = f" (scaled to {summary['scale']})" if summary["scale"] else ""
        title = f"{summary['name']} {summary['terms']}{scale}: mean of {seeds}, shade from lowest to highest"
        rows = {entry: [run.rows for run in runs] for entry, runs in _by_entry(ended).items()}
        draw_comparison(folder / CURVES, title, rows, shown, summary["target_accuracy"])
    write_json(folder / SUMMARY, summary)
    return summary
