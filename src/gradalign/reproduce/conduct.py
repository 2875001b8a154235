"""Carries the list out: settings chosen or taken over, then what is left of the runs, then the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradalign.compare import Planned, claimed_folder, plan_comparison, run_comparison, spread
from gradalign.recipes.spec import checked
from gradalign.report import write_report
from gradalign.reproduce.plan import SEARCH_SEED, Chosen, Experiment, Scale, Tuning
from gradalign.reproduce.verdicts import Rows, verdict_row
from gradalign.runs import METRICS, REPORT, SUMMARY, safe_name, write_json, write_toml
from gradalign.runs.metrics import read_metrics
from gradalign.runs.read import Run, gather
from gradalign.runs.untrusted import is_there, read_failure, read_optional
from gradalign.server.measure import versions
from gradalign.server.runner import RunOptions
from gradalign.sweep.conduct import run_search
from gradalign.sweep.grid import PLACES, Lists, Point
from gradalign.sweep.plan import plan_sweep
from gradalign.sweep.protocol import Outcome, best_of

SETTINGS, RESULTS, RUNS, TUNE = "settings.toml", "results.json", "runs", "tune"
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

    def place(self, experiment: Experiment) -> Path:
        return self.folder / safe_name(experiment.name)

    # Settings

    def settings(self, experiment: Experiment, entries: Sequence[str] = ()) -> Settled:
        """Return the settings known of an experiment: written down in its folder, or in the plan, or chosen now.

        Chosen now are those of ``entries``, all without any; first those that the others take values from.
        """
        own, file = experiment.at(self.scale), self.place(experiment) / SETTINGS
        settled = self._written(experiment) or dict(own.chosen)
        if not settled and experiment.settings_from is not None:
            settled = self._taken_over(experiment, experiment.settings_from)
        lists = list(own.tune.lists) if own.tune else []
        wanted = [entry for entry in lists if not entries or entry in entries or entry == lists[0]]
        for entry in wanted:
            if own.tune is not None and entry not in settled:
                settled |= self._search(experiment, own.tune, entry, settled)
                _write(file, settled)
        if settled and not is_there(file):
            _write(file, settled)
        return settled

    def _written(self, experiment: Experiment) -> Settled:
        file = self.place(experiment) / SETTINGS
        return {name: checked(Chosen, table, str(file)) for name, table in read_optional(file).items()}

    def _taken_over(self, experiment: Experiment, name: str) -> Settled:
        """Return another experiment's settings, and of the entries that are not tuned, those of their algorithms.

        What an entry fixes itself stays its own.
        """
        other, own = next(one for one in self.experiments if one.name == name), experiment.at(self.scale)
        theirs = {
            entry: Chosen(values=one.values, source=f"as in {name}: {one.source}")
            for entry, one in self.settings(other, other.algorithms[0]).items()
        }
        taken = {}
        for entry in experiment.entry_names():
            fixed = experiment.entries.get(entry, {})
            found = theirs.get(fixed.get("algorithm", {}).get("name", entry))
            if found is not None and (own.tune is None or entry not in own.tune.lists):
                values = {
                    key: v for key, v in found.values.items() if PLACES[key][1] not in fixed.get(PLACES[key][0], {})
                }
                taken[entry] = Chosen(values=values, source=found.source)
        return theirs | taken

    def _search(self, experiment: Experiment, tune: Tuning, entry: str, settled: Settled) -> Settled:
        """Choose the settings of one entry on validation examples; of one with β, also those of the one without."""
        known = {name: dict(one.values) for name, one in settled.items()}
        base: Point = known.get(tune.base, {})
        recipe = experiment.recipe_at(self.scale, {entry: base} | known, tune.budget)
        recipe = replace(recipe, data={**recipe.data, "seed": SEARCH_SEED})
        stated = tune.lists[entry].model_dump(exclude_none=True)
        lists: Lists = {name: stated.pop(name) for name in [*PLACES, "beta_fine"] if name in stated}
        spec = recipe.spec_for(entry, SEARCH_SEED)
        held: dict[str, Any] = {"batch": spec.local.batch_size or "whole", "weight_decay": spec.local.weight_decay}
        held |= {"lr": spec.local.lr} | (
            {"K": spec.local.steps} if spec.local.steps else {"epochs": spec.local.epochs or 1}
        )
        given: Any = {name: [value] for name, value in held.items()} | lists
        plan = plan_sweep(recipe, entry, given, sampler="grid", trials=None, test_beta=False, **stated)
        self.say(f"{experiment.name}: choosing settings of {entry} on validation examples")
        found = run_search(plan, self.place(experiment) / TUNE / safe_name(entry), self.options, show=self.show)
        names = [entry, plan.search.baseline]
        return {
            name: self._best(outcomes, tune, plan.holdout)
            for name, outcomes in zip(names, found, strict=True)
            if name is not None and name not in settled
        }

    def _best(self, outcomes: Sequence[Outcome], tune: Tuning, holdout: float) -> Chosen:
        best = best_of(outcomes, "the search")
        source = (
            f"chosen on {100 * holdout:g} % of each client's training examples, not trained on: the best of "
            f"{len(outcomes)} trials of length {tune.budget}, seed {SEARCH_SEED}"
        )
        return Chosen(values=best.point, source=source)

    # Runs

    def planned(self, experiment: Experiment, settled: Settled, *, check: bool = True) -> list[Planned]:
        """Return all runs in the order of their worth: seed by seed of each group of entries."""
        recipe = experiment.recipe_at(self.scale, {name: dict(one.values) for name, one in settled.items()})
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
            for one in planned:
                if one.entry in entries and not ended(one.folder):
                    what = f"{experiment.name}: {one.entry}, seed {one.seed}, {one.spec.rounds:,} rounds"
                    self.say(f"{what}; {time_left(planned)}")
                    with claimed_folder(self.place(experiment) / RUNS, planned, resume=True):
                        run_comparison([one], replace(self.options, resume=True), on_row=lambda planned, row: None)

    def state(self, experiment: Experiment) -> dict[str, Any]:
        """Return what is done of an experiment and what is left, without reading any data."""
        own = experiment.at(self.scale)
        settled = self._written(experiment) or dict(own.chosen)
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
        """Write results.json and the page of all runs that have finished; return the results."""
        runs = {one.name: self._runs_of(one) for one in self.experiments}
        every = {f"{name}/{entry}": _rows(own) for name, entries in runs.items() for entry, own in entries.items()}
        found = [self._result(one, runs[one.name], every) for one in self.experiments]
        results: dict[str, Any] = {
            "scale": self.scale,
            "experiments": [one for one in found if one["algorithms"]],
            "versions": versions(),
        }
        write_json(self.folder / RESULTS, results)
        folders = [self.folder / one["folder"] / RUNS for one in results["experiments"]]
        page = None
        if folders:
            table = verdict_table(results["experiments"])
            page = write_report(folders, self.folder / REPORT, title="The paper's experiments", verdicts=table)
        return results | {"report": None if page is None else str(page)}

    def _runs_of(self, experiment: Experiment) -> dict[str, list[Run]]:
        folder = self.place(experiment) / RUNS
        runs: dict[str, list[Run]] = {}
        for run in gather([folder]).runs if is_there(folder) else []:
            runs.setdefault(run.entry or "", []).append(run)
        return runs

    def _result(
        self, experiment: Experiment, runs: Mapping[str, list[Run]], every: Mapping[str, list[Rows]]
    ) -> dict[str, Any]:
        place = self.place(experiment)
        rows = {**every, **{entry: _rows(own) for entry, own in runs.items()}}
        settled = read_optional(place / SETTINGS)
        return {
            "name": experiment.name,
            "title": experiment.title,
            "folder": place.name,
            "provenance": experiment.provenance,
            "algorithms": [_entry_result(entry, own, settled.get(entry)) for entry, own in runs.items()],
            "verdicts": [verdict_row(claim, rows) for claim in experiment.claims],
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


def _rows(runs: Sequence[Run]) -> list[Rows]:
    return [run.rows for run in runs if run.state == "complete"]


def _entry_result(entry: str, runs: Sequence[Run], settled: Mapping[str, Any] | None) -> dict[str, Any]:
    complete = [run for run in runs if run.state == "complete"]

    def final(name: str) -> dict[str, Any] | None:
        values = [run.summary[name] for run in complete if run.summary.get(name) is not None]
        found = spread(values)
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


def _write(file: Path, settled: Settled) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_toml(file, {name: one.model_dump() for name, one in settled.items()})


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
    last = {
        one.folder: rows[-1] for one in planned if is_there(one.folder / METRICS) and (rows := read_metrics(one.folder))
    }
    todo = [one for one in planned if not ended(one.folder)]
    rounds, seconds, speeds = dict[str, float](), dict[str, float](), dict[str, float]()
    for one in planned:
        row = last.get(one.folder, {"round": 0, "seconds": 0.0})
        rounds[one.entry] = rounds.get(one.entry, 0) + row["round"]
        seconds[one.entry] = seconds.get(one.entry, 0.0) + row["seconds"]
    speeds = {entry: seconds[entry] / count for entry, count in rounds.items() if count}
    words = f"{len(todo)} of {len(planned)} runs left"
    if not todo or not speeds:
        return words + ("; how long a round takes is not known yet" if todo else "")
    left = sum(
        (one.spec.rounds - last.get(one.folder, {"round": 0})["round"]) * speeds.get(one.entry, max(speeds.values()))
        for one in todo
    )
    guessed = {one.entry for one in todo} - set(speeds)
    hint = f" ({', '.join(sorted(guessed))} counted like the slowest measured)" if guessed else ""
    return f"{words}, about {timedelta(seconds=round(left))} at the speed so far{hint}"
