"""The local engine: this process, or persistent worker processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from gradalign.algorithms.plan import Plan, Shift
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientGradient, ClientUpdate, GroupGradient, GroupUpdate, Score
from gradalign.client.flat import Point
from gradalign.engines import Engine
from gradalign.engines.pool import PoolEngine
from gradalign.errors import GradalignError
from gradalign.fast.group import GroupTrainer, evaluation_rows, groups
from gradalign.tasks.task import Task


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the block.

    Workers have one thread each, and sums over several threads round differently: this is what makes the
    in-process engine give the workers' bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class InProcessEngine:
    """Does the clients' work one group after the other in this process: for GPUs, debuggers and small jobs."""

    def __init__(
        self,
        task: Task,
        local: LocalTraining,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        fast: bool = True,
        clients_per_round: int = 0,
    ) -> None:
        self.task = task
        with one_thread():
            self.trainer = GroupTrainer(task, local, seed, device, fast=fast, clients_per_round=clients_per_round)
        self._shelves: dict[int, Tensor] = {}

    def gradients(
        self, point: Point, clients: Sequence[int], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[int, ClientGradient]]:
        """Yield (client, ∇f_i(x)) for every client."""
        for group in groups(clients, self.trainer.width):
            with one_thread():
                replies = self.trainer.gradients(point, group, round_index=round_index, limit=limit)
            yield from zip(group, replies, strict=True)

    def train(
        self, point: Point, plans: Iterable[tuple[int, Plan]], *, round_index: int, lr: float
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every planned client."""
        for group in groups(plans, self.trainer.width):
            clients = [client for client, _ in group]
            with one_thread():
                own = [plan for _, plan in group]
                replies = self.trainer.train(point, clients, own, round_index=round_index, lr=lr)
            yield from zip(clients, replies, strict=True)

    def sums(self, shifted: bool) -> bool:
        """Return whether adding up inside groups gains anything for this task."""
        return self.trainer.sums(shifted)

    def keeps_gradients(self, clients: Sequence[int]) -> bool:
        """Return whether these clients' gradients can wait on shelves for a shift."""
        return self.trainer.shelf_length(clients) is not None

    def gradient_sums(
        self, point: Point, clients: Sequence[tuple[int, float]], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[list[int], GroupGradient]]:
        """Yield (clients, Σ w_i ∇f_i(x)) for groups of clients; keep each one's own."""
        out, length = torch.empty_like(point.x), self.trainer.shelf_length([client for client, _ in clients]) or 0
        self._shelves = {client: torch.empty(length, dtype=out.dtype) for client, _ in clients}
        for group in groups(clients, self.trainer.sum_width):
            members, weights = [client for client, _ in group], [weight for _, weight in group]
            shelves = [self._shelves[client] for client in members]
            with one_thread():
                reply = self.trainer.gradient_sum(
                    point, members, weights, round_index=round_index, limit=limit, out=out, shelves=shelves
                )
            yield members, reply

    def train_sums(
        self,
        point: Point,
        plans: Iterable[tuple[int, Plan, float]],
        *,
        round_index: int,
        lr: float,
        shift: Shift | None = None,
    ) -> Iterator[tuple[list[int], GroupUpdate]]:
        """Yield (clients, Σ w_i Δ_i) for groups of clients."""
        out, along = torch.empty_like(point.x), 0.0 if shift is None else shift.along
        start = point.moved(None if shift is None else shift.common)
        for group in groups(plans, self.trainer.sum_width):
            clients, own = [client for client, _, _ in group], [plan for _, plan, _ in group]
            shelves = [] if shift is None else [self._shelves[client] for client in clients]
            with one_thread():
                reply = self.trainer.train_sum(
                    start,
                    clients,
                    own,
                    [weight for _, _, weight in group],
                    round_index=round_index,
                    lr=lr,
                    out=out,
                    along=along,
                    shelves=shelves,
                )
            yield clients, reply

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""
        examples = self.task.test_examples
        if examples is None:
            return None
        with one_thread():
            chunks = evaluation_rows(len(examples))
            parts = (self.trainer.evaluate(point, int(rows[0]), int(rows[-1]) + 1) for rows in chunks)
            return sum(parts, Score())

    def close(self) -> None:
        """Nothing to release."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
) -> Engine:
    """Return the engine for this machine.

    Args:
        task: What is trained.
        local: How a client trains.
        seed: The seed of everything random.
        workers: Worker processes, one thread each; 0 works in this process, None takes one per core.
            The number changes the speed and never the result.
        device: Where the model runs. Anything but the CPU works in this process.
        fast: Use memory formats, layer orders and batched products that give the same result up to rounding.
        clients_per_round: How many clients a round has; many clients of a small model train together.
    """
    if workers is not None and workers < 0:
        raise GradalignError(f"workers must be 0 (in this process) or more, got {workers}")
    if torch.device(device).type != "cpu" or workers == 0:
        return InProcessEngine(task, local, seed, device, fast=fast, clients_per_round=clients_per_round)
    if multiprocessing.current_process().daemon:
        if workers is None:
            return InProcessEngine(task, local, seed, device, fast=fast, clients_per_round=clients_per_round)
        raise GradalignError("this process is itself a daemonic worker and may not start workers; use workers=0")
    return PoolEngine(task, local, seed, workers or available_cores(), fast=fast, clients_per_round=clients_per_round)
