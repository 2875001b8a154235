"""Who does which trial and what came of it, in an Optuna storage that any number of processes share.

A stage's jobs lie in its study as waiting trials. Who sets one to running does it: the storage grants that once. Two
processes may write down the same job; then the trial with the lowest number counts. Trials of processes that have died
are told by the lock each process holds in the sweep's folder, on other machines by Optuna's heartbeat in the database;
they count as failed, and their jobs are written down anew.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState, create_trial

from gradalign.errors import NotWrittenError
from gradalign.runs import SWEEP_WORKERS
from gradalign.runs.locks import is_held, locked
from gradalign.seeding import Purpose, stream_seed
from gradalign.sweep.grid import Point, Value, ordered
from gradalign.sweep.protocol import Outcome, Stage, State

# How long a trial may run without its process's name, which is written the moment after it was taken.
_SIGNING_SECONDS = 5.0
_ENDS: dict[State, TrialState] = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "diverged": TrialState.FAIL,
}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process at work on a sweep."""

    name: str
    folder: Path


@contextmanager
def working_in(folder: Path) -> Iterator[Worker]:
    """Be a worker of this sweep inside the block: hold a lock that tells the others who is alive."""
    host = re.sub(r"[^\w.-]+", "-", platform.node()) or "host"
    worker = Worker(name=f"{host}-{os.getpid()}-{secrets.token_hex(4)}", folder=folder)
    own = folder / SWEEP_WORKERS / worker.name
    with locked(own):
        yield worker
        # Only after a good end: else the free lock tells the others that whatever was begun is theirs to do.
        shutil.rmtree(own, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trial that a stage asks for; TPE's have no point before they are claimed."""

    slot: int
    seed: int
    point: Point | None

    @property
    def key(self) -> str:
        return f"slot {self.slot}" if self.point is None else json.dumps([self.point, self.seed], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ClaimedTrial:
    """A job that is this process's to do."""

    job: Job
    point: Point
    trial: optuna.Trial


class StageStudy:
    def __init__(
        self, storage: BaseStorage, study: str, worker: Worker, stage: Stage, pruner: BasePruner, seed: int
    ) -> None:
        self._storage, self._worker, self._stage, self._pruner, self._seed = storage, worker, stage, pruner, seed
        self._study = optuna.create_study(storage=storage, study_name=study, direction="maximize", load_if_exists=True)
        self._id = storage.get_study_id_from_name(study)
        self._unsigned: dict[int, float] = {}

    def _trials(self) -> dict[str, FrozenTrial]:
        """Return the trial that counts for each job: of those that did not fail, the one with the lowest number."""
        found: dict[str, FrozenTrial] = {}
        for trial in sorted(self._storage.get_all_trials(self._id, deepcopy=False), key=lambda one: one.number):
            counts = trial.state != TrialState.FAIL or "failure" in trial.user_attrs
            if counts and "key" in trial.user_attrs:
                found.setdefault(trial.user_attrs["key"], trial)
        return found

    def claim(self, jobs: Sequence[Job]) -> ClaimedTrial | None:
        """Take the first job that nobody has; None when all are taken or done."""
        self._fail_the_dead()
        known = self._trials()
        missing = [job for job in jobs if job.key not in known]
        for job in missing:
            self._storage.create_new_trial(self._id, self._waiting(job))
        known = self._trials() if missing else known  # another process may have been first
        for job in jobs:
            trial = known.get(job.key)
            if trial is not None and trial.state == TrialState.WAITING and self._take(trial._trial_id):
                return self._begin(job, trial._trial_id)
        return None

    def _waiting(self, job: Job) -> FrozenTrial:
        attributes: dict[str, Any] = {"key": job.key, "slot": job.slot, "seed": job.seed}
        if job.point is None:
            return create_trial(state=TrialState.WAITING, user_attrs=attributes)
        return create_trial(
            state=TrialState.WAITING,
            params={name: job.point[name] for name in self._stage.lists},
            distributions={name: CategoricalDistribution(tuple(own)) for name, own in self._stage.lists.items()},
            user_attrs=attributes | {"point": job.point},
        )

    def _take(self, number: int) -> bool:
        """Make a waiting trial this process's own, and sign it; of several processes one can."""
        with suppress(UpdateFinishedTrialError):
            if self._storage.set_trial_state_values(number, TrialState.RUNNING):
                if isinstance(self._storage, RDBStorage):
                    self._storage.record_heartbeat(number)
                self._storage.set_trial_user_attr(number, "worker", self._worker.name)
                return True
        return False

    def _begin(self, job: Job, number: int) -> ClaimedTrial:
        # A sampler for each slot: what it draws depends on the trials before it, not on who asks or restarts.
        sampler = TPESampler(seed=stream_seed(self._seed, Purpose.SWEEP, job.slot) % 2**32, constant_liar=True)
        # And a study object: it shows its sampler the trials as they were at its first draw.
        study = optuna.load_study(
            storage=self._storage, study_name=self._study.study_name, sampler=sampler, pruner=self._pruner
        )
        study.get_trials(deepcopy=False)  # lets its cache know of the new trial
        trial = optuna.Trial(study, number)
        point = job.point
        if point is None:
            suggested = {name: _suggested(trial, name, values) for name, values in self._stage.lists.items()}
            point = ordered(self._stage.fixed | suggested)
            trial.set_user_attr("point", point)
        return ClaimedTrial(job=job, point=point, trial=trial)

    def settle(self, claim: ClaimedTrial, state: State, score: float | None, facts: Mapping[str, Any]) -> None:
        """Write down how a trial ended."""
        with suppress(UpdateFinishedTrialError):  # given up for dead meanwhile, and done by someone else
            claim.trial.set_user_attr("facts", dict(facts))
            if state == "diverged":
                claim.trial.set_user_attr("failure", "diverged")
            values = None if score is None else [score]
            self._storage.set_trial_state_values(claim.trial._trial_id, _ENDS[state], values)

    def release(self, claim: ClaimedTrial) -> None:
        """Give a claimed job back, undone."""
        with suppress(UpdateFinishedTrialError, StorageInternalError, NotWrittenError):
            self._storage.set_trial_state_values(claim.trial._trial_id, TrialState.FAIL)

    def outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Return what is known of the jobs that were begun, in their order."""
        known = self._trials()
        trials = [known[job.key] for job in jobs if job.key in known]
        return [_outcome(trial, self._stage) for trial in trials if trial.state != TrialState.WAITING]

    @contextmanager
    def beating(self, claim: ClaimedTrial) -> Iterator[None]:
        """Show processes on other machines that this trial is alive while the block runs."""
        storage, ended = self._storage, threading.Event()
        if not isinstance(storage, RDBStorage):  # all share the folder, and see the lock
            yield
            return

        def beat() -> None:
            while not ended.wait(storage.get_heartbeat_interval()):
                with suppress(Exception):  # a storage that is away for a moment is no reason to end a trial
                    storage.record_heartbeat(claim.trial._trial_id)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _fail_the_dead(self) -> None:
        """Mark the running trials of processes that have ended as failed, so that their jobs are free again."""
        fail_stale_trials(self._study)  # those without a heartbeat, in a database
        for trial in self._storage.get_all_trials(self._id, deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_dead(trial):
                with suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        name = trial.user_attrs.get("worker")
        if name is None:  # taken this very moment, or by a process that died before it could sign
            return time.monotonic() - self._unsigned.setdefault(trial.number, time.monotonic()) > _SIGNING_SECONDS
        own = self._worker.folder / SWEEP_WORKERS / name
        if own.is_dir():
            return name != self._worker.name and not is_held(own)
        return not isinstance(self._storage, RDBStorage)  # of a journal all processes work in its folder


def _suggested(trial: optuna.Trial, name: str, values: Sequence[Value]) -> Value:
    """Return TPE's draw: between the ends of a list of positive numbers, else one of the list's values."""
    numbers = [value for value in values if not isinstance(value, str)]
    if name in ("K", "epochs", "batch") or len(numbers) < len(values) or min(numbers) <= 0 or len(set(numbers)) < 2:
        chosen: Value = trial.suggest_categorical(name, list(values))  # type: ignore[assignment]  # no None among them
        return chosen
    return trial.suggest_float(name, float(min(numbers)), float(max(numbers)), log=True)


def _outcome(trial: FrozenTrial, stage: Stage) -> Outcome:
    attributes = trial.user_attrs
    ends: dict[TrialState, State] = {end: state for state, end in _ENDS.items()}
    return Outcome(
        stage=stage.name,
        slot=attributes["slot"],
        entry=stage.entry,
        seed=attributes["seed"],
        point=attributes.get("point", {}),
        state=ends.get(trial.state, "running"),
        score=trial.value if trial.state == TrialState.COMPLETE else None,
        check=min(trial.intermediate_values.items(), default=None),
        facts={"trial": trial.number, "worker": attributes.get("worker", ""), **attributes.get("facts", {})},
    )
