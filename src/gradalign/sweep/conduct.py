"""Carries a sweep out: the stages of the search, then the finalists, alone or beside other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna.pruners import BasePruner, NopPruner
from optuna.storages import RDBStorage

from gradalign.api import RunOptions
from gradalign.runs import TRIALS
from gradalign.sweep.grid import describe_point
from gradalign.sweep.plan import SweepPlan
from gradalign.sweep.protocol import Outcome, Stage, are_accuracies, finalists_of, rank, tune
from gradalign.sweep.pruner import BelowBestPruner
from gradalign.sweep.study import ClaimedTrial, Job, StageStudy
from gradalign.sweep.trial import TrialRunner, folder_name
from gradalign.sweep.workers import Worker
from gradalign.tracking.sweep_progress import SweepBar, score_words

_POLL_SECONDS = 0.5
FINALISTS, TEST, TEST_BETA = "finalists", "test", "test-beta"
_FINAL = (FINALISTS, TEST, TEST_BETA)


@dataclass(frozen=True, kw_only=True)
class Found:
    """All outcomes of a sweep.

    Attributes:
        tuned: The search's trials of the algorithm.
        baseline: The search's trials of the algorithm without alignment.
        finalists: The best of ``tuned``, best first.
        validated: The finalists with the further seeds, on held-out training data.
        tested: The finalists with all seeds, trained on all training data and scored on the test set.
        tested_betas: Every β of the search likewise, with one seed, when it was asked for.
    """

    tuned: list[Outcome]
    baseline: list[Outcome]
    finalists: list[Outcome]
    validated: list[Outcome]
    tested: list[Outcome]
    tested_betas: list[Outcome]

    def all(self) -> list[Outcome]:
        """Return every trial, in the order of the stages."""
        return [*self.baseline, *self.tuned, *self.validated, *self.tested, *self.tested_betas]


class SweepRunner:
    """One process at work on a sweep."""

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        storage: RDBStorage,
        study: str,
        worker: Worker,
        where: RunOptions,
        bar: SweepBar,
        on_outcomes: Callable[[Sequence[Outcome]], None] | None = None,
    ) -> None:
        self._plan, self._folder, self._storage, self._study = plan, folder, storage, study
        self._worker, self._bar, self._on_outcomes = worker, bar, on_outcomes
        self._runner = TrialRunner(where, plan.stop_after)
        self._outcomes: dict[str, list[Outcome]] = {}
        self._stages = len(plan.search.sizes()) + (2 if plan.seeds > 1 else 1) + plan.test_beta

    def run(self) -> Found:
        """Go through all stages; what other processes do is waited for, what is done already is taken as it is."""
        tuned, baseline = tune(self._plan.search, self._search_stage)
        finalists = finalists_of(tuned, self._plan.finalists)
        seeds = range(self._plan.seed, self._plan.seed + self._plan.seeds)
        jobs = [
            Job(slot=place * len(seeds) + i, seed=seed, point=one.point)
            for place, one in enumerate(finalists)
            for i, seed in enumerate(seeds)
        ]
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
        book = StageStudy(
            self._storage,
            f"{self._study}/{stage.name}",
            self._worker,
            lists=stage.lists,
            fixed=stage.fixed,
            pruner=pruner,
            seed=self._plan.seed,
        )
        number = len(self._outcomes) + 1
        self._bar.say(
            f"stage {number} of {self._stages}, {stage.name}: {what}; {len(jobs)} trial{'s' * (len(jobs) != 1)}"
        )
        rounds = self._plan.spec(stage.entry, {}).rounds
        self._bar.begin(stage.name, len(jobs), rounds)
        while True:
            outcomes = self._note(book, stage, jobs)
            claim = book.claim(jobs)
            if claim is not None:
                self._try(book, stage, claim)
            elif sum(one.state != "running" for one in outcomes) == len(jobs):
                break
            else:
                time.sleep(_POLL_SECONDS)
        self._bar.say("  " + _verdict(outcomes))
        return outcomes

    def _note(self, book: StageStudy, stage: Stage, jobs: list[Job]) -> list[Outcome]:
        outcomes = book.outcomes(jobs, stage.name, stage.entry)
        running = sum(one.state == "running" for one in outcomes)
        self._bar.settled(len(outcomes) - running, running)
        self._outcomes[stage.name] = outcomes
        if self._on_outcomes is not None:
            self._on_outcomes([one for stage_outcomes in self._outcomes.values() for one in stage_outcomes])
        return outcomes

    def _try(self, book: StageStudy, stage: Stage, claim: ClaimedTrial) -> None:
        """Do one trial; whatever stops it gives it back."""
        job, test = claim.job, stage.name in (TEST, TEST_BETA)
        searching = stage.name not in _FINAL
        name = folder_name(job.slot, claim.point) + ("" if searching else f"_seed{job.seed}")
        place = Path(TRIALS) / stage.name / name
        try:
            spec = self._plan.spec(stage.entry, claim.point, job.seed, test=test)
            with book.beating(claim):
                ended = self._runner.run(spec, self._folder / place, claim.trial if searching else None, self._bar.row)
        except BaseException:
            book.release(claim)
            raise
        book.settle(claim, ended.state, ended.score, {**ended.facts, "folder": str(place)})


def _verdict(outcomes: Sequence[Outcome]) -> str:
    """Say in one line what a stage found."""
    counts = {state: sum(one.state == state for one in outcomes) for state in ("complete", "pruned", "diverged")}
    words = [f"{counts['complete']} complete"]
    words += [f"{counts['pruned']} ended early"] if counts["pruned"] else []
    words += [f"{counts['diverged']} diverged"] if counts["diverged"] else []
    complete = [one for one in outcomes if one.score is not None]
    if not complete or complete[0].stage in _FINAL:  # of those, means over the seeds are what counts
        return ", ".join(words)
    best = max(complete, key=rank)
    score = score_words(best.score or 0.0, accuracies=are_accuracies(outcomes))
    return f"{', '.join(words)}; best {describe_point(best.point)}: validation {score}"
