"""Every faster way of doing the clients' work, behind one entry: ``Group``. Results are the plain way's up to rounding.

| way      | for which models                                   | what it gains                            | lines |
|----------|----------------------------------------------------|------------------------------------------|-------|
| cohort   | up to 60,000 parameters, linear and element-wise   | W3 is 29 times the plain loop            | 300   |
| lockstep | a linear layer of 2¹⁷ numbers, batches of up to 32 | W5 is 3.5 times the plain loop           | 210   |
| linear   | the same, one client at a time, under any plan     | large weights are read and written once  | 240   |
| stacks   | convolutions and pooling in an nn.Sequential       | W1, W2 are 2.6, 2.1 times the plain loop | 220   |
| spectrum | convolutions of small images with large windows    | W1 is 38 % faster with it                | 230   |

W1 to W5 are the workloads of docs/benchmarks.md. ``eligible`` decides by structure alone who may enter; whatever a way
cannot do takes the per-client path, ``client.trainer``. Which clients go together depends on their order alone, so the
bits do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradalign.algorithms.view import Blend, Plan
from gradalign.client.exchange import (
    Broadcast,
    CachedGradient,
    ClientScore,
    Gradient,
    GradientCache,
    Participant,
    Score,
    Update,
)
from gradalign.client.flat import Point
from gradalign.client.step import FactoredGradients
from gradalign.client.trainer import ClientTrainer, Setup
from gradalign.errors import GradalignError, named_failure
from gradalign.fast.batches import Neighbours
from gradalign.fast.cohort import COHORT, CohortTrainer
from gradalign.fast.eligible import cohort_layers, lockstep_model, side_by_side
from gradalign.fast.linear import record_factors
from gradalign.fast.lockstep import TOGETHER, LockstepTrainer
from gradalign.fast.stacks import run_stacks_faster
from gradalign.tasks.batches import Examples, TensorExamples
from gradalign.tasks.metrics import metrics_of
from gradalign.tasks.task import PartitionedClients, predict

EVALUATION_CHUNK = 1000
Item = TypeVar("Item")


def evaluation_spans(examples: int) -> list[tuple[int, int]]:
    """Return where the fixed chunks in which test examples are evaluated begin and end, whoever does it."""
    return [(first, min(first + EVALUATION_CHUNK, examples)) for first in range(0, examples, EVALUATION_CHUNK)]


def groups(items: Iterable[Item], width: int) -> Iterator[list[Item]]:
    """Cut a sequence into lists of ``width``, the last one shorter."""
    left = iter(items)
    return iter(lambda: list(islice(left, width)), [])


def _with_facts(reply: Update, facts: Mapping[int, Mapping[str, float]]) -> Update:
    own = {name: tuple(facts[client][name] for client in reply.clients) for name in facts[reply.clients[0]]}
    return replace(reply, facts=own)


def prepare(model: nn.Module, setup: Setup) -> FactoredGradients:
    """Make a model's layers faster, in place, where the setup allows it."""
    if not setup.fast or torch.device(setup.device).type != "cpu":
        return FactoredGradients()
    plain = setup.task.predict is predict and setup.local.precision is None and setup.local.optimizer is None
    factored = record_factors(model) if plain else FactoredGradients()
    run_stacks_faster(model)
    return factored


def client_trainer(setup: Setup) -> ClientTrainer:
    """Return a trainer of single clients whose model is as fast as it can be."""
    return ClientTrainer(setup, prepare)


class Group:
    """Does the work of neighbouring clients in one process: one by one, as a cohort, or in lockstep.

    With ``out``, the k-th reply's vector is written to ``out[k]``; the cache must then copy what it is given.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.cache, self.one = setup, GradientCache(), client_trainer(setup)
        # With few clients a round the per-client loop is quick enough, and gives the bits of every other engine.
        plain = setup.local.precision is None and setup.local.optimizer is None
        many = setup.clients_per_round >= COHORT and plain
        together = setup.fast and many and self.one.device.type == "cpu"
        layers = cohort_layers(setup.task, self.one.flat.module) if together else None
        self.cohort = None if layers is None else CohortTrainer(setup, layers)
        model = lockstep_model(setup) if together and layers is None else None
        self.lockstep = None if model is None else LockstepTrainer(setup, model)
        self._moved: tuple[Broadcast, Blend, Broadcast] | None = None
        """The last broadcast, what displaced its clients alike, and the same with x displaced."""

    def width(self, told: Broadcast) -> int:
        """Return how many clients go together, by the task, the settings and the algorithm alone."""
        if self.cohort is not None:
            return COHORT
        summed = told.algorithm.only_displaces and not told.one_by_one
        return TOGETHER if self.lockstep is not None and summed else 1

    def room(self, told: Broadcast, clients: Sequence[int]) -> int:
        """Return how many numbers the longest gradient that is put into the cache for these clients has."""
        whole = self.one.flat.vector.numel()
        if self.lockstep is None or self.width(told) == 1:
            return whole
        sizes = self._sizes(clients)
        if sizes is None or not self.lockstep.fits(sizes, with_gradients=True):
            return whole
        return self.lockstep.factors.length(max(self.lockstep.gradient_rows(size) for size in sizes))

    def _sizes(self, clients: Sequence[int]) -> list[int] | None:
        """Return every client's number of examples when all are of one kind and none has to be made for it."""
        everyone, sizes = self.setup.task.clients, self.setup.task.sizes
        if isinstance(everyone, PartitionedClients) and sizes is not None:
            # Cut from the same tensors: one tells for all.
            return sizes[list(clients)].tolist() if side_by_side(self._examples(clients[:1])) else None
        examples = side_by_side(self._examples(clients)) if isinstance(everyone, list | tuple) else None
        return [len(one) for one in examples] if examples else None

    def _examples(self, clients: Sequence[int]) -> list[Examples]:
        task, seed = self.setup.task, self.setup.seed
        try:
            return [task.client(client, seed) for client in clients]
        except (Exception, SystemExit):  # whose is it? One at a time, to say so
            found = []
            for client in clients:
                with named_failure(f"client {client}"):
                    found.append(task.client(client, seed))
            return found

    def alone(self, told: Broadcast) -> bool:
        """Return whether clients go one by one in all phases of this algorithm."""
        return self.width(replace(told, one_by_one=False)) == 1

    def begin(self, told: Broadcast) -> None:
        """Begin a phase: gradients of another point or phase are forgotten."""
        self.cache.begin(told, alone=self.alone(told))

    def gradients(
        self, told: Broadcast, who: Sequence[Participant], out: Sequence[Tensor] | None = None
    ) -> list[Gradient]:
        """Return ∇f_i(x) of every client of a group, or their sum; the cache remembers each where a plan may use it."""
        self.begin(told)
        known = self.cache.known(who[0]) if len(who) == 1 else None
        return self._take(told, who, out) if known is None else [known]

    def _way(
        self, told: Broadcast, examples: Sequence[Examples], *, with_gradients: bool
    ) -> tuple[CohortTrainer | LockstepTrainer | None, list[TensorExamples]]:
        """Return the way in which these clients go together, None for one by one, and their examples."""
        together = side_by_side(examples) if self.width(told) > 1 else None
        if together is None:
            return None, []
        sizes = [len(one) for one in together]
        if self.lockstep is not None and not self.lockstep.fits(sizes, with_gradients=with_gradients):
            return None, []
        return self.cohort or self.lockstep, together

    def _take(self, told: Broadcast, who: Sequence[Participant], out: Sequence[Tensor] | None) -> list[Gradient]:
        cache = self.cache if told.algorithm.uses_own_gradient else None
        examples = self._examples([one.client for one in who])
        way, together = self._way(told, examples, with_gradients=True)
        if way is not None:
            with named_failure(f"clients {who[0].client} to {who[-1].client}"):
                return way.gradients(Neighbours(told, who, together, out), cache)
        replies = []
        for place, (one, own) in enumerate(zip(who, examples, strict=True)):
            with named_failure(f"client {one.client}"):
                reply = self.one.gradient(told, one, own, None if out is None else out[place])
            if cache is not None:
                cache.put(one.client, reply.vector.cpu(), reply=reply)
            replies.append(reply)
        return replies

    def train(self, told: Broadcast, who: Sequence[Participant], out: Sequence[Tensor] | None = None) -> list[Update]:
        """Make every client's plan and carry it out; return every Δ_i, or their sum."""
        self.begin(told)
        seen = self._own_gradients(told, who) if told.algorithm.uses_own_gradient else {}
        examples = self._examples([one.client for one in who])
        replies = self._train_together(told, who, examples, out) or [
            self._train_one(told, one, own, None if out is None else out[place])
            for place, (one, own) in enumerate(zip(who, examples, strict=True))
        ]
        if told.algorithm.reports:
            samples = {one.client: told.sample(len(own)) for one, own in zip(who, examples, strict=True)}
            facts = {one.client: told.facts(one, self._gradient(one), samples[one.client]) for one in who}
            replies = [_with_facts(reply, facts) for reply in replies]
        if not seen:
            return replies
        return [replace(r, examples=r.examples + sum(seen.get(c, 0) for c in r.clients)) for r in replies]

    def _own_gradients(self, told: Broadcast, who: Sequence[Participant]) -> dict[int, int]:
        """Take the gradients at x that nobody has taken; return the examples that no gradient phase has counted."""
        replies = [self.cache.known(one) for one in who]
        missing = [one for one in who if self.cache.get(one.client) is None]
        replies += self._take(told, missing, None) if missing else []
        if told.algorithm.needs_gradients:
            return {}
        return {reply.clients[0]: reply.examples for reply in replies if reply is not None}

    def _train_one(self, told: Broadcast, one: Participant, examples: Examples, out: Tensor | None) -> Update:
        with named_failure(f"client {one.client}"):
            return self.one.train(told, one, self._whole(self._plan(told, one), one), examples, out)

    def _plan(self, told: Broadcast, one: Participant) -> Plan:
        own = self.cache.get(one.client) if told.algorithm.uses_own_gradient else None
        return told.plan(one, None if own is None or own.rows is not None else own.vector)

    def _whole(self, plan: Plan, one: Participant) -> Plan:
        """Return the plan with g_i filled in where it leaves that open."""
        return plan.written_out(self._gradient(one) if isinstance(plan.displacement, Blend) else None)

    def _gradient(self, one: Participant) -> Tensor | None:
        """Return g_i as a vector, None where it is not known."""
        own = self.cache.get(one.client)
        thin = self.lockstep if own is not None and own.rows is not None else None
        return None if own is None else own.vector if thin is None else thin.factors.dense(own)

    def _train_together(
        self, told: Broadcast, who: Sequence[Participant], examples: Sequence[Examples], out: Sequence[Tensor] | None
    ) -> list[Update] | None:
        """Train a group as a cohort or in lockstep, None when these clients or plans cannot go together."""
        way, together = self._way(told, examples, with_gradients=False)
        if way is None:
            return None
        with named_failure(f"clients {who[0].client} to {who[-1].client}"):
            every = len(who) if told.algorithm.plans_alike and not told.one_by_one else 1
            plans = [plan for one in who[::every] for plan in [self._plan(told, one)] * every]
            bare = not any(plan.pull or plan.correction is not None for plan in plans)
            if len({(plan.pull, plan.every_step) for plan in plans}) > 1 or not (self.cohort or bare):
                return None
            blend, gradients = self._split(told, who, plans)
            if blend is None:
                plans = [self._whole(plan, one) for plan, one in zip(plans, who, strict=True)]
                return way.train(Neighbours(told, who, together, out), plans)
            group = Neighbours(self._displaced(told, blend), who, together, out, blend.own, gradients)
            return way.train(group, [Plan()] * len(who))

    def _split(
        self, told: Broadcast, who: Sequence[Participant], plans: Sequence[Plan]
    ) -> tuple[Blend | None, list[CachedGradient]]:
        """Return what displaces all clients of a group alike, if anything does, and their own gradients.

        In a sum, x is moved by the common part once for all. It makes no difference to Δ_i whether every step is.
        """
        blend, factored = plans[0].displacement, self.lockstep is not None
        if told.one_by_one or not told.algorithm.only_displaces or not isinstance(blend, Blend):
            return None, []
        same = (id(blend.common), blend.own, blend.others)
        for other in (plan.displacement for plan in plans):
            if not isinstance(other, Blend) or (id(other.common), other.own, other.others) != same:
                return None, []
        found = [self.cache.get(one.client) for one in who] if blend.own else []
        gradients = [own for own in found if own is not None and (own.rows is not None) == factored]
        return (blend, gradients) if len(gradients) == len(found) else (None, [])

    def _displaced(self, told: Broadcast, blend: Blend) -> Broadcast:
        """Return the broadcast with x moved by the common part of a displacement; made once for a phase."""
        if self._moved is not None:
            before, last, moved = self._moved
            if before is told and last.common is blend.common and last.others == blend.others:
                return moved
        point = told.point.moved(-blend.others * blend.common)
        self._moved = told, blend, replace(told, point=point)
        return self._moved[2]

    def evaluate(self, point: Point, start: int, stop: int) -> Score:
        """Return the score on test examples from ``start`` to ``stop``."""
        examples = self.setup.task.test_examples
        if examples is None:
            raise GradalignError("the task has no test examples")
        with named_failure("the evaluation"):
            return self.one.evaluate(point, examples, torch.arange(start, stop))

    def score_client(self, told: Broadcast, who: Participant, *, tuned: bool = False) -> ClientScore | None:
        """Return how the point, or where the client would train it to, does on the client's own test examples."""
        task, seed = self.setup.task, self.setup.seed
        with named_failure(f"client {who.client}"):
            tests, point = task.client_test(who.client, seed), told.point
            if tests is None:
                return None
            if tuned:
                own = self.one.train(told, who, Plan(), task.client(who.client, seed))
                point = Point(point.x + own.vector.cpu(), own.floats, own.ints)
            rows = (torch.arange(*span) for span in evaluation_spans(len(tests)))
            score = sum((self.one.evaluate(point, tests, part) for part in rows), Score())
            metrics = metrics_of(task.metrics, score.predictions, lenient=True)
        loss, accuracy = score.mean_loss, score.accuracy
        return ClientScore(client=who.client, examples=len(tests), loss=loss, accuracy=accuracy, metrics=metrics)
