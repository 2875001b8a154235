"""Persistent worker processes with one thread each, fed through pipes; vectors go through shared memory.

The result does not depend on the number of workers: a client's work is the same single-threaded arithmetic
wherever it is done, and replies are handed on in client order. A worker that dies is replaced and its job done again
from the same inputs, so to the same bits.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
import torch.multiprocessing

from gradalign import stopping
from gradalign.algorithms.plan import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientGradient, ClientUpdate, GroupGradient, GroupUpdate, Score
from gradalign.client.flat import Point
from gradalign.engines.jobs import (
    EvaluationJob,
    Failure,
    GradientJob,
    GradientSumJob,
    Job,
    SharedBuffers,
    SumJob,
    TrainJob,
    for_whom,
)
from gradalign.engines.worker import start_method, work
from gradalign.errors import GradalignError
from gradalign.fast.group import GroupTrainer, evaluation_rows, groups
from gradalign.seeding import quiet_generators
from gradalign.tasks.task import Task

ATTEMPTS = 3


@dataclass
class _Assignment:
    """One job on its way: its place in the order, and how often it was tried."""

    place: int
    job: Job
    attempts: int = 0


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    busy: _Assignment | None = field(default=None)


class PoolEngine:
    """N worker processes behind the Engine interface."""

    def __init__(
        self,
        task: Task,
        local: LocalTraining,
        seed: int,
        workers: int,
        *,
        fast: bool = True,
        clients_per_round: int = 0,
        method: str | None = None,
    ) -> None:
        self.task, self.local, self.seed, self.fast, self.clients_per_round = task, local, seed, fast, clients_per_round
        self._context: Any = torch.multiprocessing.get_context(method or start_method())
        # Replies wait in slots for their turn; a few more slots than workers keep all busy when clients differ.
        self._slots = 2 * workers + 2
        trainer = GroupTrainer(task, local, seed, fast=fast, clients_per_round=clients_per_round)
        self._trainer = trainer
        forked = self._context.get_start_method() == "fork"
        self._buffers = SharedBuffers(
            trainer.one.flat.read(), self._slots, max(trainer.width, trainer.sum_width), forked=forked
        )
        self._shelf_of: dict[int, int] = {}
        self._wanted = workers
        self._workers: list[_Worker] = []
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        while len(self._workers) < self._wanted:
            self._workers.append(self._hire())

    def _hire(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        inherited = [ours, *(worker.pipe for worker in self._workers)] if forked else []
        arguments = (
            theirs,
            inherited,
            os.getpid(),
            self.task,
            self.local,
            self.seed,
            self.fast,
            self.clients_per_round,
            self._buffers,
        )
        process = self._context.Process(target=work, args=arguments, daemon=True, name="gradalign-worker")
        try:
            with quiet_generators(), warnings.catch_warnings():
                # Python >= 3.12 warns about forking beside threads; a worker touches none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                with stopping.held(), stopping.blocked():  # until the worker has said what signals do to it
                    process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise GradalignError(
                f"the task cannot be sent to a worker process ({error}); define its model, loss and data at the top "
                "level of a module, or use workers=0"
            ) from error
        theirs.close()
        return _Worker(process, ours)

    def _spawn_hint(self) -> str:
        spawned = self._context.get_start_method() == "spawn"
        return '; a script that starts workers needs if __name__ == "__main__"' if spawned else ""

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers now alive."""
        return [worker.process.pid for worker in self._workers if worker.process.is_alive()]

    def _dismiss(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)  # first, so that an interrupt in here leaves no worker to dismiss twice
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()

    def _replace(self, worker: _Worker) -> _Worker:
        self._dismiss(worker)
        self._fill()
        return self._workers[-1]

    def _assign(self, worker: _Worker, task: _Assignment) -> None:
        while True:
            task.attempts += 1
            if task.attempts > ATTEMPTS:
                raise GradalignError(
                    f"{for_whom(task.job)} ended its worker process {ATTEMPTS} times; "
                    "it may need more memory than there is, or crash" + self._spawn_hint()
                )
            worker.busy = task
            try:
                worker.pipe.send(task.job)
                return
            except OSError:
                worker = self._replace(worker)

    def _answers(self) -> Iterator[tuple[_Assignment, Any]]:
        """Wait for at least one worker; yield every answer that is there. A dead worker's job is given out again."""
        busy = {worker.pipe: worker for worker in self._workers if worker.busy is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            task = worker.busy
            if task is None:
                continue
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._assign(self._replace(worker), task)
                continue
            worker.busy = None
            yield task, answer

    def _stream(self, jobs: Iterator[Callable[[int], Job]]) -> Iterator[tuple[Any, Any]]:
        """Give out jobs as slots and workers become free; yield (job, answer) in the jobs' order."""
        free = deque(range(self._slots))
        answered: dict[int, tuple[Job, Any]] = {}
        given, handed_on, exhausted = 0, 0, False
        self._fill()
        try:
            while True:
                idle = [worker for worker in self._workers if worker.busy is None]
                while idle and free and not exhausted:
                    make = next(jobs, None)
                    if make is None:
                        exhausted = True
                        break
                    self._assign(idle.pop(), _Assignment(given, make(free.popleft())))
                    given += 1
                if handed_on in answered:
                    job, answer = answered.pop(handed_on)
                    if isinstance(answer, Failure):
                        raise answer.as_error()
                    yield job, job.collect(answer, self._buffers)
                    free.append(job.slot)
                    handed_on += 1
                elif handed_on == given and exhausted:
                    return
                else:
                    for task, answer in self._answers():
                        answered[task.place] = (task.job, answer)
        finally:
            # Left early (an error, an interrupt): unfinished work is for nobody. Successors come when needed.
            for worker in [w for w in self._workers if w.busy is not None]:
                self._dismiss(worker)

    def gradients(
        self, point: Point, clients: Sequence[int], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[int, ClientGradient]]:
        """Yield (client, ∇f_i(x)) for every client."""
        self._buffers.point.copy_(point)

        def maker(group: list[int]) -> Callable[[int], Job]:
            return lambda slot: GradientJob(slot=slot, clients=group, round_index=round_index, limit=limit)

        makers = (maker(group) for group in groups(clients, self._trainer.width))
        for job, replies in self._stream(makers):
            yield from zip(job.clients, replies, strict=True)

    def train(
        self, point: Point, plans: Iterable[tuple[int, Plan]], *, round_index: int, lr: float
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every planned client."""
        self._buffers.point.copy_(point)

        def maker(group: list[tuple[int, Plan]]) -> Callable[[int], Job]:
            clients, own = [client for client, _ in group], [plan for _, plan in group]
            return lambda slot: TrainJob.put(
                own, self._buffers, slot=slot, clients=clients, round_index=round_index, lr=lr
            )

        makers = (maker(group) for group in groups(plans, self._trainer.width))
        for job, replies in self._stream(makers):
            yield from zip(job.clients, replies, strict=True)

    def sums(self, shifted: bool) -> bool:
        """Return whether adding up inside groups gains anything for this task."""
        return self._trainer.sums(shifted)

    def keeps_gradients(self, clients: Sequence[int]) -> bool:
        """Return whether these clients' gradients can wait on shelves for a shift."""
        return self._trainer.shelf_length(clients) is not None

    def _set_up_shelves(self, clients: list[int]) -> None:
        """Give every client a shelf; workers hired before there were enough of them do not see them, and go."""
        length = self._trainer.shelf_length(clients) or 0
        if self._buffers.has_shelves(len(clients), length):
            return
        self._buffers.set_up_shelves(len(clients), length)
        for worker in list(self._workers):
            self._dismiss(worker)
        self._fill()

    def gradient_sums(
        self, point: Point, clients: Sequence[tuple[int, float]], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[list[int], GroupGradient]]:
        """Yield (clients, Σ w_i ∇f_i(x)) for groups of clients; keep each one's own."""
        self._set_up_shelves([client for client, _ in clients])
        self._buffers.point.copy_(point)
        self._shelf_of = {client: row for row, (client, _) in enumerate(clients)}

        def maker(group: list[tuple[int, float]]) -> Callable[[int], Job]:
            return lambda slot: GradientSumJob(
                slot=slot,
                clients=[client for client, _ in group],
                weights=[weight for _, weight in group],
                shelves=[self._shelf_of[client] for client, _ in group],
                round_index=round_index,
                limit=limit,
            )

        makers = (maker(group) for group in groups(clients, self._trainer.sum_width))
        for job, reply in self._stream(makers):
            yield job.clients, reply

    def train_sums(
        self,
        point: Point,
        plans: Iterable[tuple[int, Plan, float]],
        *,
        round_index: int,
        lr: float,
        shift: object = None,
    ) -> Iterator[tuple[list[int], GroupUpdate]]:
        """Yield (clients, Σ w_i Δ_i) for groups of clients."""
        self._buffers.point.copy_(point.moved(None if shift is None else shift.common))

        def maker(group: list[tuple[int, Plan, float]]) -> Callable[[int], Job]:
            clients, own = [client for client, _, _ in group], [plan for _, plan, _ in group]
            return lambda slot: SumJob(
                weights=[weight for _, _, weight in group],
                along=0.0 if shift is None else shift.along,
                shelves=[] if shift is None else [self._shelf_of[client] for client in clients],
                each=TrainJob.put(own, self._buffers, slot=slot, clients=clients, round_index=round_index, lr=lr),
            )

        makers = (maker(group) for group in groups(plans, self._trainer.sum_width))
        for job, reply in self._stream(makers):
            yield job.clients, reply

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""
        examples = self.task.test_examples
        if examples is None:
            return None
        self._buffers.point.copy_(point)

        def maker(rows: torch.Tensor) -> Callable[[int], Job]:
            start = int(rows[0])
            return lambda slot: EvaluationJob(slot=slot, start=start, stop=start + len(rows))

        chunks = evaluation_rows(len(examples))
        return sum((score for _, score in self._stream(maker(rows) for rows in chunks)), Score())

    def close(self) -> None:
        """End every worker."""
        for worker in list(self._workers):
            worker.process.kill()
        while self._workers:
            self._dismiss(self._workers[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
