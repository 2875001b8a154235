"""The client's side: a ClientApp that answers the server's two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from gradalign.algorithms.plan import Algorithm, ClientView, Combination
from gradalign.client.flat import Point
from gradalign.client.trainer import LocalTrainer
from gradalign.engines.local import one_thread
from gradalign.errors import GradalignError
from gradalign.flower.memory import ClientMemory, MemoryLostError
from gradalign.flower.messages import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    SEEN,
    Order,
    build_parts,
    known_algorithms,
    lost_memory_reply,
    received_vector,
    reply,
    to_tensor,
)
from gradalign.tasks.data import Examples
from gradalign.tasks.task import Task

PARTITION, PARTITIONS = "partition-id", "num-partitions"


def partition_of(context: Context) -> int:
    """Return the client's number, which Flower's simulation or ``--node-config`` gives to the node."""
    value = context.node_config.get(PARTITION)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise GradalignError(
            f"this node has no {PARTITION}; start it with flower-supernode --node-config '{PARTITION}=0 {PARTITIONS}=3'"
        )
    return value


_leaving: ContextVar[list[Callable[[Message], None]] | None] = ContextVar("leaving", default=None)


def remember_as_sent(name: str, made: Tensor, remember: Callable[[Tensor], None]) -> None:
    """Remember what comes of a vector: as it was made, and once more as it leaves if a mod changed it on its way."""
    remember(made)

    def look(answer: Message) -> None:
        arrays = answer.content.array_records.get(ARRAYS) if answer.has_content() else None
        sent = to_tensor(arrays[name], made.dtype) if arrays is not None and name in arrays else made
        if sent.shape == made.shape and not torch.equal(sent, made):
            remember(sent)

    waiting = _leaving.get()
    if waiting is not None:
        waiting.append(look)


def _at_the_door(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The outermost Flower mod: sees replies as the server will, and asks it for a memory that is lost."""
    token = _leaving.set([])
    try:
        answer = call_next(message, context)
        for look in _leaving.get() or ():
            look(answer)
        return answer
    except MemoryLostError as lost:
        return lost_memory_reply(message, differs=lost.differs)
    finally:
        _leaving.reset(token)


def aligned_app(*, examples: Callable[[Context], int] | None = None, mods: Iterable[Mod] = ()) -> ClientApp:
    """Return a ClientApp for your own training functions; it already tells the server whose data is here.

    Register ``train("gradient")`` and ``train()`` on it, with ``gradient_reply`` and ``LocalRound`` inside.

    Args:
        examples: Gives the number of the client's examples, for ``weights="examples"``; when not given, the
            server goes by the examples of the client's first reply in each round.
        mods: Flower mods for all messages; those that work on arrays go in as ``on_update(mod)``.
    """
    app = ClientApp(mods=[_at_the_door, *mods])

    @app.query("partition")
    def partition(message: Message, context: Context) -> Message:
        known = {PARTITION: partition_of(context)}
        if examples is not None:
            known[EXAMPLES] = examples(context)
        total = context.node_config.get(PARTITIONS)
        if isinstance(total, int):
            known[PARTITIONS] = total
        return Message(RecordDict({METRICS: MetricRecord(dict(known))}), reply_to=message)

    return app


@dataclass(frozen=True, kw_only=True)
class ClientRound:
    """What an order's plan is made from, and how to remember what comes of it."""

    order: Order
    algorithm: Combination
    views: Mapping[str, ClientView]
    memory: ClientMemory

    @classmethod
    def of(
        cls, message: Message, order: Order, memory: ClientMemory, point: Point, known: Mapping[str, type[Algorithm]]
    ) -> ClientRound:
        """Put together each part's view from what the server sent and what the client kept."""
        algorithm = build_parts(order.parts, known)
        x = point.x
        zero = torch.zeros_like(x)
        common = ClientView(
            x=x,
            lr=order.lr,
            weight=order.weight,
            participants=order.participants,
            gradient=_own_gradient(message, order, memory, x) if algorithm.needs_gradients else None,
            mean_gradient=received_vector(message, "mean_gradient", x),
            kept=zero,
            shared=zero,
        )
        views: dict[str, ClientView] = {}
        for part in algorithm.parts:
            shared, kept = received_vector(message, f"shared.{part.label}", x), None
            if part.keeps:
                kept = received_vector(message, f"kept.{part.label}", x)
                last = order.memory.get(part.label, -1)
                if kept is None and last >= 0:
                    kept = memory.kept(part.label, last, x, order.digests.get(f"kept.{part.label}"))
            views[part.label] = replace(
                common, shared=zero if shared is None else shared, kept=zero if kept is None else kept
            )
        return cls(order=order, algorithm=algorithm, views=views, memory=memory)

    def remember(self, update: Tensor, total_step_size: float) -> None:
        """Keep k_i⁺ beside the k_i that the server knows of."""
        if self.algorithm.keepers:
            remember_as_sent("update", update, lambda sent: self._keep(sent, total_step_size))

    def _keep(self, update: Tensor, total_step_size: float) -> None:
        for part in self.algorithm.keepers:
            view, last = self.views[part.label], self.order.memory.get(part.label, -1)
            versions = {self.order.round: part.keep(view, update, total_step_size)}
            if last >= 0:
                versions[last] = view.memory()[0]
            self.memory.put_kept(part.label, versions)


def _own_gradient(message: Message, order: Order, memory: ClientMemory, like: Tensor) -> Tensor:
    """Return g_i as the server has it: sent again, or the one that this client kept."""
    sent = received_vector(message, "gradient", like)
    return memory.gradient(order.round, order.limit, like, order.digests.get("gradient")) if sent is None else sent


class _TaskClient:
    """Answers for the clients of one task. The model is made once and used for every message of the process."""

    def __init__(
        self,
        source: Task | Callable[[Context], Task],
        algorithms: Mapping[str, type[Algorithm]],
        device: torch.device | str,
    ) -> None:
        self._source, self._algorithms, self._device = source, algorithms, device
        self._made: tuple[str, Task] | None = None
        self._trainer: tuple[LocalTrainer, Point] | None = None

    def task(self, context: Context) -> Task:
        """Return the task of this node."""
        if isinstance(self._source, Task):
            return self._source
        # A task with all clients serves every node of a process (Flower's simulation); one with a single client, one.
        for_all, for_one = repr(context.run_config), repr((context.run_config, context.node_config))
        if self._made is None or self._made[0] not in (for_all, for_one):
            task = self._source(context)
            self._made = (for_all if len(task.clients) > 1 else for_one, task)
        return self._made[1]

    def examples(self, context: Context, seed: int = 0) -> Examples:
        """Return the node's examples: its partition's, or the only ones there are."""
        task, client = self.task(context), partition_of(context)
        if len(task.clients) == 1:
            return task.client(0, seed)
        if client >= len(task.clients):
            raise GradalignError(f"{PARTITION} is {client}, but the task {task.name} has {len(task.clients)} clients")
        return task.client(client, seed)

    def _prepare(self, context: Context, order: Order) -> tuple[LocalTrainer, Point]:
        task = self.task(context)
        made = self._trainer
        wanted = (order.local, order.seed, order.fast)
        if made is None or made[0].task is not task or (made[0].local, made[0].seed, made[0].fast) != wanted:
            trainer = LocalTrainer(task, order.local, order.seed, self._device, fast=order.fast)
            made = self._trainer = (trainer, trainer.flat.read())
        return made

    def gradient(self, message: Message, context: Context) -> Message:
        """Answer the gradient phase: g_i at the server's point, kept for this round's training."""
        order, memory = Order.of(message), ClientMemory(context)
        with one_thread():
            trainer, like = self._prepare(context, order)
            examples = self.examples(context, order.seed)
            found = trainer.gradient(
                memory.point(message, order.round, like),
                examples,
                client=order.client,
                round_index=order.round,
                limit=order.limit,
            )
        memory.put_point(message, order.round)
        remember_as_sent("gradient", found.gradient.cpu(), lambda g: memory.put_gradient(g, order.round, order.limit))
        numbers = {"loss": found.loss, "accuracy": found.accuracy, EXAMPLES: len(examples), SEEN: found.examples}
        return reply(message, {"gradient": found.gradient}, numbers)

    def train(self, message: Message, context: Context) -> Message:
        """Answer the training phase: make the plan, carry it out, report Δ_i."""
        order, memory = Order.of(message), ClientMemory(context)
        examples = self.examples(context, order.seed)
        with one_thread():
            trainer, like = self._prepare(context, order)
            point = memory.point(message, order.round, like)
            brief = ClientRound.of(message, order, memory, point, self._algorithms)
            plan = brief.algorithm.plan(dict(brief.views))
            done = trainer.train(point, plan, examples, client=order.client, round_index=order.round, lr=order.lr)
        brief.remember(done.update.cpu(), done.total_step_size)
        numbers = {"loss": done.loss, "steps": done.steps, "travel": done.total_step_size}
        numbers |= {EXAMPLES: len(examples), SEEN: done.examples}
        return reply(message, {"update": done.update, "floats": done.floats, "ints": done.ints}, numbers)


def client_app(
    task: Task | Callable[[Context], Task],
    *,
    algorithms: Iterable[type[Algorithm]] = (),
    mods: Iterable[Mod] = (),
    device: torch.device | str = "cpu",
) -> ClientApp:
    """Return the ClientApp that trains a task under any algorithm the server names.

    Args:
        task: The task, or a function that makes it from Flower's context. The node works on the client that its
            ``partition-id`` names, or on the only client of a task that has one.
        algorithms: Algorithm classes of your own that the server may name beside the built-in ones.
        mods: Flower mods for all messages; those that work on arrays go in as ``on_update(mod)``.
        device: Where the model runs.
    """
    known = known_algorithms(algorithms)
    client = _TaskClient(task, known, device)
    app = aligned_app(examples=lambda context: len(client.examples(context)), mods=mods)
    app.train("gradient")(client.gradient)
    app.train()(client.train)
    return app
