"""Who does which trial and what came of it, in an Optuna storage that any number of processes share.

A trial is claimed by creating it: storages number a study's trials one after the other, also when several processes
create them at once, so of all live trials with one key the lowest number owns it and the others step back. (Optuna's
own queue is not enough: on SQLite two processes can take the same waiting trial.) Trials of processes that have died
are found by their lock, or by a heartbeat that stands still, and are claimed anew.
"""

from __future__ import annotations

import json
import random
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from gradalign.seeding import Purpose, stream_seed
from gradalign.sweep.grid import Point, Value, ordered
from gradalign.sweep.protocol import Outcome, State
from gradalign.sweep.workers import Worker, has_died

BEAT_SECONDS = 15.0
GRACE_SECONDS = 120.0
_SETTLED = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trial that a stage asks for; TPE's have no point before they are claimed."""

    slot: int
    seed: int
    point: Point | None

    @property
    def key(self) -> str:
        """What makes two claims the same."""
        return f"slot {self.slot}" if self.point is None else json.dumps([self.point, self.seed], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ClaimedTrial:
    """A job that is this process's to do."""

    job: Job
    point: Point
    trial: optuna.Trial


class StageStudy:
    """One stage's study."""

    def __init__(
        self,
        storage: RDBStorage,
        study: str,
        worker: Worker,
        *,
        lists: Mapping[str, Sequence[Value]],
        fixed: Point,
        pruner: optuna.pruners.BasePruner,
        seed: int,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._storage, self._worker, self._seed, self._grace = storage, worker, seed, grace
        self._lists, self._fixed = lists, fixed
        self.study = optuna.create_study(
            storage=storage,
            study_name=study,
            direction="maximize",
            load_if_exists=True,
            pruner=pruner,
            sampler=RandomSampler(seed=seed),
        )
        self._id = storage.get_study_id_from_name(study)
        self._seen: dict[int, tuple[Any, float]] = {}

    def trials(self) -> dict[str, FrozenTrial]:
        """Return the owner of every key that has one."""
        owners: dict[str, FrozenTrial] = {}
        for trial in sorted(self._storage.get_all_trials(self._id, deepcopy=False), key=lambda one: one.number):
            key = trial.user_attrs.get("key")
            if key is not None and _live(trial):
                owners.setdefault(key, trial)
        return owners

    def claim(self, jobs: Sequence[Job]) -> ClaimedTrial | None:
        """Take the first job that nobody has; None when all are taken or done."""
        self._release_the_dead()
        owners = self.trials()
        chance = random.Random()
        job = next((job for job in jobs if job.key not in owners), None)
        while job is not None:
            number = self._storage.create_new_trial(self._id, self._template(job))
            owners = self.trials()
            if owners[job.key]._trial_id == number:
                return self._begin(job, number)
            # Another process was first. Try anywhere, lest the two go on in step.
            self._storage.set_trial_state_values(number, TrialState.FAIL)
            free = [job for job in jobs if job.key not in owners]
            job = chance.choice(free) if free else None
        return None

    def _template(self, job: Job) -> FrozenTrial:
        attributes: dict[str, Any] = {"key": job.key, "slot": job.slot, "seed": job.seed, "worker": self._worker.name}
        if job.point is None:
            return create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        varied = {name: job.point[name] for name in self._lists}
        return create_trial(
            state=TrialState.RUNNING,
            params=varied,
            distributions={name: CategoricalDistribution(tuple(self._lists[name])) for name in varied},
            user_attrs=attributes | {"point": job.point},
        )

    def _begin(self, job: Job, number: int) -> ClaimedTrial:
        sampler: BaseSampler = RandomSampler(seed=self._seed)
        if job.point is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                # A sampler for each slot: what it draws depends on the trials before it, not on who asks or restarts.
                number_seed = stream_seed(self._seed, Purpose.SWEEP, job.slot) % 2**32
                sampler = TPESampler(seed=number_seed, constant_liar=True)
        self.study.sampler = sampler
        self.study.get_trials(deepcopy=False)  # lets the study's cache know of the new trial
        trial = optuna.Trial(self.study, number)
        if job.point is not None:
            return ClaimedTrial(job=job, point=job.point, trial=trial)
        suggested = {name: _suggested(trial, name, values) for name, values in self._lists.items()}
        point = ordered(self._fixed | suggested)
        trial.set_user_attr("point", point)
        return ClaimedTrial(job=job, point=point, trial=trial)

    def settle(self, claim: ClaimedTrial, state: State, score: float | None, facts: Mapping[str, Any]) -> None:
        """Write down how a trial ended."""
        with suppress(UpdateFinishedTrialError):  # given up for dead meanwhile, and done by someone else
            claim.trial.set_user_attr("facts", dict(facts))
            if state == "diverged":
                claim.trial.set_user_attr("failure", "diverged")
            states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "diverged": TrialState.FAIL}
            values = None if score is None else [score]
            self._storage.set_trial_state_values(claim.trial._trial_id, states[state], values)

    def release(self, claim: ClaimedTrial) -> None:
        """Give a claimed job back, undone."""
        with suppress(UpdateFinishedTrialError, StorageInternalError):
            self._storage.set_trial_state_values(claim.trial._trial_id, TrialState.FAIL)

    def outcomes(self, jobs: Sequence[Job], stage: str, entry: str) -> list[Outcome]:
        """Return what is known of the jobs, in their order."""
        owners = self.trials()
        return [_outcome(owners[job.key], stage, entry) for job in jobs if job.key in owners]

    @contextmanager
    def beating(self, claim: ClaimedTrial) -> Iterator[None]:
        """Show other processes that this trial is alive while the block runs."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            while not ended.wait(BEAT_SECONDS):
                count += 1
                with suppress(Exception):  # a storage that is away for a moment is no reason to end a trial
                    self._storage.set_trial_user_attr(claim.trial._trial_id, "beat", count)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _release_the_dead(self) -> None:
        """Mark the running trials of processes that have ended as failed, so that they are claimed again."""
        for trial in self._storage.get_all_trials(self._id, deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_dead(trial):
                with suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get("worker")
        if worker is None or worker == self._worker.name:
            return False
        known = has_died(self._worker.folder, worker)
        if known is not None:
            return known
        beat, now = trial.user_attrs.get("beat"), time.monotonic()
        before = self._seen.setdefault(trial.number, (beat, now))
        if before[0] != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - before[1] > self._grace  # by this process's own clock: machines' clocks differ


def _live(trial: FrozenTrial) -> bool:
    return trial.state in (TrialState.RUNNING, *_SETTLED) or "failure" in trial.user_attrs


def _suggested(trial: optuna.Trial, name: str, values: Sequence[Value]) -> Value:
    distribution = tpe_distribution(name, values)
    if isinstance(distribution, FloatDistribution):
        return trial.suggest_float(name, distribution.low, distribution.high, log=True)
    chosen: Value = trial.suggest_categorical(name, list(values))  # type: ignore[assignment]  # no None among them
    return chosen


def tpe_distribution(name: str, values: Sequence[Value]) -> BaseDistribution:
    """Return what TPE draws from: anything between the ends of a list of positive numbers, else the list's values."""
    numbers = [value for value in values if not isinstance(value, str)]
    if name in ("K", "epochs", "batch") or len(numbers) < len(values) or min(numbers) <= 0 or len(set(numbers)) < 2:
        return CategoricalDistribution(tuple(values))
    return FloatDistribution(float(min(numbers)), float(max(numbers)), log=True)


def _outcome(trial: FrozenTrial, stage: str, entry: str) -> Outcome:
    attributes = trial.user_attrs
    reports = sorted(trial.intermediate_values.items())
    state: Any = "diverged" if "failure" in attributes else _SETTLED.get(trial.state, "running")
    return Outcome(
        stage=stage,
        slot=attributes["slot"],
        entry=entry,
        seed=attributes["seed"],
        point=attributes.get("point", {}),
        state=state,
        score=trial.value if trial.state == TrialState.COMPLETE else None,
        check=reports[0] if reports else None,
        facts={"trial": trial.number, "worker": attributes["worker"], **attributes.get("facts", {})},
    )
