"""The Flower engine: a client's work is a message, and its answer is one, too, if it comes.

Clients hold what is theirs (``ClientRound``) and make their own plans. The server sends x once, ḡ and s. It can work
out every k_i from the Δ_i it has seen, and does, so that a run goes on to the same bits when a client lost its state:
the k_i is then sent along. What the server works out is what counts: an order has digests of it.
A client that fails in any way is left out of the phase, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from flwr.app import Array, Message
from torch import Tensor

from gradalign.client.exchange import Broadcast, Gradient, GradientCache, Participant, Score, Update
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup
from gradalign.engines import Engine
from gradalign.engines.local import InProcessEngine
from gradalign.flower.client import client_app
from gradalign.flower.exchange import InProcessGrid, Patience, Roster, logger
from gradalign.flower.messages import (
    DIFFERS,
    GRADIENT,
    LOST,
    TRAIN,
    BadReplyError,
    Order,
    digest,
    instruction,
    metrics_of,
    named_parts,
    point_arrays,
    read_gradient,
    read_size,
    read_update,
    to_array,
    unread_settings,
)
from gradalign.server.federation import Federation

_Reply = TypeVar("_Reply", Gradient, Update)


@dataclass(frozen=True)
class _Heard:
    """The rounds of the last two k_i of a client that the server heard of."""

    last: int = -1
    before: int = -1


class FlowerEngine(Engine):
    """Does the clients' work through a Flower grid, which is its owner's to close."""

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        *,
        train_config: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.exchange, self.patience = roster.exchange, roster.patience
        self.attempts = 1 + self.patience.retries
        self.failures: Mapping[int, str] = {}
        self._federation, self._roster = federation, roster
        self._extra, self._device = dict(train_config or {}), device
        self._gradients = GradientCache()  # this round's g_i as the server has them
        self._phase = ""
        self._met = False
        self._heard: dict[int, _Heard] = {}
        self._holds_point: dict[int, int] = {}
        self._differing: set[int] = set()
        self._warned: set[str] = set()

    def _begin(self, phase: str, told: Broadcast, clients: Sequence[int]) -> dict[int, int]:
        """Begin a phase: return where its clients are; those that are nowhere have failed."""
        needed = len(clients) if not self._met else max(1, math.ceil(self._federation.min_fraction * len(clients)))
        nodes = self._roster.locate(clients, min(needed, len(clients)))
        self._met, self._phase, self.failures = True, f"round {told.round + 1}, {phase}", {}
        for client in clients:
            if client not in nodes:
                self._leave_out(client, "no connected node has its data")
        return nodes

    def _leave_out(self, client: int, reason: str) -> None:
        self.failures = {**self.failures, client: reason}
        logger.warning("%s: client %d is left out: %s", self._phase, client, reason)

    def _ask(self, messages: Mapping[int, Message], seconds: float) -> dict[int, Message]:
        """Return the replies that come in time; the other clients are left out."""
        answers = self.exchange.ask(messages, seconds)
        self._roster.doubt(answers.silent)
        for client, reason in sorted(answers.failures.items()):
            self._leave_out(client, reason)
        return answers.replies

    def _readable(
        self,
        replies: Mapping[int, Message],
        read: Callable[[Message, Point, int, float], _Reply],
        told: Broadcast,
        who: Iterable[Participant],
        *,
        weighed: bool,
    ) -> Iterator[_Reply]:
        """Yield the replies that can be used, in the participants' order."""
        for one in who:
            if one.client not in replies:
                continue
            try:
                weight = self._weight(one, replies[one.client], weighed=weighed)
                yield read(replies[one.client], told.point, one.client, weight)
            except BadReplyError as error:
                self._leave_out(one.client, str(error))

    def _weight(self, who: Participant, message: Message, *, weighed: bool) -> float:
        """Return w_i: the server's, or what a client that was not asked tells with its first reply of a round."""
        if not self._federation.by_examples or who.client in self._roster.told:
            return who.weight
        self._roster.sizes[who.client] = size = read_size(message)
        return who.weight if weighed else float(size)

    def gradients(self, told: Broadcast, who: Sequence[Participant]) -> Iterator[Gradient]:
        """Yield ∇f_i(x) of every client that answers; one that did so at this point is not asked again."""
        self._gradients.begin(told, alone=True)
        known = {one.client: self._gradients.known(one) for one in who}
        missing = [one for one in who if known[one.client] is None]
        known |= self._ask_gradients(told, missing) if missing else {}
        yield from (reply for reply in known.values() if reply is not None)

    def _ask_gradients(self, told: Broadcast, who: Sequence[Participant]) -> dict[int, Gradient]:
        arrays, seconds = point_arrays(told.point), self.patience.gradient_seconds
        nodes = self._begin("gradient phase", told, [one.client for one in who])
        messages = {
            client: instruction(GRADIENT, node, arrays, self._order(told, client), self._extra, seconds)
            for client, node in nodes.items()
        }
        found = {}
        for reply in self._readable(self._ask(messages, seconds), read_gradient, told, who, weighed=False):
            (client,) = reply.clients
            self._holds_point[client] = told.round
            self._gradients.put(client, reply.vector, reply=reply)
            found[client] = reply
        return found

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        """Yield Δ_i of every client that answers."""
        wanted = {one.client: one for one in who}
        if not wanted:
            return
        self._gradients.begin(told, alone=True)
        nodes = self._begin("training phase", told, list(wanted))
        point, common, seconds = point_arrays(told.point), _common_arrays(told), self.patience.train_seconds

        def ask(clients: Iterable[int], *, again: bool) -> dict[int, Message]:
            messages = {}
            for client in clients:
                own = self._own_vectors(told, wanted[client])
                order = self._train_order(told, wanted[client], own)
                sent = _missing_vectors(own, order, everything=again or client in self._differing)
                arrays = common | {name: to_array(vector) for name, vector in sent.items()}
                if again or self._holds_point.get(client) != told.round:
                    arrays |= point
                messages[client] = instruction(TRAIN, nodes[client], arrays, order, self._extra, seconds)
            return self._ask(messages, seconds)

        replies = ask(nodes, again=False)
        forgetful = [client for client, message in replies.items() if metrics_of(message).get(LOST)]
        if forgetful:
            self._differing |= {client for client in forgetful if metrics_of(replies[client]).get(DIFFERS)}
            logger.warning("clients %s lack the server's vectors of them; it sends them again", forgetful)
            others = {client: reply for client, reply in replies.items() if client not in forgetful}
            replies = others | ask(forgetful, again=True)
        weighed = told.algorithm.needs_gradients  # the weights of ḡ are those of the average
        for update in self._readable(replies, read_update, told, wanted.values(), weighed=weighed):
            (client,) = update.clients
            self._heard[client] = _Heard(told.round, self._last_heard(client, told.round))
            self._warn_of_unread(client, unread_settings(replies[client]))
            yield update

    def _warn_of_unread(self, client: int, settings: str) -> None:
        """Say once which settings a client's own training loop leaves aside."""
        if settings and settings not in self._warned:
            self._warned.add(settings)
            logger.warning("client %d's training loop did not look at the strategy's local: %s", client, settings)

    def _last_heard(self, client: int, round_index: int) -> int:
        """Return the round of the k_i that the server counts on, −1 for none; a round played again does not count."""
        heard = self._heard.get(client, _Heard())
        return heard.last if heard.last < round_index else heard.before

    def _own_vectors(self, told: Broadcast, who: Participant) -> dict[str, Tensor]:
        """Return a client's g_i and k_i as the server has them, by the names they are sent under."""
        own = {f"kept.{label}": vector for label, vector in who.kept.items()}
        gradient = self._gradients.get(who.client)
        if told.algorithm.needs_gradients and gradient is not None:
            own["gradient"] = gradient.vector
        return own

    def _order(self, told: Broadcast, client: int) -> Order:
        federation = self._federation
        # lr travels by itself: a schedule is the server's affair, and a number would make a new trainer every round.
        return Order(
            client=client,
            round=told.round,
            seed=federation.seed,
            local=replace(federation.local, lr=1.0),
            fast=federation.fast,
            limit=told.gradient_examples,
        )

    def _train_order(self, told: Broadcast, who: Participant, own: Mapping[str, Tensor]) -> Order:
        last = self._last_heard(who.client, told.round)
        counted_on = [name for name in own if name == "gradient" or last >= 0]
        return replace(
            self._order(told, who.client),
            lr=told.lr,
            parts=named_parts(told.algorithm),
            weight=who.share,
            participants=told.participants,
            memory={part.label: last for part in told.algorithm.keepers},
            digests={name: digest(own[name]) for name in counted_on},
        )

    @cached_property
    def _evaluator(self) -> InProcessEngine:
        task, local, seed = self._federation.task, self._federation.local, self._federation.seed
        setup = Setup(task=task, local=local, seed=seed, device=self._device, fast=self._federation.fast)
        return InProcessEngine(setup)

    def evaluate(self, point: Point) -> Score | None:
        """Return the score on the server's test examples, None when it has none."""
        return self._evaluator.evaluate(point) if self._federation.task.test_examples is not None else None


def _common_arrays(told: Broadcast) -> dict[str, Array]:
    """Return what all clients get for training beside the point: ḡ, and s for those parts whose clients need it."""
    wanted = {part.label for part in told.algorithm.parts if part.extra_down}  # FedDyn's clients do not
    vectors = {f"shared.{label}": shared for label, shared in told.shared.items() if label in wanted}
    if told.mean is not None:
        vectors["mean_gradient"] = told.mean
    return {name: to_array(vector) for name, vector in vectors.items()}


def _missing_vectors(own: Mapping[str, Tensor], order: Order, *, everything: bool) -> dict[str, Tensor]:
    """Return the client's vectors that it does not have: all, or the k_i of one that an earlier server met."""
    return {
        name: vector for name, vector in own.items() if everything or (name not in order.digests and bool(vector.any()))
    }


class _AllHere(Roster):
    """The roster of a grid in this process, where nobody needs to be asked."""

    def __init__(self, grid: InProcessGrid) -> None:
        # In one process the same clients give the same answers.
        super().__init__(grid, Patience(retries=0))
        self._grid = grid

    def locate(self, clients: Sequence[int], needed: int) -> dict[int, int]:
        """Return the nodes of these clients."""
        return {client: self._grid.node_id(client) for client in clients}


def in_process_engine(federation: Federation, device: torch.device | str = "cpu") -> FlowerEngine:
    """Return an engine that runs Flower's apps in this process, one client after the other."""
    app = client_app(federation.task, device=device, algorithms=[type(part) for part in federation.algorithm.parts])
    return FlowerEngine(federation, _AllHere(InProcessGrid(app, len(federation.task.clients))), device=device)
