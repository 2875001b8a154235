"""Carries a sweep out: the stages of the search, the finalists, the results; alone or beside other processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner, NopPruner
from optuna.storages import BaseStorage

from gradalign.report import write_report
from gradalign.runs import METRICS, REPORT, TRIALS
from gradalign.server.runner import RunOptions
from gradalign.sweep import protocol
from gradalign.sweep.grid import Point, describe_point
from gradalign.sweep.plan import SweepPlan, TrialRunner, folder_name
from gradalign.sweep.protocol import FINALISTS, TEST, TEST_BASELINE, TEST_BETA, BelowBestPruner, Found, Outcome, Stage
from gradalign.sweep.results import TrialsFile, write_results
from gradalign.sweep.storage import opened
from gradalign.sweep.study import ClaimedTrial, Job, StageStudy, Worker, working_in
from gradalign.tracking.progress import SweepBar, score_words, sweep_bar

_POLL_SECONDS = 0.5


def run_sweep(
    plan: SweepPlan, folder: Path, options: RunOptions, *, storage: str | None, study: str | None
) -> dict[str, Any]:
    """Carry a sweep out, or what is left of it, and return its summary.

    Processes that share the folder share the work: by a journal in it, or for many machines by the database with the
    URL ``storage``, which holds the sweep under the name ``study`` (None: the plan's).
    """
    with _at_work(plan, folder, options, _sizes(plan), storage=storage, study=study) as process:
        found = process.run()
    summary = write_results(folder, plan, found)
    runs = [folder / one.facts["folder"] for one in (*found.tested, *found.tested_baseline) if "folder" in one.facts]
    runs = [run for run in runs if (run / METRICS).exists()]  # others lie in another process's folder
    report = str(write_report(runs, folder / REPORT)) if runs else None
    return summary | {"folder": str(folder), "report": report}


def run_search(plan: SweepPlan, folder: Path, options: RunOptions) -> tuple[list[Outcome], list[Outcome]]:
    """Carry the search alone out, or what is left of it: no finalists, and no look at the test set.

    Returns the outcomes of the algorithm, and those of the one it takes values from.
    """
    with _at_work(plan, folder, options, _search_sizes(plan)) as process:
        return process.search()


@contextmanager
def _at_work(
    plan: SweepPlan,
    folder: Path,
    options: RunOptions,
    sizes: list[tuple[str, int, int]],
    *,
    storage: str | None = None,
    study: str | None = None,
) -> Iterator[_Process]:
    study = study or plan.name
    with (
        opened(folder, storage, study, plan.describe()) as database,
        working_in(folder) as worker,
        sweep_bar(sizes) as bar,
    ):
        runner = TrialRunner(options, plan.stop_after)
        yield _Process(plan, folder, database, study, worker, runner, bar, len(sizes))


def _search_sizes(plan: SweepPlan) -> list[tuple[str, int, int]]:
    return [(name, trials, plan.spec(entry, {}).rounds) for name, entry, trials in plan.search.sizes()]


def _sizes(plan: SweepPlan) -> list[tuple[str, int, int]]:
    """Return (stage, trials, rounds) as far as they are known before the first trial."""
    sizes = _search_sizes(plan)
    rounds = plan.spec(plan.search.entry, {}).rounds
    finalists = min(plan.finalists, sum(trials for name, trials, _ in sizes if name != "baseline"))
    betas = sum(trials for name, trials, _ in sizes if name in ("beta-coarse", "beta-fine"))
    later = [(FINALISTS, finalists * (plan.seeds - 1), rounds)] if plan.seeds > 1 else []
    baseline = [(TEST_BASELINE, plan.seeds, rounds)] if plan.search.baseline else []
    figure = [(TEST_BETA, betas, rounds)] if plan.test_beta else []
    return [*sizes, *later, (TEST, finalists * plan.seeds, rounds), *baseline, *figure]


def _jobs(pairs: Iterable[tuple[Point | None, int]]) -> list[Job]:
    return [Job(slot=slot, seed=seed, point=point) for slot, (point, seed) in enumerate(pairs)]


@dataclass
class _Process:
    """One process at work on a sweep."""

    plan: SweepPlan
    folder: Path
    storage: BaseStorage
    study: str
    worker: Worker
    runner: TrialRunner
    bar: SweepBar
    stages: int

    def __post_init__(self) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}
        self._trials = TrialsFile(self.folder, self.plan)

    def search(self) -> tuple[list[Outcome], list[Outcome]]:
        """Go through the stages of the search; what other processes do is waited for."""
        return protocol.tune(self.plan.search, self._search_stage)

    def run(self) -> Found:
        """Go through all stages; what other processes do is waited for, what is done already is taken as it is."""
        first, seeds = self.plan.seed, self.plan.seeds
        tuned, baseline = self.search()
        finalists = protocol.finalists_of(tuned, self.plan.finalists)
        jobs = _jobs((one.point, seed) for one in finalists for seed in range(first, first + seeds))
        later = [job for job in jobs if job.seed != first]
        best = f"the best {len(finalists)} trials" if len(finalists) > 1 else "the best trial"
        best += f" of {self.plan.search.entry} with"
        words = f"{best} {seeds - 1} seed{'s' * (seeds > 2)}, on held-out training data"
        validated = self._final_stage(FINALISTS, later, words) if later else []
        words = f"{best} {seeds} seed{'s' * (seeds > 1)}, trained on all training data, scored on the test set"
        tested = self._final_stage(TEST, jobs, words)
        tested_baseline = self._test_baseline(protocol.best_of(baseline, "the baseline"), tested) if baseline else []
        tested_betas: list[Outcome] = []
        if self.plan.test_beta:  # by now everything is decided
            jobs = _jobs((one.point, first) for one in tuned if one.stage in ("beta-coarse", "beta-fine"))
            tested_betas = self._final_stage(TEST_BETA, jobs, "every beta of the search, scored on the test set")
        return Found(
            tuned=tuned,
            baseline=baseline,
            finalists=finalists,
            validated=validated,
            tested=tested,
            tested_baseline=tested_baseline,
            tested_betas=tested_betas,
        )

    def _search_stage(self, stage: Stage, known: Sequence[Outcome]) -> list[Outcome]:
        points = [None] * stage.trials if stage.trials is not None else stage.points()
        tried = [outcome.point for outcome in known]
        jobs = [job for job in _jobs((point, self.plan.seed) for point in points) if job.point not in tried]
        pruner = BelowBestPruner(self.plan.margin, [outcome.check for outcome in known if outcome.check])
        fixed = f" ({describe_point(stage.fixed)})" if stage.fixed else ""
        return self._work(stage, jobs, pruner, f"{stage.entry} over {', '.join(stage.lists)}{fixed}")

    def _test_baseline(self, best: Outcome, tested: Sequence[Outcome]) -> list[Outcome]:
        """Test the tuned algorithm without alignment like the finalists, with as much communication as they had."""
        first, seeds = self.plan.seed, self.plan.seeds
        stage = Stage(name=TEST_BASELINE, entry=best.entry, lists={}, rounds=protocol.equal_rounds(tested, best))
        jobs = _jobs((best.point, seed) for seed in range(first, first + seeds))
        words = f"the best trial of {best.entry} with {seeds} seed{'s' * (seeds > 1)}, as much communication"
        return self._work(stage, jobs, NopPruner(), f"{words}, scored on the test set")

    def _final_stage(self, name: str, jobs: list[Job], what: str) -> list[Outcome]:
        return self._work(Stage(name=name, entry=self.plan.search.entry, lists={}), jobs, NopPruner(), what)

    def _work(self, stage: Stage, jobs: list[Job], pruner: BasePruner, what: str) -> list[Outcome]:
        """Do what nobody else does of a stage, wait for the rest, and return all of it."""
        study = StageStudy(self.storage, f"{self.study}/{stage.name}", self.worker, stage, pruner, self.plan.seed)
        place = f"stage {len(self._outcomes) + 1} of {self.stages}, {stage.name}"
        self.bar.say(f"{place}: {what}; {len(jobs)} trial{'s' * (len(jobs) != 1)}")
        self.bar.begin(stage.name, len(jobs), stage.rounds or self.plan.spec(stage.entry, {}).rounds)
        while True:
            outcomes = self._outcomes[stage.name] = study.outcomes(jobs)
            running = sum(one.state == "running" for one in outcomes)
            self.bar.settled(len(outcomes) - running, running)
            self._trials.write([one for known in self._outcomes.values() for one in known])
            claim = study.claim(jobs)
            if claim is not None:
                self._try(study, stage, claim)
            elif len(outcomes) - running == len(jobs):
                break
            else:
                time.sleep(_POLL_SECONDS)
        self.bar.say("  " + _verdict(outcomes))
        return outcomes

    def _try(self, study: StageStudy, stage: Stage, claim: ClaimedTrial) -> None:
        """Do one trial; whatever stops it gives it back."""
        job, searching = claim.job, stage.name not in protocol.FINAL
        name = folder_name(job.slot, claim.point) + ("" if searching else f"_seed{job.seed}")
        place = Path(TRIALS) / stage.name / name
        try:
            test = stage.name in (TEST, TEST_BASELINE, TEST_BETA)
            spec = self.plan.spec(stage.entry, claim.point, job.seed, test=test, rounds=stage.rounds)
            with study.beating(claim):
                trial = claim.trial if searching else None
                state, score, facts = self.runner.run(spec, self.folder / place, trial, self.bar.row)
        except BaseException:
            study.release(claim)
            raise
        study.settle(claim, state, score, {**facts, "folder": str(place)})


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """Say in one line what a stage found."""
    ends = {"complete": "complete", "pruned": "ended early", "diverged": "diverged"}
    counts = protocol.count_states(outcomes)
    words = ", ".join(f"{counts[end]} {word}" for end, word in ends.items() if counts[end] or end == "complete")
    complete = [one for one in outcomes if one.score is not None]
    if not complete or complete[0].stage in protocol.FINAL:  # of those, means over the seeds are what counts
        return words
    best = max(complete, key=protocol.rank)
    scoring = protocol.scoring_of(outcomes)
    score = score_words(scoring.name, scoring.shown(best.score))
    return f"{words}; best {describe_point(best.point)}: validation {score}"
