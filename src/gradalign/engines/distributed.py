"""The distributed engine: the ranks of a ``torchrun`` job do the clients' work, and rank 0 leads.

Rank 0 plays the server's part and asks; the other ranks follow, each with the whole task at hand and one client's
work at a time. Clients go round the ranks in waves, one client per rank, and rank 0 works too. Every rank drives the
same single-threaded trainer as the local engine, and replies are handed on in client order: the bits are the same for
any number of ranks, and the local engine's wherever that one trains clients one by one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from gradalign.algorithms.plan import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientGradient, ClientUpdate, Score
from gradalign.client.flat import Point
from gradalign.client.trainer import LocalTrainer
from gradalign.engines.local import one_thread
from gradalign.engines.wire import Ask, Wire
from gradalign.errors import GradalignError, LostRankError
from gradalign.fast.group import evaluation_rows, named_failure
from gradalign.tasks.task import Task

Reply = TypeVar("Reply")
_FAILED, _DONE = 0.0, 1.0


class RankWork:
    """What one rank can do: the trainer, and the server's point it works from."""

    def __init__(
        self, task: Task, local: LocalTraining, seed: int, device: torch.device | str, *, fast: bool = True
    ) -> None:
        self.task, self.seed = task, seed
        self.trainer = LocalTrainer(task, local, seed, device, fast=fast)
        self.point = self.trainer.flat.read()

    def gradient(self, client: int, round_index: int, limit: int | None) -> ClientGradient:
        """Return ∇f_i(x)."""
        with one_thread(), named_failure(f"client {client}"):
            examples = self.task.client(client, self.seed)
            return self.trainer.gradient(self.point, examples, client=client, round_index=round_index, limit=limit)

    def train(self, client: int, plan: Plan, round_index: int, lr: float) -> ClientUpdate:
        """Execute a plan."""
        with one_thread(), named_failure(f"client {client}"):
            examples = self.task.client(client, self.seed)
            return self.trainer.train(self.point, plan, examples, client=client, round_index=round_index, lr=lr)

    def evaluate(self, start: int, stop: int) -> Score:
        """Evaluate some of the test examples."""
        with one_thread(), named_failure("the evaluation"):
            examples = self.task.test_examples
            if examples is None:
                raise GradalignError("the task has no test examples")
            return self.trainer.evaluate(self.point, examples, torch.arange(start, stop))


def _score_row(score: Score) -> list[float]:
    return [score.loss, float(score.correct is not None), score.correct or 0.0, score.examples]


def _score(row: Sequence[float]) -> Score:
    return Score(loss=row[0], correct=row[2] if row[1] else None, examples=int(row[3]))


class DistributedEngine:
    """Rank 0's side of the job, behind the Engine interface; ``follow`` is the other ranks' side."""

    def __init__(
        self, task: Task, local: LocalTraining, seed: int, device: torch.device | str = "cpu", *, fast: bool = True
    ) -> None:
        self.wire = Wire()
        self.work = RankWork(task, local, seed, device, fast=fast)
        self.rank = self.wire.rank
        self._in_step = True
        """Whether every other rank is waiting to be asked; if not, nothing more can be said to them."""

    # The leader's side

    def _share(self, point: Point) -> None:
        self.work.point.copy_(point)
        for peer in range(1, self.wire.size):
            self.wire.send_row([Ask.POINT], peer)
            for vector in (point.x, point.floats, point.ints):
                self.wire.send(vector, peer)

    def _wave(
        self,
        jobs: Sequence[Any],
        ask: Callable[[Any, int], None],
        own: Callable[[Any], Reply],
        hear: Callable[[int], Reply],
    ) -> list[Reply]:
        """Give one job to each rank, do the first one here, and return all replies in the jobs' order."""
        self._in_step = False
        for peer, job in enumerate(jobs[1:], start=1):
            ask(job, peer)
        replies: list[Reply | GradalignError] = []
        try:
            replies.append(own(jobs[0]))
        except GradalignError as error:
            replies.append(error)
        for peer in range(1, len(jobs)):
            done = self.wire.receive_row(peer)[0] == _DONE
            replies.append(hear(peer) if done else self.wire.receive_failure(peer))
        self._in_step = True
        for reply in replies:
            if isinstance(reply, GradalignError):
                raise reply
        return replies  # type: ignore[return-value]

    def gradients(
        self, point: Point, clients: Sequence[int], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[int, ClientGradient]]:
        """Yield (client, ∇f_i(x)) for every client."""
        self._share(point)

        def ask(client: int, peer: int) -> None:
            self.wire.send_row([Ask.GRADIENT, client, round_index, -1 if limit is None else limit], peer)

        def hear(peer: int) -> ClientGradient:
            loss, known, accuracy, examples, *_ = self.wire.receive_row(peer)
            return ClientGradient(
                gradient=self.wire.receive(point.x, peer),
                loss=loss,
                accuracy=accuracy if known else None,
                examples=int(examples),
            )

        for wave in _waves(clients, self.wire.size):
            replies = self._wave(wave, ask, lambda client: self.work.gradient(client, round_index, limit), hear)
            yield from zip(wave, replies, strict=True)

    def train(
        self, point: Point, plans: Iterable[tuple[int, Plan]], *, round_index: int, lr: float
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every planned client."""
        self._share(point)

        def ask(job: tuple[int, Plan], peer: int) -> None:
            client, plan = job
            vectors = [v for v in (plan.displacement, plan.correction) if v is not None]
            flags = [plan.displacement is not None, plan.correction is not None, plan.every_step]
            self.wire.send_row([Ask.TRAIN, client, round_index, lr, plan.pull, *(float(flag) for flag in flags)], peer)
            for vector in vectors:
                self.wire.send(vector.to("cpu", point.x.dtype), peer)

        def own(job: tuple[int, Plan]) -> ClientUpdate:
            return self.work.train(*job, round_index, lr)

        def hear(peer: int) -> ClientUpdate:
            loss, steps, examples, total_step_size, *_ = self.wire.receive_row(peer)
            update, floats, ints = (self.wire.receive(v, peer) for v in (point.x, point.floats, point.ints))
            return ClientUpdate(
                update=update,
                floats=floats,
                ints=ints,
                loss=loss,
                steps=int(steps),
                examples=int(examples),
                total_step_size=total_step_size,
            )

        for wave in _waves(plans, self.wire.size):
            for (client, _), reply in zip(wave, self._wave(wave, ask, own, hear), strict=True):
                yield client, reply

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the test examples, None when the task has none."""
        examples = self.work.task.test_examples
        if examples is None:
            return None
        self._share(point)
        spans = [(int(rows[0]), int(rows[-1]) + 1) for rows in evaluation_rows(len(examples))]

        def ask(span: tuple[int, int], peer: int) -> None:
            self.wire.send_row([Ask.EVALUATE, *span], peer)

        total = Score()
        for wave in _waves(spans, self.wire.size):
            for score in self._wave(
                wave, ask, lambda span: self.work.evaluate(*span), lambda peer: _score(self.wire.receive_row(peer))
            ):
                total = total + score
        return total

    def finish(self, result: Any, point: Point) -> None:
        """Tell the other ranks that the run is over, its result (anything JSON can say) and its final point."""
        self._share(point)
        for peer in range(1, self.wire.size):
            self.wire.send_row([Ask.STOP, 1.0], peer)
            self.wire.send_text(result, peer)
        self._in_step = False

    def close(self) -> None:
        """Let the other ranks go, if they still listen."""
        if self.rank == 0 and self._in_step:
            self._in_step = False
            for peer in range(1, self.wire.size):
                with suppress(LostRankError):
                    self.wire.send_row([Ask.STOP], peer)
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The other ranks' side

    def follow(self) -> tuple[Any, Point]:
        """Do what rank 0 asks until it ends the run; return the result and the final point."""
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no Python code runs while this rank waits to be asked
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        while True:
            ask, *row = self.wire.receive_row(0)
            if ask == Ask.STOP:
                if not row[0]:
                    raise GradalignError("rank 0 ended the run without a result")
                return self.wire.receive_text(0), self.work.point
            if ask == Ask.POINT:
                point = self.work.point
                for vector in (point.x, point.floats, point.ints):
                    vector.copy_(self.wire.receive(vector, 0))
            else:
                self._answer(Ask(int(ask)), row)

    def _answer(self, ask: Ask, row: list[float]) -> None:
        plan = self._receive_plan(row) if ask == Ask.TRAIN else Plan()
        try:
            numbers, vectors = self._do(ask, row, plan)
        except GradalignError as error:
            self.wire.send_row([_FAILED], 0)
            self.wire.send_failure(error, 0)
            return
        self.wire.send_row([_DONE], 0)
        self.wire.send_row(numbers, 0)
        for vector in vectors:
            self.wire.send(vector.detach().cpu(), 0)

    def _receive_plan(self, row: list[float]) -> Plan:
        displaced, corrected, every_step = (bool(flag) for flag in row[4:7])
        x = self.work.point.x
        return Plan(
            displacement=self.wire.receive(x, 0) if displaced else None,
            correction=self.wire.receive(x, 0) if corrected else None,
            pull=row[3],
            every_step=every_step,
        )

    def _do(self, ask: Ask, row: list[float], plan: Plan) -> tuple[list[float], list[Tensor]]:
        """Do the work asked for; return the reply's numbers and vectors."""
        if ask == Ask.EVALUATE:
            return _score_row(self.work.evaluate(int(row[0]), int(row[1]))), []
        client, round_index = int(row[0]), int(row[1])
        if ask == Ask.GRADIENT:
            found = self.work.gradient(client, round_index, None if row[2] < 0 else int(row[2]))
            known = found.accuracy is not None
            return [found.loss, float(known), found.accuracy or 0.0, found.examples], [found.gradient]
        reply = self.work.train(client, plan, round_index, row[2])
        return [reply.loss, reply.steps, reply.examples, reply.total_step_size], [
            reply.update,
            reply.floats,
            reply.ints,
        ]


def _waves(jobs: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(jobs)
    while wave := list(islice(iterator, size)):
        yield wave
