"""Carries the list out: settings chosen or taken over, then what is left of the runs, then the verdicts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradalign.comparison import Planned, claimed_folder, plan_comparison, run_comparison
from gradalign.errors import GradalignError
from gradalign.recipes.spec import checked
from gradalign.report import write_report
from gradalign.report.statistics import spread_of
from gradalign.reproduce.plan import SEARCH_SEED, Chosen, Experiment, Scale, Tuning
from gradalign.reproduce.verdicts import beside_baseline, markdown, verdict_row
from gradalign.runs import METRICS, REPORT, SUMMARY, safe_name, write_json, write_toml, write_whole
from gradalign.runs.metrics import read_metrics
from gradalign.runs.read import Run, gather
from gradalign.runs.untrusted import is_there, read_failure, read_optional
from gradalign.server.measure import versions
from gradalign.server.runner import RunOptions
from gradalign.sweep.conduct import run_search
from gradalign.sweep.grid import PLACES, Lists, Point
from gradalign.sweep.plan import plan_sweep
from gradalign.sweep.protocol import best_of
from gradalign.tracking.progress import rounds_bar

STAMP, SETTINGS, RESULTS, TABLES = "reproduction.toml", "settings.toml", "results.json", "tables.md"
RUNS, TUNE = "runs", "tune"
Say = Callable[[str], None]
Settled = dict[str, Chosen]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The list at one scale in one folder: FOLDER/EXPERIMENT has its settings, its trials and its runs."""

    experiments: Sequence[Experiment]
    scale: Scale
    folder: Path
    options: RunOptions
    say: Say
    show: bool = False
    seeds: int | None = None
    """How many seeds of each experiment are run now; all of them without a number."""
    retune: bool = False
    """Choose settings anew where the plan or the folder has some."""
    _anew: set[str] = field(default_factory=set, init=False)
    """The experiments whose settings this process has written: those count when all else is chosen anew."""

    def place(self, experiment: Experiment) -> Path:
        return self.folder / safe_name(experiment.name)

    def require_scale(self) -> None:
        """Refuse a folder that holds another scale's runs."""
        known = read_optional(self.folder / STAMP).get("scale", self.scale)
        if known != self.scale:
            raise GradalignError(f"{self.folder} holds runs of the scale {known}; choose another --out")

    def _stamp(self) -> None:
        """Write down whose folder this is, once all that may be wrong has been looked at."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_toml(self.folder / STAMP, {"scale": self.scale})

    # Settings

    def settings(self, experiment: Experiment, entries: Sequence[str] = ()) -> Settled:
        """Return the settings known of an experiment: written down in its folder, or in the plan, or chosen now.

        Chosen now are those of ``entries``, all without any; first those that the others take values from.
        """
        tune = experiment.at(self.scale).tune
        settled = self._known(experiment)
        if not settled and experiment.settings_from is not None:
            settled = self._taken_over(experiment, experiment.settings_from)
        for number, entry in enumerate(tune.lists if tune else ()):
            if tune and entry not in settled and (not entries or entry in entries or number == 0):
                settled |= self._search(experiment, tune, entry, settled)
                self._write(experiment, settled)
        if settled and (self._forgets(experiment) or not is_there(self.place(experiment) / SETTINGS)):
            self._write(experiment, settled)
        return settled

    def _forgets(self, experiment: Experiment) -> bool:
        return self.retune and experiment.name not in self._anew

    def _write(self, experiment: Experiment, settled: Settled) -> None:
        self.place(experiment).mkdir(parents=True, exist_ok=True)
        write_toml(self.place(experiment) / SETTINGS, {name: one.model_dump() for name, one in settled.items()})
        self._anew.add(experiment.name)

    def _known(self, experiment: Experiment) -> Settled:
        if self._forgets(experiment):
            return {}
        file = self.place(experiment) / SETTINGS
        written = {name: checked(Chosen, table, str(file)) for name, table in read_optional(file).items()}
        return written or ({} if self.retune else dict(experiment.at(self.scale).chosen))

    def _taken_over(self, experiment: Experiment, name: str) -> Settled:
        """Return another experiment's settings, and of the entries that are not tuned, those of their algorithms.

        What an entry fixes itself stays its own.
        """
        other, tune = next(one for one in self.experiments if one.name == name), experiment.at(self.scale).tune
        theirs, taken = self.settings(other, other.algorithms[0]), {}
        for entry in {*theirs, *experiment.entry_names()} - set(tune.lists if tune else ()):
            own = experiment.entries.get(entry, {}).get("algorithm", {})
            found = theirs.get(own.get("name", entry))
            if found is not None:
                free = experiment.left_free(entry, found.values)
                taken[entry] = Chosen(values=free, source=f"as in {name}: {found.source}")
        return taken

    def _search(self, experiment: Experiment, tune: Tuning, entry: str, settled: Settled) -> Settled:
        """Choose the settings of one entry on validation examples; of one with β, also those of the one without."""
        known = _points(settled)
        recipe = experiment.recipe_at(self.scale, known, tune.budget)
        recipe = replace(recipe, data={**recipe.data, "seed": SEARCH_SEED})
        stated = tune.lists[entry].model_dump(exclude_none=True)
        lists: Lists = {name: stated.pop(name) for name in [*PLACES, "beta_fine"] if name in stated}
        spec = recipe.spec_for(entry, SEARCH_SEED)
        local = spec.local
        held: dict[str, Any] = {"K": [local.steps]} if local.steps else {"epochs": [local.epochs or 1]}
        held |= {"lr": [local.lr], "batch": [local.batch_size or "whole"], "weight_decay": [local.weight_decay]}
        plan = plan_sweep(recipe, entry, held | lists, sampler="grid", trials=None, test_beta=False, **stated)
        self._stamp()
        self.say(f"{experiment.name}: choosing settings of {entry} on validation examples")
        folder = self.place(experiment) / TUNE / safe_name(entry)
        if self.retune and is_there(folder):
            shutil.rmtree(folder)  # its trials would be taken as they are
        found = run_search(plan, folder, self.options, show=self.show)
        chosen = {}
        for name, outcomes in zip((entry, plan.search.baseline), found, strict=True):
            if name is not None and name not in settled:
                source = (
                    f"chosen on {100 * plan.holdout:g} % of each client's training examples, not trained on: the best "
                    f"of {len(outcomes)} trials of length {tune.budget}, seed {SEARCH_SEED}"
                )
                chosen[name] = Chosen(values=best_of(outcomes, "the search").point, source=source)
        return chosen

    # Runs

    def planned(self, experiment: Experiment, settled: Settled, *, check: bool = True) -> list[Planned]:
        """Return all runs in the order of their worth: seed by seed of each group of entries."""
        recipe = experiment.recipe_at(self.scale, _points(settled))
        seeds = experiment.at(self.scale).seeds
        runs = plan_comparison(recipe, experiment.entry_names(), seeds, self.place(experiment) / RUNS, check=check)
        group = {entry: place for place, group in enumerate(experiment.algorithms) for entry in group}
        return sorted(runs, key=lambda one: (group[one.entry], one.seed))

    def run(self, experiment: Experiment, only: Sequence[str]) -> None:
        """Do what is left of an experiment, or of some of its entries."""
        for group in experiment.algorithms:
            entries = [entry for entry in group if not only or entry in only]
            if not entries:
                continue
            planned = self.planned(experiment, self.settings(experiment, entries))
            self._stamp()
            now = sorted({one.seed for one in planned})[: self.seeds]
            for one in planned:
                wanted = one.entry in entries and one.seed in now
                if wanted and (self.retune or not ended(one.folder)):  # one of other settings is refused
                    what = f"{experiment.name}: {one.entry}, seed {one.seed}, {one.spec.rounds:,} rounds"
                    self.say(f"{what}; {time_left(planned)}")
                    bar = rounds_bar(one.spec.rounds) if self.show else nullcontext(lambda label, row: None)
                    with claimed_folder(self.place(experiment) / RUNS, planned, resume=True), bar as tick:
                        resuming = replace(self.options, resume=True)
                        run_comparison([one], resuming, on_row=lambda run, row: tick(run.entry, row))

    def state(self, experiment: Experiment) -> dict[str, Any]:
        """Return what is done of an experiment and what is left, without reading any data."""
        own, settled = experiment.at(self.scale), self._known(experiment)
        runs = self.planned(experiment, settled, check=False)
        return {
            "name": experiment.name,
            "title": experiment.title,
            "settings_to_choose": [entry for entry in (own.tune.lists if own.tune else ()) if entry not in settled],
            "left": time_left(runs),
            "core_hours": own.hours,
        }

    # Results

    def results(self) -> dict[str, Any]:
        """Write the numbers, the tables and the page of all runs that have finished; return the results."""
        runs = {one.name: self._runs(one) for one in self.experiments}
        every = {f"{name}/{entry}": own for name, entries in runs.items() for entry, own in entries.items()}
        found = [self._result(one, runs[one.name], every) for one in self.experiments]
        found = [one for one in found if one["algorithms"]]
        results: dict[str, Any] = {"scale": self.scale, "experiments": found, "versions": versions()}
        if not found:
            return results | {"report": None}
        write_json(self.folder / RESULTS, results)
        write_whole(self.folder / TABLES, markdown(found))
        folders, table = [self.folder / one["folder"] / RUNS for one in found], verdict_table(found)
        page = write_report(folders, self.folder / REPORT, title="The paper's experiments", verdicts=table)
        return results | {"report": str(page)}

    def _runs(self, experiment: Experiment) -> dict[str, list[Run]]:
        folder = self.place(experiment) / RUNS
        found = gather([folder]).runs if is_there(folder) else []
        return {entry: [run for run in found if run.entry == entry] for entry in {run.entry or "": 0 for run in found}}

    def _result(
        self, experiment: Experiment, runs: Mapping[str, list[Run]], every: Mapping[str, list[Run]]
    ) -> dict[str, Any]:
        place, known = self.place(experiment), {**every, **runs}
        rows = {entry: [run.rows for run in own if run.state == "complete"] for entry, own in known.items()}
        diverged = {entry: sum(run.state == "diverged" for run in own) for entry, own in known.items()}
        settled = read_optional(place / SETTINGS)
        return {
            "name": experiment.name,
            "title": experiment.title,
            "folder": place.name,
            "provenance": experiment.provenance,
            "algorithms": [_entry_result(entry, own, settled.get(entry)) for entry, own in runs.items()],
            "baseline": experiment.baseline,
            "beside_baseline": beside_baseline({entry: rows[entry] for entry in runs}, experiment.baseline),
            "verdicts": [verdict_row(claim, rows, diverged) for claim in experiment.claims],
        }


def verdict_table(experiments: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the verdicts as a table: its heads, and a row for each claim."""
    table = [["experiment", "claim", "at equal", "first − second", "verdict", "why"]]
    for one in experiments:
        for row in one["verdicts"]:
            found, margin = row["difference"], row["margin"]
            words = "–" if found is None else f"{found:+.3g}" + ("" if margin is None else f" ± {margin:.2g}")
            seeds = f" ({len(row['first_scores'])} and {len(row['second_scores'])} runs)"
            table.append([one["name"], row["text"], row["at"], words + seeds, row["verdict"], row["why"]])
    return table


def _entry_result(entry: str, runs: Sequence[Run], settled: Mapping[str, Any] | None) -> dict[str, Any]:
    complete = [run for run in runs if run.state == "complete"]

    def final(name: str) -> dict[str, Any] | None:
        values = [run.summary[name] for run in complete if run.summary.get(name) is not None]
        found = spread_of(values)
        return None if found is None else found | {"values": values}

    names = ("final_test_accuracy", "best_test_accuracy", "final_test_loss", "final_train_loss", "final_r")
    return {
        "name": entry,
        "seeds": sorted(run.seed for run in complete),
        "diverged": sorted(run.seed for run in runs if run.state == "diverged"),
        **{name: final(name) for name in names},
        "communication_rounds": max((run.summary["communication_rounds"] for run in complete), default=0),
        "seconds": sum(run.summary["seconds"] for run in complete),
        "chosen": settled,
    }


def _points(settled: Settled) -> dict[str, Point]:
    return {name: dict(one.values) for name, one in settled.items()}


def ended(folder: Path) -> bool:
    """Return whether there is nothing left to do in a run's folder: it is complete, or it diverged."""
    if is_there(folder / SUMMARY):
        return True
    failure = read_failure(folder) if folder.is_dir() else None
    return failure is not None and failure.diverged


def time_left(planned: Sequence[Planned]) -> str:
    """Say how long what is left of some runs takes, by the seconds a round that the rounds done so far have taken.

    An entry without a round of its own is counted with the slowest of the others.
    """
    begun = [one for one in planned if is_there(one.folder / METRICS)]
    last = {one.folder: rows[-1] for one in begun if (rows := read_metrics(one.folder)) and rows[-1]["round"]}
    done: dict[str, list[Mapping[str, Any]]] = {}
    for one in begun:
        done.setdefault(one.entry, []).extend([last[one.folder]] if one.folder in last else [])
    speeds = {e: sum(r["seconds"] for r in rows) / sum(r["round"] for r in rows) for e, rows in done.items() if rows}
    todo = [one for one in planned if not ended(one.folder)]
    words = f"{len(todo)} of {len(planned)} runs left"
    if not todo or not speeds:
        return words + ("; how long a round takes is not known yet" if todo else "")
    slowest = max(speeds.values())
    left = [(one.entry, one.spec.rounds - last.get(one.folder, {"round": 0})["round"]) for one in todo]
    seconds = sum(rounds * speeds.get(entry, slowest) for entry, rounds in left)
    guessed = sorted({one.entry for one in todo} - set(speeds))
    hint = f" ({', '.join(guessed)} counted like the slowest measured)" if guessed else ""
    return f"{words}, about {timedelta(seconds=round(seconds))} at the speed so far{hint}"
