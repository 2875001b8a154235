"""The Flower engine: a client's work is a message, and its answer is one, too, if it comes.

Clients hold what is theirs (``ClientRound``) and make their own plans. The server sends x once, ḡ and s. It
can work out every k_i from the Δ_i it has seen, and does, so that a run goes on to the same bits when a client lost
its state: the k_i is then sent along. What the server works out is what counts: an order has digests of it.
A client that fails in any way is left out of the phase, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from flwr.app import Array, Message
from flwr.serverapp import Grid

from gradalign.algorithms.plan import ClientView, Combination, Plan
from gradalign.client.exchange import ClientGradient, ClientUpdate, Score
from gradalign.client.flat import Point
from gradalign.engines.local import InProcessEngine
from gradalign.errors import GradalignError
from gradalign.flower.client import client_app
from gradalign.flower.exchange import Answers, Exchange, InProcessGrid, Patience, Roster, logger
from gradalign.flower.messages import (
    DIFFERS,
    GRADIENT,
    LOST,
    METRICS,
    TRAIN,
    BadReplyError,
    Order,
    digest,
    instruction,
    named_parts,
    point_arrays,
    read_gradient,
    read_size,
    read_update,
    to_array,
    unread_settings,
)
from gradalign.server.federation import Federation

_Reply = TypeVar("_Reply", ClientGradient, ClientUpdate)


@dataclass(frozen=True)
class _Heard:
    """The rounds of the last two k_i of a client that the server heard of."""

    last: int
    before: int


class FlowerEngine:
    """Does the clients' work through a Flower grid. See ``RemoteEngine``."""

    def __init__(
        self,
        grid: Grid,
        federation: Federation,
        *,
        patience: Patience | None = None,
        roster: Roster | None = None,
        exchange: Exchange | None = None,
        train_config: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.patience = patience or Patience()
        self.attempts = 1 + self.patience.retries
        self.failures: dict[int, str] = {}
        self.exchange = exchange or Exchange(grid, self.patience.poll_seconds)
        self._roster = roster or Roster(self.exchange, self.patience)
        self._federation, self._extra, self._device = federation, dict(train_config or {}), device
        self._met = False
        self._heard: dict[int, _Heard] = {}
        self._holds_point: dict[int, int] = {}
        self._differing: set[int] = set()
        self._warned: set[str] = set()

    def _nodes(self, clients: Sequence[int], phase: str, round_index: int) -> dict[int, int]:
        """Begin a phase: return where its clients are; those that are nowhere have failed."""
        needed = len(clients) if not self._met else max(1, math.ceil(self._federation.min_fraction * len(clients)))
        nodes = self._roster.locate(clients, min(needed, len(clients)))
        self._met = True
        self.failures = {}
        for client in clients:
            if client not in nodes:
                self._blame(client, "no connected node has its data", phase, round_index)
        return nodes

    def _order(self, client: int, round_index: int, limit: int | None) -> Order:
        # lr travels by itself: a schedule is the server's affair, and a number would make a new trainer every round.
        local = replace(self._federation.local, lr=1.0)
        return Order(
            client=client,
            round=round_index,
            seed=self._federation.seed,
            local=local,
            fast=self._federation.fast,
            limit=limit,
        )

    def _leave_out(self, answers: Answers, phase: str, round_index: int) -> None:
        self._roster.doubt(answers.silent)
        for client, reason in sorted(answers.failures.items()):
            self._blame(client, reason, phase, round_index)

    def _blame(self, client: int, reason: str, phase: str, round_index: int) -> None:
        self.failures[client] = reason
        logger.warning("round %d, %s: client %d is left out: %s", round_index + 1, phase, client, reason)

    def _readable(
        self,
        replies: Mapping[int, Message],
        read: Callable[[Message, Point], _Reply],
        point: Point,
        phase: str,
        round_index: int,
    ) -> Iterator[tuple[int, _Reply]]:
        """Yield the replies that can be used, in client order."""
        for client in sorted(replies):
            try:
                found = read(replies[client], point)
                if self._federation.by_examples and client not in self._roster.told:
                    self._roster.sizes[client] = read_size(replies[client])
            except BadReplyError as error:
                self._blame(client, str(error), phase, round_index)
                continue
            yield client, found

    def gradients(
        self, point: Point, clients: Sequence[int], *, round_index: int, limit: int | None = None
    ) -> Iterator[tuple[int, ClientGradient]]:
        """Yield (client, ∇f_i(x)) for every client that answers."""
        if not clients:
            return
        arrays, seconds = point_arrays(point), self.patience.gradient_seconds
        nodes = self._nodes(clients, "gradient phase", round_index)
        orders = {client: self._order(client, round_index, limit) for client in nodes}
        messages = {
            client: instruction(GRADIENT, nodes[client], arrays, order, self._extra, seconds)
            for client, order in orders.items()
        }
        answers = self.exchange.ask(messages, seconds)
        self._leave_out(answers, "gradient phase", round_index)
        for client, found in self._readable(answers.replies, read_gradient, point, "gradient phase", round_index):
            self._holds_point[client] = round_index
            yield client, found

    def train(
        self, point: Point, plans: Iterable[tuple[int, Plan]], *, round_index: int, lr: float
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Refuse: Flower's clients make their plans themselves, see ``train_views``."""
        raise GradalignError("the Flower engine's clients make their own plans; use play_round")

    def train_views(
        self,
        point: Point,
        algorithm: Combination,
        views: Iterable[tuple[int, Mapping[str, ClientView]]],
        *,
        round_index: int,
        lr: float,
    ) -> Iterator[tuple[int, ClientUpdate]]:
        """Yield (client, Δ_i) for every client that answers."""
        wanted = dict(views)
        if not wanted:
            return
        packer = _Packer(point, algorithm)
        nodes = self._nodes(list(wanted), "training phase", round_index)

        def ask(clients: Iterable[int], *, with_memory: bool) -> Answers:
            seconds, messages = self.patience.train_seconds, {}
            for client in clients:
                order = self._train_order(client, algorithm, wanted[client], round_index, lr)
                known_to_differ = client in self._differing
                arrays = packer.arrays(wanted[client], order, with_memory=with_memory or known_to_differ)
                if with_memory or self._holds_point.get(client) != round_index:
                    arrays |= packer.point
                messages[client] = instruction(TRAIN, nodes[client], arrays, order, self._extra, seconds)
            return self.exchange.ask(messages, seconds)

        answers = ask(nodes, with_memory=False)
        replies = answers.replies
        self._leave_out(answers, "training phase", round_index)
        forgetful = [client for client, message in replies.items() if _has(message, LOST)]
        if forgetful:
            self._differing |= {client for client in forgetful if _has(replies[client], DIFFERS)}
            logger.warning("clients %s lack the server's vectors of them; it sends them again", forgetful)
            again = ask(forgetful, with_memory=True)
            self._leave_out(again, "training phase", round_index)
            replies = {client: reply for client, reply in replies.items() if client not in forgetful} | again.replies
        for client, update in self._readable(replies, read_update, point, "training phase", round_index):
            self._heard[client] = _Heard(round_index, self._last_heard(client, round_index))
            self._warn_of_unread(client, unread_settings(replies[client]))
            yield client, update

    def _warn_of_unread(self, client: int, settings: str) -> None:
        """Say once which settings a client's own training loop leaves aside."""
        if settings and settings not in self._warned:
            self._warned.add(settings)
            logger.warning("client %d's training loop did not look at the strategy's local: %s", client, settings)

    def _last_heard(self, client: int, round_index: int) -> int:
        """Return the round of the k_i that the server counts on, −1 for none; a round played again does not count."""
        heard = self._heard.get(client, _Heard(-1, -1))
        return heard.last if heard.last < round_index else heard.before

    def _train_order(
        self, client: int, algorithm: Combination, views: Mapping[str, ClientView], round_index: int, lr: float
    ) -> Order:
        first = next(iter(views.values()))
        last = self._last_heard(client, round_index)
        held = {f"kept.{part.label}": views[part.label].kept for part in algorithm.keepers if last >= 0}
        if algorithm.needs_gradients:
            held["gradient"] = first.gradient
        return replace(
            self._order(client, round_index, self._federation.local.gradient_examples),
            lr=lr,
            parts=named_parts(algorithm),
            weight=first.weight,
            participants=first.participants,
            memory={part.label: last for part in algorithm.keepers},
            digests={name: digest(vector) for name, vector in held.items() if vector is not None},
        )

    @cached_property
    def _evaluator(self) -> InProcessEngine:
        federation = self._federation
        return InProcessEngine(federation.task, federation.local, federation.seed, self._device, fast=federation.fast)

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the server's test examples, None when it has none."""
        return self._evaluator.evaluate(point) if self._federation.task.test_examples is not None else None

    def close(self) -> None:
        """Nothing to release: the grid is its owner's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Packer:
    """Makes the arrays of training messages; what all clients get is made once."""

    def __init__(self, point: Point, algorithm: Combination) -> None:
        self._algorithm = algorithm
        self.point = point_arrays(point)
        self._with_round: dict[str, Array] | None = None

    def _round_arrays(self, views: Mapping[str, ClientView]) -> dict[str, Array]:
        if self._with_round is None:
            arrays: dict[str, Array] = {}
            mean = next(iter(views.values())).mean_gradient
            if mean is not None:
                arrays["mean_gradient"] = to_array(mean)
            for part in self._algorithm.keepers:
                shared = views[part.label].shared
                if part.extra_vectors and shared is not None:  # FedDyn's clients do not need s
                    arrays[f"shared.{part.label}"] = to_array(shared)
            self._with_round = arrays
        return self._with_round

    def arrays(self, views: Mapping[str, ClientView], order: Order, *, with_memory: bool) -> dict[str, Array]:
        """Return a client's arrays but for the point.

        Its g_i and k_i are among them when it does not have the server's, its k_i when an earlier server met it.
        """
        arrays = dict(self._round_arrays(views))
        own = next(iter(views.values())).gradient
        if with_memory and self._algorithm.needs_gradients and own is not None:
            arrays["gradient"] = to_array(own)
        for part in self._algorithm.keepers:
            kept = views[part.label].kept
            unmet = order.memory[part.label] < 0
            if kept is not None and (with_memory or (unmet and bool(kept.any()))):
                arrays[f"kept.{part.label}"] = to_array(kept)
        return arrays


def _has(message: Message, name: str) -> bool:
    metrics = message.content.metric_records.get(METRICS) if message.has_content() else None
    return metrics is not None and bool(metrics.get(name))


class _AllHere(Roster):
    """The roster of a grid in this process, where nobody needs to be asked."""

    def __init__(self, exchange: Exchange, patience: Patience, grid: InProcessGrid) -> None:
        super().__init__(exchange, patience)
        self._grid = grid

    def locate(self, clients: Sequence[int], needed: int) -> dict[int, int]:
        """Return the nodes of these clients."""
        return {client: self._grid.node_id(client) for client in clients}


def in_process_engine(federation: Federation, device: torch.device | str = "cpu") -> FlowerEngine:
    """Return an engine that runs Flower's apps in this process, one client after the other."""
    app = client_app(federation.task, device=device, algorithms=[type(part) for part in federation.algorithm.parts])
    grid = InProcessGrid(app, len(federation.task.clients))
    patience = Patience(retries=0)  # in one process the same clients give the same answers
    exchange = Exchange(grid, patience.poll_seconds)
    roster = _AllHere(exchange, patience, grid)
    return FlowerEngine(grid, federation, patience=patience, roster=roster, exchange=exchange, device=device)
