"""Comparing algorithms: every one with every seed, then means, deviations and curves."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradalign.api import run_spec
from gradalign.errors import DivergedError, GradalignError, whole
from gradalign.recipes import Recipe
from gradalign.recipes.build import build_algorithm, build_federation, build_local, task_of
from gradalign.recipes.names import plain_name, require_used
from gradalign.recipes.papers import paper_note, papers_accuracy
from gradalign.recipes.scale import describe_scale
from gradalign.recipes.spec import Spec
from gradalign.report import need_packages
from gradalign.report.budgets import target_of
from gradalign.report.experiments import Experiment, Group, arrange
from gradalign.report.statistics import spread_of
from gradalign.runs import CURVES, REPORT, SUMMARY, as_toml, is_shorter, remove, safe_name, write_json
from gradalign.runs.compared import comparison_folder
from gradalign.runs.folder import has_begun, refuse_others
from gradalign.runs.read import Gathered
from gradalign.runs.untrusted import read_spec
from gradalign.server.federation import unlike
from gradalign.server.measure import Measure, Row, rounds_to, versions
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
    recipe = replace(recipe, compare=recipe.compare.model_copy(update={"algorithms": list(entries)}))
    first = recipe.spec().seed
    if len({(plain_name(entry), plain_name(str(recipe.spec_for(entry, first)))) for entry in entries}) < len(entries):
        raise GradalignError("--algorithms names the same algorithm twice; variants need names of their own")
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


def claimed_folder(folder: Path, planned: Sequence[Planned], **how: bool) -> AbstractContextManager[None]:
    """Hold a comparison's folder, as ``comparison_folder`` does: refuse what is not ours, and a second writer."""
    description = {
        "name": planned[0].spec.name,
        "algorithms": list(dict.fromkeys(one.entry for one in planned)),
        "seeds": sorted({one.seed for one in planned}),
    }
    return comparison_folder(folder, description, **how)


def refuse_other_runs(planned: Iterable[Planned]) -> None:
    """Refuse folders in which another run lies than the planned one, or one that cannot go on to its length."""
    for one in planned:
        if has_begun(one.folder):
            algorithm = build_algorithm(one.spec.algorithm, one.spec.server)
            local, measure = build_local(one.spec.local, algorithm), Measure(**one.spec.measure.model_dump())
            length_matters = partial(unlike, algorithm, local, measure, one.spec.rounds)
            refuse_others(one.folder, tomllib.loads(as_toml(one.spec.to_dict())), length_matters)


def _is_to_grow(one: Planned) -> bool:
    return has_begun(one.folder) and is_shorter(read_spec(one.folder), tomllib.loads(as_toml(one.spec.to_dict())))


def run_comparison(planned: Sequence[Planned], options: RunOptions, *, on_row: Callable[[Planned, Row], None]) -> None:
    """Run everything in turn; a run that diverges says so in its folder and the others go on.

    Folders that hold other runs are refused before the first is touched.
    """
    made: dict[str, Task] = {}
    if options.resume:
        refuse_other_runs(planned)
        for name in (SUMMARY, CURVES, REPORT) if any(map(_is_to_grow, planned)) else ():
            remove(planned[0].folder.parents[1] / name)  # of the shorter runs
    for one in planned:
        own = replace(options, out=one.folder, progress=False, name=f"{one.entry}-seed{one.seed}")
        with suppress(DivergedError):
            run_spec(one.spec, own, task=task_of(one.spec, made), on_row=partial(on_row, one))


def summarise_comparison(planned: Sequence[Planned], experiment: Experiment) -> dict[str, Any]:
    target, on, first = target_of(experiment), experiment.scored_on, planned[0].spec
    # The paper's numbers are of test data: nothing else is set beside them.
    paper = paper_note(*(one.spec for one in planned)) if on == "test" else None
    plans = {one.folder: one for one in planned}
    entries = [_entry_summary(plans[group.runs[0].folder], group, on, target) for group in experiment.groups]
    return {
        "name": first.name,
        "terms": terms_of([entry for entry in entries if any(run["failure"] is None for run in entry["runs"])]),
        "seeds": sorted({one.seed for one in planned}),
        "rounds": first.rounds,
        "scale": describe_scale(first),
        "paper": paper,
        "scored_on": on,
        "target_accuracy": target,
        "algorithms": entries,
        "task": next((run.summary["task"] for run in experiment.runs if run.summary), None),
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


def _entry_summary(one: Planned, group: Group, on: str, target: float | None) -> dict[str, Any]:
    reached = [rounds_to(run.rows, target) for run in group.complete]
    counted = [float(rounds) for rounds in reached if rounds is not None]
    scores = (f"best_{on}_accuracy", f"final_{on}_accuracy", f"final_{on}_loss")
    known = dict.fromkeys(key for run in group.runs for key in run.summary)
    by_client = [key for key in known if key.startswith(("final_clients_", "final_personalized_"))]
    spent = max((run.rows[-1]["communication_rounds"] for run in group.runs if run.rows), default=0)
    return {
        "name": one.entry,
        **{score: spread_of(group.finals(score)) for score in (*scores, *by_client)},
        "communication_rounds_to_target": spread_of(counted),
        "reached_target": len(counted),
        "final_r": spread_of(group.finals("final_r")),
        "communication_rounds": int(spent),
        "paper_test_accuracy": papers_accuracy(one.spec.to_dict(), one.entry),
        "settings": one.spec.to_dict(),
        "runs": [
            {
                "seed": run.seed,
                "folder": str(run.folder.relative_to(run.folder.parents[1])),
                "failure": run.failure,
            }
            for run in group.runs
        ],
    }


def write_comparison(
    folder: Path, planned: Sequence[Planned], gathered: Gathered, curves: Sequence[str]
) -> dict[str, Any]:
    """Write summary.json and the curves of the runs that were planned; return the summary."""
    if gathered.skipped:
        raise GradalignError(gathered.skipped[0])
    (experiment,) = arrange(gathered.runs)
    summary = summarise_comparison(planned, experiment)
    if curves and any(run.rows for run in gathered.runs):
        from gradalign.report.figures import draw_comparison  # slow to import

        shown = [name.replace("test_", f"{summary['scored_on']}_") for name in curves]
        ended = {group.name: group.complete for group in experiment.groups if group.complete}
        drawn = ended or {group.name: list(group.runs) for group in experiment.groups}
        counts = {len(seeds) for seeds in drawn.values()}
        seeds = f"{max(counts)} seed{'s' * (max(counts) > 1)}" if len(counts) == 1 else "the seeds that finished"
        scale = f" (scaled to {summary['scale']})" if summary["scale"] else ""
        title = f"{summary['name']} {summary['terms']}{scale}: mean of {seeds}, shade from lowest to highest"
        rows = {name: [run.rows for run in seeds] for name, seeds in drawn.items()}
        draw_comparison(folder / CURVES, title, rows, shown, summary["target_accuracy"])
    write_json(folder / SUMMARY, summary)
    return summary
