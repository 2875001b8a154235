"""Engines of this machine: this process, or persistent worker processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from gradalign.client.exchange import Broadcast, ClientScore, Gradient, Participant, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup, one_thread
from gradalign.engines import Engine
from gradalign.errors import GradalignError, whole
from gradalign.fast import Group, Item, evaluation_spans, groups


class InProcessEngine(Engine):
    """Does the clients' work one group after the other in this process: for GPUs, debuggers and small jobs."""

    def __init__(self, setup: Setup) -> None:
        with one_thread():
            self.group = Group(setup)

    def _replies(self, work: Callable[..., list[Item]], told: Broadcast, who: Iterable[Participant]) -> Iterator[Item]:
        for group in groups(who, self.group.width(told)):
            with one_thread():
                replies = work(told, group)
            yield from replies

    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        return self._replies(self.group.gradients, told, who)

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        return self._replies(self.group.train, told, who)

    def evaluate(self, point: Point) -> Score | None:
        examples = self.group.setup.task.test_examples
        if examples is None:
            return None
        with one_thread():
            parts = (self.group.evaluate(point, start, stop) for start, stop in evaluation_spans(len(examples)))
            return sum(parts, Score())

    def evaluate_clients(
        self, told: Broadcast, who: Sequence[Participant], *, tuned: bool = False
    ) -> Iterator[ClientScore]:
        for one in who:
            with one_thread():
                score = self.group.score_client(told, one, tuned=tuned)
            if score is not None:
                yield score


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_engine(setup: Setup, workers: int | None = None) -> Engine:
    """Return the engine for this machine.

    ``workers`` are processes with one thread each; 0 works in this process, None takes one per core. The number changes
    the speed and never the result. Any device but the CPU works in this process.
    """
    if torch.device(setup.device).type != "cpu" or (workers is not None and whole("workers", workers, 0) == 0):
        return InProcessEngine(setup)
    if multiprocessing.current_process().daemon:
        if workers is None:
            return InProcessEngine(setup)
        raise GradalignError("this process is itself a daemonic worker and may not start workers; use workers=0")
    from gradalign.engines.pool import PoolEngine  # only those who want workers

    return PoolEngine(setup, workers or available_cores())
