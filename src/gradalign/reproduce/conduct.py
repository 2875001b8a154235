"""Carries the list out: settings chosen or taken over, then what is left of the runs, then the verdicts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradalign.comparison import Planned, claimed_folder, plan_comparison, run_comparison
from gradalign.errors import FolderInUseError, GradalignError
from gradalign.recipes import load_recipe
from gradalign.recipes.scale import unscaled
from gradalign.report import Judged, report_gathered
from gradalign.reproduce import outcome
from gradalign.reproduce.plan import SEARCH_SEED, Chosen, Experiment, Scale, Tuning, left_free
from gradalign.reproduce.verdicts import WINDOW
from gradalign.runs import LOCK, REPORT, safe_name, write_json, write_toml, write_whole
from gradalign.runs.locks import is_held
from gradalign.runs.read import Gathered, Run
from gradalign.runs.untrusted import is_there, read_table
from gradalign.server.measure import versions
from gradalign.server.runner import RunOptions
from gradalign.sweep.conduct import run_search
from gradalign.sweep.grid import FINE, PLACES, Lists, Point, stated_value
from gradalign.sweep.plan import plan_sweep
from gradalign.sweep.protocol import at_ends, best_of
from gradalign.tracking.progress import rounds_bar

STAMP, RESULTS, TABLES = "reproduction.toml", "results.json", "tables.md"
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
    seeds: int | None = None
    """How many seeds of each experiment are run now, perhaps more than the plan has; the plan's without a number."""
    device: str | None = None
    """Where models run; without one, where each experiment's recipe says."""
    retune: bool = False
    """Choose settings anew where the plan or the folder has some."""
    _before: dict[str, tuple[int, int] | None] = field(default_factory=dict, init=False)
    """The settings' files as they were at first: those are given up when all is chosen anew, not what came since."""

    def __post_init__(self) -> None:
        self._before.update((one.name, self._file(one)) for one in self.experiments)

    def _file(self, experiment: Experiment) -> tuple[int, int] | None:
        file = self.place(experiment) / outcome.SETTINGS
        found = file.lstat() if is_there(file) else None
        return None if found is None else (found.st_ino, found.st_mtime_ns)

    def place(self, experiment: Experiment) -> Path:
        return self.folder / safe_name(experiment.name)

    def _options(self, experiment: Experiment, *, resume: bool = False) -> RunOptions:
        return replace(self.options, device=self.device or load_recipe(experiment.recipe).device, resume=resume)

    def require_scale(self) -> None:
        """Refuse a folder that holds another scale's runs."""
        stamp = self.folder / STAMP
        known = read_table(stamp).get("scale", self.scale) if is_there(stamp) else self.scale
        if known != self.scale:
            raise GradalignError(f"{self.folder} holds runs of the scale {known}; choose another --out")

    def _stamp(self) -> None:
        """Write down whose folder this is, once all that may be wrong has been looked at."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_toml(self.folder / STAMP, {"scale": self.scale})

    # Settings

    def settings(self, experiment: Experiment, entries: Sequence[str] = ()) -> Settled:
        """Return the settings known of an experiment: written down in its folder, or in the plan, or chosen now.

        Chosen now are those of ``entries``, all without any; first, if unknown, those that the others take values from.
        """
        tune = experiment.at(self.scale).tune
        known = self._known(experiment)
        settled = dict(known)
        missing = {*experiment.entry_names()} - {*known, *(tune.lists if tune else ())}  # the list may have grown
        if experiment.settings_from is not None and missing:
            settled = self._taken_over(experiment, experiment.settings_from) | known
        for entry in to_choose(experiment, tune, settled, entries):
            if tune and entry not in settled:
                settled |= self._search(experiment, tune, entry, settled)
                self._write(experiment, settled)
        there = is_there(self.place(experiment) / outcome.SETTINGS)
        if settled and (self._forgets(experiment) or settled != known or not there):
            self._forget(experiment)
            self._write(experiment, settled)
        return settled

    def _forgets(self, experiment: Experiment) -> bool:
        return self.retune and self._file(experiment) == self._before[experiment.name]

    def _forget(self, experiment: Experiment) -> None:
        """When all is chosen anew, give up what is settled, the plan's too, and the trials, for good and once."""
        if not self._forgets(experiment):
            return
        place = self.place(experiment)
        trials, given_up = (place / name for name in (TUNE, f".{TUNE}-given-up"))
        if any(is_held(lock.parent) for lock in place.rglob(LOCK)):
            raise FolderInUseError(f"another process is at work in {place}")
        if is_there(trials):  # they would be taken as they are
            shutil.rmtree(given_up, ignore_errors=True)
            trials.rename(given_up)
        place.mkdir(parents=True, exist_ok=True)
        write_toml(place / outcome.SETTINGS, {outcome.ANEW: True})
        shutil.rmtree(given_up, ignore_errors=True)

    def _write(self, experiment: Experiment, settled: Settled) -> None:
        self.place(experiment).mkdir(parents=True, exist_ok=True)
        anew = {outcome.ANEW: True} if self._settings(experiment)[1] else {}
        table = anew | {name: one.model_dump() for name, one in settled.items()}
        write_toml(self.place(experiment) / outcome.SETTINGS, table)

    def _settings(self, experiment: Experiment) -> tuple[Settled, bool]:
        return outcome.read_settings(self.place(experiment))

    def _known(self, experiment: Experiment, *, forget: bool = True) -> Settled:
        if forget and self._forgets(experiment):
            return {}
        written, anew = self._settings(experiment)
        return ({} if anew else dict(experiment.at(self.scale).chosen)) | written

    def _taken_over(self, experiment: Experiment, name: str) -> Settled:
        """Return another experiment's settings, and of the entries that are not tuned, those of their algorithms.

        What an entry fixes itself stays its own.
        """
        other, tune = next(one for one in self.experiments if one.name == name), experiment.at(self.scale).tune
        theirs, fixed, taken = self.settings(other, other.algorithms[0]), experiment.fixed(), {}
        for entry in {*theirs, *experiment.entry_names()} - set(tune.lists if tune else ()):
            own = fixed.get(entry, {})
            found = theirs.get(own.get("algorithm", {}).get("name", entry))
            if found is not None:
                free = left_free(own, found.values)
                taken[entry] = Chosen(values=free, source=f"as in {name}: {found.source}")
        return taken

    def _search(self, experiment: Experiment, tune: Tuning, entry: str, settled: Settled) -> Settled:
        """Choose the settings of one entry on validation examples; of one with β, also those of the one without."""
        known = _points(settled)
        recipe = experiment.recipe_at(self.scale, known, tune.budget)
        recipe = replace(recipe, data={**recipe.data, "seed": SEARCH_SEED})
        stated = tune.lists[entry].model_dump(exclude_none=True)
        lists: Lists = {name: stated.pop(name) for name in [*PLACES, FINE] if name in stated}
        spec = unscaled(recipe.tables_for(entry), recipe.source)
        local, lr = spec.local, getattr(spec.local.lr, "value", spec.local.lr)  # of a schedule, what it is about
        held: dict[str, Any] = {"K": [local.steps]} if local.steps else {"epochs": [local.epochs or 1]}
        held |= {"lr": [lr], "batch": [local.batch_size or "whole"], "weight_decay": [local.weight_decay]}
        own = {name: stated_value(spec, name) for name in ("mu", "alpha", "rho", "beta")}
        held |= {name: [value] for name, value in own.items() if value is not None and name != "beta"}
        searched = "beta" in lists or own["beta"] in (None, "auto")
        held |= {} if searched else {"beta": [own["beta"]], FINE: [own["beta"]]}
        plan = plan_sweep(recipe, entry, held | lists, sampler="grid", trials=None, test_beta=False, **stated)
        self._stamp()
        self.say(f"{experiment.name}: choosing settings of {entry} on validation examples")
        self._forget(experiment)
        found = run_search(plan, self.place(experiment) / TUNE / safe_name(entry), self._options(experiment))
        chosen = {}
        for name, outcomes in zip((entry, plan.search.baseline), found, strict=True):
            if name is not None and name not in settled:
                source = (
                    f"chosen on {100 * plan.holdout:g} % of each client's training examples, {outcome.UNSEEN}: the "
                    f"best of {len(outcomes)} trials of length {tune.budget}, seed {SEARCH_SEED}"
                )
                point = best_of(outcomes, "the search").point
                chosen[name] = Chosen(values=point, source="; ".join([source, *at_ends(outcomes, point)]))
        return chosen

    # Runs

    def planned(self, experiment: Experiment, settled: Settled, *, check: bool = True) -> list[Planned]:
        """Return all runs in the order of their worth: seed by seed of each group of entries."""
        recipe = experiment.recipe_at(self.scale, _points(settled))
        seeds = max(experiment.at(self.scale).seeds, self.seeds or 0)
        runs = plan_comparison(recipe, experiment.entry_names(), seeds, self.place(experiment) / RUNS, check=check)
        group = {entry: place for place, group in enumerate(experiment.algorithms) for entry in group}
        return sorted(runs, key=lambda one: (group[one.entry], one.seed))

    def _asked(self, planned: Sequence[Planned], only: Sequence[str]) -> list[Planned]:
        now = sorted({one.seed for one in planned})[: self.seeds]
        return [one for one in planned if one.seed in now and (not only or one.entry in only)]

    def run(self, experiment: Experiment, only: Sequence[str]) -> None:
        """Do what is left of an experiment, or of some of its entries."""
        for group in experiment.algorithms:
            entries = [entry for entry in group if not only or entry in only]
            if not entries:
                continue
            settled = self.settings(experiment, entries)
            planned = self.planned(experiment, settled)
            tune = experiment.at(self.scale).tune
            later = set(tune.lists if tune else ()) - set(settled)  # whose settings are not chosen yet
            outcome.refuse_others(one for one in planned if one.entry not in later and (not only or one.entry in only))
            self._stamp()
            options = self._options(experiment, resume=True)
            for one in (asked := self._asked(planned, only)):
                if one.entry in entries and outcome.runs_left([one]):
                    what = f"{experiment.name}: {one.entry}, seed {one.seed}, {one.spec.rounds:,} rounds"
                    self.say(f"{what}; {outcome.time_left(planned, asked)}")
                    place = self.place(experiment) / RUNS
                    with claimed_folder(place, planned, resume=True, grow=True), rounds_bar(one.spec.rounds) as tick:
                        run_comparison([one], options, on_row=lambda run, row: tick(run.entry, row))

    def state(self, experiment: Experiment, only: Sequence[str] = ()) -> dict[str, Any]:
        """Return what is done of an experiment, or of some entries, and what is left, without reading any data."""
        own, settled = experiment.at(self.scale), self._known(experiment)
        runs = self._asked(every := self.planned(experiment, settled, check=False), only)
        return {
            "name": experiment.name,
            "title": experiment.title,
            "settings_to_choose": to_choose(experiment, own.tune, settled, only),
            "left": outcome.time_left(every, runs),
            "runs": len(runs),
            "runs_left": len(outcome.runs_left(runs)),
            "core_hours": own.hours if len(runs) == own.seeds * len(experiment.entry_names()) else None,
        }

    # Results

    def results(self) -> dict[str, Any]:
        """Write the numbers, tables and page of the runs of this plan that have finished; name those of another."""
        begun = [one for one in self.experiments if is_there(self.place(one) / RUNS)]
        gathered = Gathered()
        every: dict[str, list[Run]] = {}
        unknown: dict[str, str] = {}
        chosen: dict[str, Settled] = {}
        for one in begun:
            try:
                recipe = one.recipe_at(self.scale, _points(settled := self._known(one, forget=False)))
            except GradalignError as error:  # of damaged settings: the others count
                unknown[one.name] = f"left out {one.name}: {error}"
                continue
            chosen[one.name] = settled
            specs = {entry: recipe.spec_for(entry, 0) for entry in one.entry_names()}
            own = outcome.runs_of_plan(self.place(one) / RUNS, specs)
            gathered = Gathered(runs=[*gathered.runs, *own.runs], skipped=[*gathered.skipped, *own.skipped])
            for run in own.runs:
                every.setdefault(f"{one.name}/{run.entry}", []).append(run)
        known = [one for one in begun if one.name in chosen]
        told = (outcome.experiment_result(one, self.place(one), every, chosen[one.name]) for one in known)
        found = [one for one in told if one["algorithms"]]
        results: dict[str, Any] = {
            "scale": self.scale,
            "words": outcome.verdict_words(self.scale, found, self.experiments),
            "experiments": found,
            "left_out": [str(one) for one in gathered.skipped if one.reason.startswith(outcome.OTHER)],
            "damaged": [*unknown.values(), *(str(one) for one in gathered.skipped if one.damaged)],
            "versions": versions(),
        }
        if not found:
            return results | {"report": None}
        write_json(self.folder / RESULTS, results)
        write_whole(self.folder / TABLES, outcome.markdown(found))
        tables = {"claims": outcome.verdict_table(found), "sources": outcome.source_table(found)}
        judged = Judged(words=results["words"], **tables, window=WINDOW)
        page = report_gathered(gathered, self.folder / REPORT, title="The paper's experiments", judged=judged)
        return results | {"report": str(page)}


def to_choose(experiment: Experiment, tune: Tuning | None, settled: Settled, entries: Sequence[str]) -> list[str]:
    """Return whose settings are searched: of those asked for; first, if unknown, where the others take theirs from."""
    lists, asked = list(tune.lists) if tune else [], entries or experiment.entry_names()
    base = lists[:1] if tune and tune.base not in settled else []
    return [name for name in lists if name not in settled and name in (*asked, *base)]


def _points(settled: Settled) -> dict[str, Point]:
    return {name: dict(one.values) for name, one in settled.items()}
