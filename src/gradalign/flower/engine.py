"""The Flower engine: a client's work is a message, and its answer is one, too, if it comes.

Clients hold what is theirs (``ClientRound``) and make their own plans. The server sends x once, ḡ and s. It can work
out every k_i from the Δ_i it has seen, and does, so that a run goes on to the same bits when a client lost its state:
the k_i is then sent along. What the server works out is what counts: an order has digests of it.
A client that fails in any way is left out of the phase, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from flwr.app import Array, ConfigRecord, Message
from torch import Tensor

from gradalign.client.exchange import Broadcast, ClientScore, Gradient, GradientCache, Participant, Score, Update
from gradalign.client.flat import Point
from gradalign.engines import Engine
from gradalign.engines.local import InProcessEngine
from gradalign.errors import GradalignError
from gradalign.flower import messages
from gradalign.flower.client import client_app
from gradalign.flower.exchange import Patience, Roster, logger
from gradalign.flower.grid import InProcessGrid
from gradalign.flower.hearing import Hearing, evaluations
from gradalign.flower.layout import Layout
from gradalign.flower.messages import BadReplyError, Order, instruction, metrics_of, point_arrays, to_array
from gradalign.server.federation import Federation

_Reply = TypeVar("_Reply", Gradient, Update)


class FlowerEngine(Engine):
    """Does the clients' work through a Flower grid, which is its owner's to close.

    ``keys`` are what an app finds its arrays and config under, ``weight_key`` the number of its reply that it weighs.
    """

    hearing: Hearing | None = None

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        *,
        train_config: Mapping[str, Any] | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
        keys: tuple[str, str] = (messages.ARRAYS, messages.CONFIG),
        weight_key: str = messages.EXAMPLES,
        device: torch.device | str = "cpu",
    ) -> None:
        self.exchange, self.patience = roster.exchange, roster.patience
        self.attempts = 1 + self.patience.retries
        self.failures: Mapping[int, str] = {}
        self.federation, self.roster, self.keys, self._weight_key = federation, roster, keys, weight_key
        self._extra, self.evaluate_config, self._device = dict(train_config or {}), dict(evaluate_config or {}), device
        self._played = 0
        self._gradients = GradientCache()  # this round's g_i as the server has them
        self.phase, self._met = "", False
        self._heard: dict[int, tuple[int, int]] = {}  # the rounds of a client's last k_i and of the one before
        self._holds_point: dict[int, int] = {}
        self._differing: set[int] = set()
        self._warned: set[str] = set()

    def _begin(self, phase: str, told: Broadcast, clients: Sequence[int]) -> dict[int, int]:
        """Begin a phase: return where its clients are; those that are nowhere have failed."""
        needed = len(clients) if not self._met else max(1, math.ceil(self.federation.min_fraction * len(clients)))
        nodes = self.roster.locate(clients, min(needed, len(clients)))
        self._met, self.phase, self.failures = True, f"round {told.round + 1}, {phase}", {}
        for client in clients:
            if client not in nodes:
                self._leave_out(client, f"no connected node has its data{self.roster.complaint}")
        return nodes

    def _leave_out(self, client: int, reason: str) -> None:
        self.failures = {**self.failures, client: reason}
        logger.warning("%s: client %d is left out: %s", self.phase, client, reason)

    def ask(self, orders: Mapping[int, Message], seconds: float) -> dict[int, Message]:
        """Return the replies that come in time; the other clients are left out."""
        answers = self.exchange.ask(orders, seconds)
        self.roster.doubt(answers.silent)
        for client, reason in sorted(answers.failures.items()):
            self._leave_out(client, reason)
        return answers.replies

    def _readable(
        self,
        replies: Mapping[int, Message],
        read: Callable[[Message, Point, int, float], _Reply],
        told: Broadcast,
        who: Iterable[Participant],
    ) -> Iterator[_Reply]:
        """Yield the replies that can be used, in the participants' order.

        w_i is the server's, or what a client that was not asked tells with its first reply of a round: after a gradient
        phase the weights of ḡ are those of the average.
        """
        for client, weight in ((one.client, one.weight) for one in who if one.client in replies):
            try:
                unknown = self._weight_key != messages.EXAMPLES or client not in self.roster.told
                if self.federation.by_examples and unknown:
                    self.roster.sizes[client] = size = messages.read_size(replies[client], self._weight_key)
                    weight = size if told.mean is None else weight
                elif math.isnan(weight):  # it was sampled before it was asked
                    weight = self.roster.sizes[client]
                yield read(replies[client], told.point, client, weight)
            except BadReplyError as error:
                self._leave_out(client, str(error))

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
        orders = {}
        for client, node in nodes.items():
            order, (frozen, extra) = self._order(told, client), self._for_app(client)
            orders[client] = instruction(messages.GRADIENT, node, {**arrays, **frozen}, order, extra, seconds)
        found = {}
        for reply in self._readable(self.ask(orders, seconds), messages.read_gradient, told, who):
            (client,) = reply.clients
            self._holds_point[client] = told.round
            self._gradients.put(client, reply.vector, reply=reply)
            found[client] = reply
        return found

    def train(self, told: Broadcast, who: Iterable[Participant]) -> Iterator[Update]:
        wanted = {one.client: one for one in who}
        if not wanted:
            return
        self._gradients.begin(told, alone=True)
        nodes = self._begin("training phase", told, list(wanted))
        point, common, seconds = point_arrays(told.point), _common_arrays(told), self.patience.train_seconds

        def ask(clients: Iterable[int], *, again: bool) -> dict[int, Message]:
            orders = {}
            for client in clients:
                own = self._own_vectors(told, wanted[client])
                order = self._train_order(told, wanted[client], own)
                arrays, (frozen, extra) = dict(common), self._for_app(client)
                for name, vector in own.items():  # those it lacks: all, or the k_i that an earlier server heard of
                    if again or client in self._differing or (name not in order.digests and bool(vector.any())):
                        arrays[name] = to_array(vector)
                if again or self._holds_point.get(client) != told.round:
                    arrays |= {**point, **frozen}
                orders[client] = instruction(messages.TRAIN, nodes[client], arrays, order, extra, seconds)
            return self.ask(orders, seconds)

        replies = ask(nodes, again=False)
        forgetful = [client for client, message in replies.items() if metrics_of(message).get(messages.LOST)]
        if forgetful:
            self._differing |= {client for client in forgetful if metrics_of(replies[client]).get(messages.DIFFERS)}
            logger.warning("clients %s lack the server's vectors of them; it sends them again", forgetful)
            for client in forgetful:
                del replies[client]
            replies |= ask(forgetful, again=True)
        heard = {}
        for update in self._readable(replies, messages.read_update, told, wanted.values()):
            (client,) = update.clients
            heard[client] = replies[client]
            self._heard[client] = told.round, self._last_heard(client, told.round)
            config = replies[client].content.config_records.get(messages.CONFIG, ConfigRecord())
            unread = str(config.get(messages.UNREAD, ""))
            if unread and unread not in self._warned:  # said once for all clients
                self._warned.add(unread)
                logger.warning("client %d's training loop did not look at the strategy's local: %s", client, unread)
            yield update
        self._played = told.round + 1
        if self.hearing is not None:
            self.hearing.trained(self._played, heard)

    @cached_property
    def _layout(self) -> tuple[dict[str, Array], dict[str, str]]:
        model = self.federation.task.make_model(self.federation.seed)
        layout, state = Layout.of(model), model.state_dict()
        if any(value.dtype == torch.bfloat16 for value in state.values()):
            raise GradalignError("Flower's arrays know no bfloat16; such models need a client_app or aligned_app")
        frozen = {where: to_array(state[name]) for name, _, where, _ in layout.entries if where.startswith("rest.")}
        return frozen, {messages.LAYOUT: layout.encode(), messages.KEYS: " ".join(self.keys)}

    def _for_app(self, client: int) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays and the config that only some apps need: those that load named arrays."""
        frozen, layout = self._layout if client in self.roster.stock else ({}, {})
        return frozen, {**self._extra, **layout}

    def _last_heard(self, client: int, round_index: int) -> int:
        """Return the round of the k_i that the server counts on, −1 for none; a round played again does not count."""
        last, before = self._heard.get(client, (-1, -1))
        return last if last < round_index else before

    def _own_vectors(self, told: Broadcast, who: Participant) -> dict[str, Tensor]:
        """Return a client's g_i and k_i as the server has them, by the names they are sent under."""
        own = {f"kept.{label}": vector for label, vector in who.kept.items()}
        gradient = self._gradients.get(who.client)
        if told.algorithm.needs_gradients and gradient is not None:
            own["gradient"] = gradient.vector
        return own

    def _order(self, told: Broadcast, client: int) -> Order:
        # lr is sent by itself: a schedule is the server's affair, and a number would make a new trainer every round.
        local, seed, fast = replace(self.federation.local, lr=1.0), self.federation.seed, self.federation.fast
        limit, sizes = told.gradient_examples, messages.needs_step_sizes(self.federation.algorithm)
        return Order(client=client, round=told.round, seed=seed, local=local, fast=fast, limit=limit, step_sizes=sizes)

    def _train_order(self, told: Broadcast, who: Participant, own: Mapping[str, Tensor]) -> Order:
        last = self._last_heard(who.client, told.round)
        counted_on = [name for name in own if name == "gradient" or last >= 0]
        return replace(
            self._order(told, who.client),
            lr=told.lr,
            parts=messages.encoded_parts(told.algorithm),
            weight=who.share,
            participants=told.participants,
            memory={part.label: last for part in told.algorithm.keepers},
            digests={name: messages.digest(own[name]) for name in counted_on},
        )

    @cached_property
    def _evaluator(self) -> InProcessEngine:
        return InProcessEngine(replace(self.federation.setup(self._device), clients_per_round=0))

    def evaluate(self, point: Point) -> Score | None:
        if self.hearing is not None:
            self.hearing.reached(self._played, point)
        return self._evaluator.evaluate(point) if self.federation.task.test_examples is not None else None

    def evaluate_clients(
        self, told: Broadcast, who: Sequence[Participant], *, tuned: bool = False
    ) -> Iterator[ClientScore]:
        if self.hearing is not None and not tuned:  # then they have been asked, as many as are to be
            yield from self.hearing.scores(told.round)
            return
        replies = evaluations(self, told.round, told.point, [one.client for one in who], lr=told.lr, tuned=tuned)
        scores = (messages.read_score(reply, client, self._weight_key) for client, reply in replies.items())
        yield from (score for score in scores if score is not None)


def _common_arrays(told: Broadcast) -> dict[str, Array]:
    """Return what all clients get for training beside the point: ḡ, and s for those parts whose clients need it."""
    wanted = {part.label for part in told.algorithm.parts if part.extra_down}  # FedDyn's clients do not
    vectors = {f"shared.{label}": shared for label, shared in told.shared.items() if label in wanted}
    if told.mean is not None:
        vectors["mean_gradient"] = told.mean
    return {name: to_array(vector) for name, vector in vectors.items()}


class _AllHere(Roster):
    """The roster of a grid in this process, where nobody needs to be asked."""

    def __init__(self, grid: InProcessGrid, *, evaluates: bool) -> None:
        super().__init__(grid, Patience(retries=0))  # asked again, the same clients would give the same answers
        self._grid = grid
        self.evaluating = self.tuning = set(range(len(grid.get_node_ids()))) if evaluates else set()

    def locate(self, clients: Sequence[int], needed: int) -> dict[int, int]:
        return {client: self._grid.node_id(client) for client in clients}


def in_process_engine(federation: Federation, device: torch.device | str = "cpu") -> FlowerEngine:
    """Return an engine that runs Flower's apps in this process, one client after the other."""
    app = client_app(federation.task, device=device, algorithms=[type(part) for part in federation.algorithm.parts])
    roster = _AllHere(
        InProcessGrid(app, len(federation.task.clients)), evaluates=federation.task.client_tests is not None
    )
    return FlowerEngine(federation, roster, device=device)
