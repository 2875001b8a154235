"""Engines of this machine: this process, or persistent worker processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence

import torch

from gradalign.algorithms.plan import Combination
from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, Gradient, Participant, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup, one_thread
from gradalign.engines import Engine, LocalClients
from gradalign.errors import GradalignError
from gradalign.fast import Group, evaluation_spans, groups
from gradalign.tasks.task import Task


class InProcessEngine(LocalClients):
    """Does the clients' work one group after the other in this process: for GPUs, debuggers and small jobs."""

    def __init__(self, setup: Setup) -> None:
        with one_thread():
            self.group = Group(setup)

    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        """Yield ∇f_i(x), of every client or summed over groups."""
        for group in groups(who, self.group.width(told)):
            with one_thread():
                replies = self.group.gradients(told, group)
            yield from replies

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        """Yield Δ_i, of every client or summed over groups."""
        for group in groups(who, self.group.width(told)):
            with one_thread():
                replies = self.group.train(told, group)
            yield from replies

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""
        examples = self.group.setup.task.test_examples
        if examples is None:
            return None
        with one_thread():
            parts = (self.group.evaluate(point, start, stop) for start, stop in evaluation_spans(len(examples)))
            return sum(parts, Score())


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_engine(
    task: Task,
    local: LocalTraining,
    *,
    seed: int = 0,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    fast: bool = True,
    clients_per_round: int = 0,
    algorithm: Combination | None = None,
) -> Engine:
    """Return the engine for this machine; see ``Setup`` for the rest.

    Args:
        task: What is trained.
        local: How a client trains.
        seed: The seed of everything random.
        workers: Worker processes, one thread each; 0 works in this process, None takes one per core.
            The number changes the speed and never the result.
        device: Where the model runs. Anything but the CPU works in this process.
        fast: Use memory formats, layer orders and batched products that give the same result up to rounding.
        clients_per_round: How many clients a round has; many clients of a small model train together.
        algorithm: What will be trained by, where it is known: workers then start with its classes.
    """
    setup = Setup(
        task=task,
        local=local,
        seed=seed,
        device=device,
        fast=fast,
        clients_per_round=clients_per_round,
        algorithm=algorithm,
    )
    if workers is not None and workers < 0:
        raise GradalignError(f"workers must be 0 (in this process) or more, got {workers}")
    if torch.device(device).type != "cpu" or workers == 0:
        return InProcessEngine(setup)
    if multiprocessing.current_process().daemon:
        if workers is None:
            return InProcessEngine(setup)
        raise GradalignError("this process is itself a daemonic worker and may not start workers; use workers=0")
    from gradalign.engines.pool import PoolEngine  # only those who want workers

    return PoolEngine(setup, workers or available_cores())
