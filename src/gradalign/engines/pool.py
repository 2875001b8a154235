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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing

from gradalign import stopping
from gradalign.client.exchange import Broadcast, ClientScore, Gradient, Participant, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup
from gradalign.engines import Engine
from gradalign.engines.shared import Messages, SharedBuffers, changed_settings
from gradalign.engines.worker import Failure, Job, start_method, work
from gradalign.errors import GradalignError
from gradalign.fast import Group, evaluation_spans, groups
from gradalign.fast.cohort import COHORT
from gradalign.fast.lockstep import TOGETHER
from gradalign.seeding import quiet_generators

ATTEMPTS = 3
_SCORED = 16  # clients that a worker scores one after the other before it answers


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    busy: Job | None = None
    attempts: int = 0
    """How often its job was tried, also by workers that died of it."""


class PoolEngine(Engine):
    """N worker processes behind the Engine interface; ``method`` is how they are started, fork or spawn."""

    def __init__(self, setup: Setup, workers: int, *, method: str | None = None) -> None:
        self._setup = setup
        self._context: Any = torch.multiprocessing.get_context(method or start_method())
        self._forks = self._context.get_start_method() == "fork"
        # Replies wait in slots for their turn; a few more slots than workers keep all busy when clients differ.
        self._slots = 2 * workers + 2
        self._group = Group(setup)
        """For what is decided about all clients alike; its cache knows what lies in shared memory."""
        width = COHORT if self._group.cohort else TOGETHER if self._group.lockstep else 1
        self._buffers = SharedBuffers(self._group.one.flat.read(), self._slots, width, forked=self._forks)
        if setup.algorithm is not None:  # so that the first workers have all they need
            self._buffers.make_room(setup.algorithm)
            if setup.algorithm.uses_own_gradient and not self._group.lockstep:  # which needs less, by who takes part
                self._buffers.make_room_for_gradients(setup.clients_per_round, self._group.one.flat.vector.numel())
        self._messages = Messages(self._buffers, setup.algorithm)
        self._phase, self._wanted = 0, workers
        self._workers: list[_Worker] = []
        try:
            self._start_missing()
        except BaseException:
            self.close()
            raise

    def _start_missing(self) -> None:
        while len(self._workers) < self._wanted:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [ours, *(worker.pipe for worker in self._workers)] if self._forks else []
        arguments = (theirs, inherited, os.getpid(), self._setup, self._buffers)
        process = self._context.Process(target=work, args=arguments, daemon=True, name="gradalign-worker")
        try:
            with quiet_generators(), warnings.catch_warnings():
                # Python >= 3.12 warns about forking beside threads; a worker touches none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                with stopping.held(), stopping.blocked():  # until the worker has said what signals do to it
                    process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise GradalignError(
                f"the task cannot be sent to a worker process ({error}); define its model, loss and data, and an "
                "algorithm of your own, at the top level of a module, or use workers=0"
            ) from error
        theirs.close()
        return _Worker(process, ours)

    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.is_alive()]

    def _stop(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)  # first, so that an interrupt in here leaves no worker to stop twice
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()

    def _replace(self, worker: _Worker) -> _Worker:
        self._stop(worker)
        self._start_missing()
        return self._workers[-1]

    def _assign(self, worker: _Worker, job: Job, attempts: int = 0) -> None:
        while True:
            attempts += 1
            if attempts > ATTEMPTS:
                hint = "" if self._forks else '; a script that starts workers needs if __name__ == "__main__"'
                raise GradalignError(
                    f"{job.whose()} ended its worker process {ATTEMPTS} times; "
                    f"it may need more memory than there is, or crash{hint}"
                )
            worker.busy, worker.attempts = job, attempts
            try:
                worker.pipe.send_bytes(self._messages.written(job))
                return
            except OSError:
                worker = self._replace(worker)

    def _answers(self) -> Iterator[tuple[int, Any]]:
        """Wait for at least one worker; yield each answer that is there, with its slot. A dead worker's job goes on."""
        busy = {worker.pipe: worker for worker in self._workers if worker.busy is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            job = worker.busy
            if job is None:
                continue
            try:
                answer = self._messages.read(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                self._assign(self._replace(worker), job, worker.attempts)
                continue
            worker.busy = None
            yield job.slot, answer

    def _stream(self, jobs: Iterator[Callable[..., Job]]) -> Iterator[Any]:
        """Give out jobs as slots and workers become free; yield the answers in the jobs' order."""
        free, given = deque(range(self._slots)), deque[int]()
        answered: dict[int, Any] = {}
        self._start_missing()
        try:
            while True:
                idle = [worker for worker in self._workers if worker.busy is None]
                while idle and free and (make := next(jobs, None)) is not None:
                    given.append(free.popleft())
                    self._assign(idle.pop(), make(slot=given[-1]))
                if not given:
                    return
                if given[0] not in answered:
                    answered.update(self._answers())
                    continue
                answer = answered.pop(given[0])
                if isinstance(answer, Failure):
                    raise answer.as_error()
                yield answer
                free.append(given.popleft())
        finally:
            # Left early (an error, an interrupt): unfinished work is for nobody. Successors come when needed.
            for worker in [w for w in self._workers if w.busy is not None]:
                self._stop(worker)

    def _begin(self, told: Broadcast, clients: Sequence[int] = ()) -> bytes:
        """Begin a phase in which these clients' gradients are remembered; return what all workers are told.

        Workers that were started without room for it, or without the algorithm's classes, make way for others.
        """
        self._phase += 1
        self._group.begin(told)
        old = self._buffers.make_room(told.algorithm, told.shared)
        if clients and self._buffers.make_room_for_gradients(len(clients), self._group.room(told, clients)):
            self._group.cache.entries.clear()
            old = True
        if changed_settings(told.algorithm, self._setup.algorithm) is None:
            self._setup = replace(self._setup, algorithm=told.algorithm)
            old = True
        if old:
            self._messages = Messages(self._buffers, self._setup.algorithm)
            for worker in list(self._workers):
                self._stop(worker)
        return self._messages.written(self._buffers.told(told))

    def _free_rows(self, clients: Sequence[int]) -> dict[int, int]:
        """Return a row for each client whose gradient is not known; the gradients of all others are given up."""
        entries = self._group.cache.entries
        for client in entries.keys() - set(clients):
            del entries[client]
        used = {self._buffers.row_of(entry.vector) for entry in entries.values()}
        free = (row for row in range(len(self._buffers.gradients)) if row not in used)
        return {client: next(free) for client in clients if client not in entries}

    def _job(self, *, slot: int, said: bytes, who: list[Participant], rows: Mapping[int, int] | None) -> Job:
        """Return a group's job, its k_i being written to the slot."""
        places, entries = self._buffers.kept, self._group.cache.entries
        for row, one in enumerate(who):
            if one.kept:
                kept = {label: places[label][slot, row].copy_(own) for label, own in one.kept.items()}
                who[row] = replace(one, kept=kept)
        clients = [one.client for one in who]
        return Job(
            slot=slot,
            phase=self._phase,
            said=said,
            work="gradients" if rows is not None else "train",
            who=who,
            known=self._buffers.written({client: entries[client] for client in clients if client in entries}),
            rows={client: rows[client] for client in clients if rows and client in rows},
        )

    def _replies(
        self, told: Broadcast, said: bytes, who: Iterable[Participant], rows: Mapping[int, int] | None = None
    ) -> Iterator[Any]:
        """Have the clients train, or take their gradients where there are rows for them."""
        makers = (partial(self._job, said=said, who=group, rows=rows) for group in groups(who, self._group.width(told)))
        for answer in self._stream(makers):
            self._group.cache.entries.update(self._buffers.read(answer.fresh))
            yield from answer.replies

    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        # Measured gradients are of use to a round only where it takes them one by one, too.
        used = told.algorithm.uses_own_gradient and (told.participants > 0 or self._group.alone(told))
        clients = [one.client for one in who] if used else []
        said = self._begin(told, clients)
        return self._replies(told, said, who, self._free_rows(clients))

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        return self._replies(told, self._begin(told), who)

    def evaluate(self, point: Point) -> Score | None:
        examples = self._setup.task.test_examples
        if examples is None:
            return None
        self._buffers.point.copy_(point)
        return sum(self._stream(partial(Job, span=span) for span in evaluation_spans(len(examples))), Score())

    def evaluate_clients(
        self, told: Broadcast, who: Sequence[Participant], *, tuned: bool = False
    ) -> Iterator[ClientScore]:
        said, work = self._begin(told), "tune" if tuned else "score"
        jobs = (partial(Job, phase=self._phase, said=said, who=some, work=work) for some in groups(who, _SCORED))
        for scores in self._stream(jobs):
            yield from scores

    def close(self) -> None:
        for worker in list(self._workers):
            worker.process.kill()
        while self._workers:
            self._stop(self._workers[-1])
