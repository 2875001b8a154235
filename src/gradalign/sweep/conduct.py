"""Carries a sweep out: the stages of the search, the finalists, the results; alone or beside other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner, NopPruner
from optuna.storages import BaseStorage

from gradalign.report import write_report
from gradalign.runs import METRICS, REPORT, TRIALS
from gradalign.server.runner import RunOptions
from gradalign.sweep import protocol
from gradalign.sweep.grid import describe_point
from gradalign.sweep.plan import SweepPlan, TrialRunner, folder_name
from gradalign.sweep.protocol import FINALISTS, TEST, TEST_BETA, BelowBestPruner, Found, Outcome, Stage
from gradalign.sweep.results import TrialsFile, write_results
from gradalign.sweep.storage import opened
from gradalign.sweep.study import ClaimedTrial, Job, StageStudy, Worker, working_in
from gradalign.tracking.progress import SweepBar, score_words, sweep_bar

_POLL_SECONDS = 0.5
_FINAL = (FINALISTS, TEST, TEST_BETA)


def run_sweep(
    plan: SweepPlan, folder: Path, options: RunOptions, *, storage: str | None, study: str | None, show: bool
) -> dict[str, Any]:
    """Carry a sweep out, or what is left of it, and return its summary.

    Args:
        plan: What is swept.
        folder: Where everything goes; processes that share it share the work.
        options: How trials are run.
        storage: The URL of a database for many machines; None keeps a journal in the folder.
        study: The name under which the storage holds the sweep; None takes the plan's.
        show: Whether to show a progress bar.
    """
    study = study or plan.name
    trials = TrialsFile(folder, plan)
    with (
        opened(folder, storage, study, plan.describe()) as database,
        working_in(folder) as worker,
        sweep_bar(_sizes(plan), show=show) as bar,
    ):
        found = SweepRunner(plan, folder, database, study, worker, options, bar, trials.write).run()
    summary = write_results(folder, plan, found)
    return summary | {"folder": str(folder), "report": _write_report(folder, found)}


def _sizes(plan: SweepPlan) -> list[tuple[str, int, int]]:
    """Return (stage, trials, rounds) as far as they are known before the first trial."""
    sizes = [(name, trials, plan.spec(entry, {}).rounds) for name, entry, trials in plan.search.sizes()]
    rounds = plan.spec(plan.search.entry, {}).rounds
    finalists = min(plan.finalists, sum(trials for name, trials, _ in sizes if name != "baseline"))
    betas = sum(trials for name, trials, _ in sizes if name.startswith("beta-"))
    later = [(FINALISTS, finalists * (plan.seeds - 1), rounds)] if plan.seeds > 1 else []
    figure = [(TEST_BETA, betas, rounds)] if plan.test_beta else []
    return [*sizes, *later, (TEST, finalists * plan.seeds, rounds), *figure]


def _write_report(folder: Path, found: Found) -> str | None:
    """Write the report page of the finalists' test runs that lie in this folder; return where it is."""
    runs = [folder / one.facts["folder"] for one in found.tested if "folder" in one.facts]
    runs = [run for run in runs if (run / METRICS).exists()]
    return str(write_report(runs, folder / REPORT)) if runs else None


class SweepRunner:
    """One process at work on a sweep."""

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        storage: BaseStorage,
        study: str,
        worker: Worker,
        options: RunOptions,
        bar: SweepBar,
        on_outcomes: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self._plan, self._folder, self._storage, self._study = plan, folder, storage, study
        self._worker, self._bar, self._on_outcomes = worker, bar, on_outcomes
        self._runner = TrialRunner(options, plan.stop_after)
        self._outcomes: dict[str, list[Outcome]] = {}
        self._stages = len(_sizes(plan))

    def run(self) -> Found:
        """Go through all stages; what other processes do is waited for, what is done already is taken as it is."""
        tuned, baseline = protocol.tune(self._plan.search, self._search_stage)
        finalists = protocol.finalists_of(tuned, self._plan.finalists)
        seeds = range(self._plan.seed, self._plan.seed + self._plan.seeds)
        pairs = [(one.point, seed) for one in finalists for seed in seeds]
        jobs = [Job(slot=slot, seed=seed, point=point) for slot, (point, seed) in enumerate(pairs)]
        later = [job for job in jobs if job.seed != self._plan.seed]
        validated = self._final_stage(FINALISTS, later, "on held-out training data") if later else []
        tested = self._final_stage(TEST, jobs, "trained on all training data, scored on the test set")
        return Found(
            tuned=tuned,
            baseline=baseline,
            finalists=finalists,
            validated=validated,
            tested=tested,
            tested_betas=self._test_betas(tuned) if self._plan.test_beta else [],
        )

    def _test_betas(self, tuned: Sequence[Outcome]) -> list[Outcome]:
        """Score what the search for β tried on the test set; by now everything is decided."""
        points = [one.point for one in tuned if one.stage in ("beta-coarse", "beta-fine")]
        jobs = [Job(slot=slot, seed=self._plan.seed, point=point) for slot, point in enumerate(points)]
        stage = Stage(name=TEST_BETA, entry=self._plan.search.entry, lists={})
        return self._work(stage, jobs, NopPruner(), "every beta of the search, scored on the test set")

    def _search_stage(self, stage: Stage, known: Sequence[Outcome]) -> list[Outcome]:
        seed = self._plan.seed
        if stage.trials is not None:
            jobs = [Job(slot=slot, seed=seed, point=None) for slot in range(stage.trials)]
        else:
            tried = [outcome.point for outcome in known]
            points = enumerate(stage.points())
            jobs = [Job(slot=slot, seed=seed, point=point) for slot, point in points if point not in tried]
        pruner = BelowBestPruner(self._plan.margin, [outcome.check for outcome in known if outcome.check])
        what = f"{stage.entry} over {', '.join(stage.lists)}"
        what += f" ({describe_point(stage.fixed)})" if stage.fixed else ""
        return self._work(stage, jobs, pruner, what)

    def _final_stage(self, name: str, jobs: list[Job], how: str) -> list[Outcome]:
        stage = Stage(name=name, entry=self._plan.search.entry, lists={})
        seeds = len({job.seed for job in jobs})
        points = len(jobs) // seeds
        best = f"the best {points} trials" if points > 1 else "the best trial"
        what = f"{best} of {stage.entry} with {seeds} seed{'s' * (seeds > 1)}, {how}"
        return self._work(stage, jobs, NopPruner(), what)

    def _work(self, stage: Stage, jobs: list[Job], pruner: BasePruner, what: str) -> list[Outcome]:
        """Do what nobody else does of a stage, wait for the rest, and return all of it."""
        study = StageStudy(
            self._storage,
            f"{self._study}/{stage.name}",
            self._worker,
            lists=stage.lists,
            fixed=stage.fixed,
            pruner=pruner,
            seed=self._plan.seed,
        )
        place = f"stage {len(self._outcomes) + 1} of {self._stages}, {stage.name}"
        self._bar.say(f"{place}: {what}; {len(jobs)} trial{'s' * (len(jobs) != 1)}")
        self._bar.begin(stage.name, len(jobs), self._plan.spec(stage.entry, {}).rounds)
        while True:
            outcomes = self._note(study, stage, jobs)
            claim = study.claim(jobs)
            if claim is not None:
                self._try(study, stage, claim)
            elif sum(one.state != "running" for one in outcomes) == len(jobs):
                break
            else:
                time.sleep(_POLL_SECONDS)
        self._bar.say("  " + _verdict(outcomes))
        return outcomes

    def _note(self, study: StageStudy, stage: Stage, jobs: list[Job]) -> list[Outcome]:
        outcomes = study.outcomes(jobs, stage.name, stage.entry)
        running = sum(one.state == "running" for one in outcomes)
        self._bar.settled(len(outcomes) - running, running)
        self._outcomes[stage.name] = outcomes
        self._on_outcomes([one for stage_outcomes in self._outcomes.values() for one in stage_outcomes])
        return outcomes

    def _try(self, study: StageStudy, stage: Stage, claim: ClaimedTrial) -> None:
        """Do one trial; whatever stops it gives it back."""
        job, test = claim.job, stage.name in (TEST, TEST_BETA)
        searching = stage.name not in _FINAL
        name = folder_name(job.slot, claim.point) + ("" if searching else f"_seed{job.seed}")
        place = Path(TRIALS) / stage.name / name
        try:
            spec = self._plan.spec(stage.entry, claim.point, job.seed, test=test)
            with study.beating(claim):
                ended = self._runner.run(spec, self._folder / place, claim.trial if searching else None, self._bar.row)
        except BaseException:
            study.release(claim)
            raise
        study.settle(claim, ended.state, ended.score, {**ended.facts, "folder": str(place)})


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """Say in one line what a stage found."""
    counts = {state: sum(one.state == state for one in outcomes) for state in ("complete", "pruned", "diverged")}
    words = [f"{counts['complete']} complete"]
    words += [f"{counts['pruned']} ended early"] if counts["pruned"] else []
    words += [f"{counts['diverged']} diverged"] if counts["diverged"] else []
    complete = [one for one in outcomes if one.score is not None]
    if not complete or complete[0].stage in _FINAL:  # of those, means over the seeds are what counts
        return ", ".join(words)
    best = max(complete, key=protocol.rank)
    score = score_words(best.score or 0.0, accuracies=protocol.are_accuracies(outcomes))
    return f"{', '.join(words)}; best {describe_point(best.point)}: validation {score}"
