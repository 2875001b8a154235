"""The work of a group of clients in one process: one at a time, or a cohort of a small model at once.

A group has at most ``width`` clients, consecutive in the round's order. The width depends on the task alone, so groups
are the same for every number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gradalign.algorithms.plan import Plan
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientGradient, ClientUpdate, GroupGradient, GroupUpdate, Score
from gradalign.client.flat import Point, all_finite
from gradalign.client.trainer import LocalTrainer
from gradalign.errors import ClientError, GradalignError, no_exit
from gradalign.fast.cohort import COHORT, CohortTrainer
from gradalign.fast.eligible import layers_of, lockstep_model, side_by_side
from gradalign.fast.lockstep import TOGETHER, LockstepTrainer
from gradalign.tasks.data import Examples, PartitionedClients, TensorExamples
from gradalign.tasks.task import Task

EVALUATION_CHUNK = 1000
Item = TypeVar("Item")


def evaluation_rows(examples: int) -> list[Tensor]:
    """Return the fixed chunks in which test examples are evaluated, whoever does it."""
    return list(torch.arange(examples).split(EVALUATION_CHUNK))


def groups(items: Iterable[Item], width: int) -> Iterator[list[Item]]:
    """Cut a sequence into lists of ``width``, the last one shorter."""
    group: list[Item] = []
    for item in items:
        group.append(item)
        if len(group) == width:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def named_failure(where: str) -> Iterator[None]:
    """Turn what user code raises into a ClientError that says for whom."""
    try:
        with no_exit(f"the code for {where}"):
            yield
    except GradalignError:
        raise
    except Exception as error:
        raise ClientError(f"{where} failed: {type(error).__name__}: {error}") from error


class GroupTrainer:
    """Does groups of clients' work; ``clients_per_round`` is how many clients a round has."""

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
        self.task, self.seed = task, seed
        self.one = LocalTrainer(task, local, seed, device, fast=fast)
        # With few clients a round the per-client loop is quick enough, and gives the bits of every other engine.
        together = fast and clients_per_round >= COHORT and self.one.device.type == "cpu" and local.precision is None
        layers = layers_of(task, self.one.flat.module) if together else None
        self.cohort = None if layers is None else CohortTrainer(task, local, seed, layers)
        model = lockstep_model(task, local, seed) if together and layers is None else None
        self.lockstep = None if model is None else LockstepTrainer(local, seed, model)
        self.width = 1 if self.cohort is None else COHORT
        self.sum_width = TOGETHER if self.lockstep is not None else self.width
        self._asked: tuple[list[int], list[int] | None] | None = None

    def sums(self, shifted: bool) -> bool:
        """Return whether adding up inside a group gains anything, for plans that are shifts or for any plans."""
        return self.cohort is not None or (shifted and self.lockstep is not None)

    def _examples(self, clients: Sequence[int]) -> list[Examples]:
        try:
            return [self.task.client(client, self.seed) for client in clients]
        except (Exception, SystemExit):  # whose is it? One at a time, to say so
            found = []
            for client in clients:
                with named_failure(f"client {client}"):
                    found.append(self.task.client(client, self.seed))
            return found

    def _cohort_of(self, clients: Sequence[int], plans: Sequence[Plan] = ()) -> list[TensorExamples] | None:
        """Return the clients' examples when they can train as a cohort, else None."""
        alike = len({(plan.pull, plan.every_step) for plan in plans}) <= 1
        return side_by_side(self._examples(clients)) if self.cohort is not None and alike else None

    def gradients(
        self,
        point: Point,
        clients: Sequence[int],
        *,
        round_index: int,
        limit: int | None,
        out: Tensor | None = None,
    ) -> list[ClientGradient]:
        """Return ∇f_i(x) of every client of the group; ``out`` has a row for each, when they are wanted there."""
        together = self._cohort_of(clients)
        if self.cohort is not None and together is not None:
            with named_failure(f"clients {clients[0]} to {clients[-1]}"):
                replies = self.cohort.gradients(point, together, clients, round_index, limit)
            if out is None:
                return replies
            return [replace(r, gradient=row.copy_(r.gradient)) for row, r in zip(out, replies, strict=False)]
        replies = []
        for place, client in enumerate(clients):
            row = None if out is None else out[place]
            with named_failure(f"client {client}"):
                one = self.task.client(client, self.seed)
                reply = self.one.gradient(point, one, client=client, round_index=round_index, limit=limit, out=row)
            replies.append(reply)
        return replies

    def train(
        self,
        point: Point,
        clients: Sequence[int],
        plans: Sequence[Plan],
        *,
        round_index: int,
        lr: float,
        out: Tensor | None = None,
    ) -> list[ClientUpdate]:
        """Execute every client's plan; ``out`` has a row for each update, when they are wanted there."""
        together = self._cohort_of(clients, plans)
        if self.cohort is not None and together is not None:
            with named_failure(f"clients {clients[0]} to {clients[-1]}"):
                replies = self.cohort.train(point, plans, together, clients, round_index=round_index, lr=lr)
            if out is None:
                return replies
            return [replace(reply, update=row.copy_(reply.update)) for row, reply in zip(out, replies, strict=False)]
        replies = []
        for place, (client, plan) in enumerate(zip(clients, plans, strict=True)):
            row = None if out is None else out[place]
            with named_failure(f"client {client}"):
                one = self.task.client(client, self.seed)
                reply = self.one.train(point, plan, one, client=client, round_index=round_index, lr=lr, out=row)
            replies.append(reply)
        return replies

    def shelf_length(self, clients: Sequence[int]) -> int | None:
        """Return the room that each of these clients' gradients needs to wait for a shift; None when they cannot.

        Clients that are made on demand cannot: they would be made once more only to see how large they are.
        """
        together = self.cohort is not None or self.lockstep is not None
        sizes = self._sizes(clients) if together else None
        if sizes is None:
            return None
        if self.lockstep is None:
            return self.one.flat.vector.numel()
        if not self.lockstep.fits(sizes, shelved=True):
            return None
        return self.lockstep.shelf.length(max(self.lockstep.gradient_rows(size) for size in sizes))

    def _sizes(self, clients: Sequence[int]) -> list[int] | None:
        """Return how many examples each of these clients has when they are all of one kind, else None."""
        if self._asked is None or self._asked[0] != list(clients):  # a round asks twice
            self._asked = list(clients), self._counted(clients)
        return self._asked[1]

    def _counted(self, clients: Sequence[int]) -> list[int] | None:
        everyone, sizes = self.task.clients, self.task.sizes
        if isinstance(everyone, PartitionedClients) and sizes is not None:
            # Cut from the same tensors: one tells for all.
            return sizes[list(clients)].tolist() if side_by_side(self._examples(clients[:1])) else None
        examples = side_by_side(self._examples(clients)) if isinstance(everyone, list | tuple) else None
        return [len(one) for one in examples] if examples else None

    def gradient_sum(
        self,
        point: Point,
        clients: Sequence[int],
        weights: Sequence[float],
        *,
        round_index: int,
        limit: int | None,
        out: Tensor,
        shelves: Sequence[Tensor],
    ) -> GroupGradient:
        """Write Σ w_i ∇f_i(x) to ``out`` and every client's own gradient to its shelf."""
        examples = side_by_side(self._examples(clients))
        trainer = self.cohort or self.lockstep
        if trainer is None or examples is None:
            raise GradalignError("these clients do not train together")
        with named_failure(f"clients {clients[0]} to {clients[-1]}"):
            return trainer.gradient_sum(
                point, examples, clients, weights, round_index=round_index, limit=limit, out=out, shelves=shelves
            )

    def train_sum(
        self,
        point: Point,
        clients: Sequence[int],
        plans: Sequence[Plan],
        weights: Sequence[float],
        *,
        round_index: int,
        lr: float,
        out: Tensor,
        along: float = 0.0,
        shelves: Sequence[Tensor] = (),
    ) -> GroupUpdate:
        """Execute every client's plan and write Σ w_i Δ_i to ``out``.

        With ``shelves``, the clients start from x + along·g_i, their gradients being there.
        """
        trainer: CohortTrainer | LockstepTrainer | None = self.cohort
        together = self._cohort_of(clients, plans)
        if self.lockstep is not None:
            trainer, together = self.lockstep, side_by_side(self._examples(clients))
            together = together if together and self.lockstep.takes(plans, together) else None
        if trainer is None or together is None:
            if shelves:
                raise GradalignError("these clients do not train together")
            return self._sum_one_by_one(point, clients, plans, weights, round_index=round_index, lr=lr, out=out)
        with named_failure(f"clients {clients[0]} to {clients[-1]}"):
            return trainer.train_sum(
                point,
                plans,
                together,
                clients,
                weights,
                round_index=round_index,
                lr=lr,
                out=out,
                along=along,
                shelves=shelves,
            )

    def _sum_one_by_one(
        self,
        point: Point,
        clients: Sequence[int],
        plans: Sequence[Plan],
        weights: Sequence[float],
        *,
        round_index: int,
        lr: float,
        out: Tensor,
    ) -> GroupUpdate:
        """Add up what clients do that do not train together."""
        replies, floats, own = [], torch.zeros_like(point.floats), torch.empty_like(out)
        out.zero_()
        for client, plan, weight in zip(clients, plans, weights, strict=True):
            with named_failure(f"client {client}"):
                examples = self.task.client(client, self.seed)
                reply = self.one.train(point, plan, examples, client=client, round_index=round_index, lr=lr, out=own)
            finite = math.isfinite(reply.loss) and all_finite(own)
            replies.append(reply if finite else replace(reply, loss=math.nan))
            out.add_(own, alpha=weight)
            floats.add_(reply.floats, alpha=weight)
        return GroupUpdate(
            update=out,
            floats=floats,
            ints=replies[0].ints,
            weights=list(weights),
            losses=[reply.loss for reply in replies],
            steps=sum(reply.steps for reply in replies),
            examples=sum(reply.examples for reply in replies),
        )

    def evaluate(self, point: Point, start: int, stop: int) -> Score:
        """Return the score on test examples from ``start`` to ``stop``."""
        examples = self.task.test_examples
        if examples is None:
            raise GradalignError("the task has no test examples")
        with named_failure("the evaluation"):
            return self.one.evaluate(point, examples, torch.arange(start, stop))
