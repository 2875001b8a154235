"""One round, seen from the server: who takes part, the two phases, the averages, the server's step.

``play_round`` returns the next state. A round that fails leaves the last good one as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradalign.algorithms.plan import ClientView, Plan, Shift
from gradalign.client.exchange import ClientGradient, ClientUpdate
from gradalign.client.flat import Point, all_finite
from gradalign.engines import Engine, RemoteEngine, SummingEngine
from gradalign.engines.local import one_thread
from gradalign.errors import DivergedError, TooFewClientsError
from gradalign.seeding import Purpose, numpy_stream
from gradalign.server.alignment import weighted_mean
from gradalign.server.federation import Federation, ServerState, Totals
from gradalign.server.tally import Tally


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What a round was like."""

    lr: float
    beta: float
    local_loss: float | None
    sampled: int
    reported: int
    failed: int
    """Sampled clients that were left out because they did not answer or answered wrongly; dropout is not counted."""


def gather_gradients(
    federation: Federation,
    engine: Engine,
    state: ServerState,
    clients: Sequence[int],
    known: Mapping[int, ClientGradient],
) -> dict[int, ClientGradient]:
    """Return g_i of every client that answers, taking those already known at this point as they are."""
    gradients = dict(known)
    missing = [client for client in clients if client not in gradients]
    limit = federation.local.gradient_examples
    for client, reply in engine.gradients(state.point, missing, round_index=state.round, limit=limit):
        if not math.isfinite(reply.loss) or not all_finite(reply.gradient):
            raise _diverged("gradient", state.round, f"at client {client}", federation)
        gradients[client] = replace(reply, gradient=reply.gradient.to("cpu", copy=True))
    return {client: gradients[client] for client in clients if client in gradients}


def _diverged(what: str, round_index: int, where: str, federation: Federation) -> DivergedError:
    lr = federation.lr_at(round_index)
    return DivergedError(
        f"the {what} became NaN or infinite in round {round_index + 1} {where} (local.lr = {lr:g}); "
        "lower local.lr or algorithm.beta, or set local.clip_norm"
    )


class _Round:
    """The working memory of one round."""

    def __init__(self, federation: Federation, state: ServerState) -> None:
        self.federation, self.state = federation, state
        self.algorithm = federation.algorithm_at(state.round)
        self.lr = federation.lr_at(state.round)
        self.clients = federation.sample(state.round)
        self.weights = {client: federation.weight(client) for client in self.clients}
        self.total_weight = sum(self.weights.values())
        self.gradients: dict[int, Tensor] = {}
        self.mean_gradient: Tensor | None = None
        self.gradient_examples = 0
        self.shift: Shift | None = None
        self.zero = torch.zeros_like(state.point.x)
        self.is_shift = self.algorithm.shift(self.zero) is not None
        self.shared = {name: vector.to(self.zero.dtype) for name, vector in state.shared.items()}

    def gradient_phase(self, engine: Engine, known: Mapping[int, ClientGradient]) -> None:
        """Gather g_i and ḡ; clients that do not answer leave the round."""
        if (
            isinstance(engine, SummingEngine)
            and self.is_shift
            and self.sums_suffice(engine)
            and engine.keeps_gradients(self.clients)
        ):
            return self.sum_gradients(engine)
        found = gather_gradients(self.federation, engine, self.state, self.clients, known)
        self.gradients = {client: reply.gradient for client, reply in found.items()}
        self.gradient_examples = sum(reply.examples for reply in found.values())
        self.clients = list(self.gradients)
        self.require_enough(len(self.clients), "gradient phase", engine)
        self.weights |= {client: self.told_weight(client) for client in self.clients}
        weights = [self.weights[client] for client in self.clients]
        self.total_weight = sum(weights)
        mean = weighted_mean(list(self.gradients.values()), weights)
        self.mean_gradient = mean.to(self.state.point.x.dtype)

    def told_weight(self, client: int) -> float:
        """Return the weight of a client that has answered; one elsewhere may have told it only now."""
        return self.federation.weight(client) if self.federation.elsewhere else self.weights[client]

    def sums_suffice(self, engine: SummingEngine) -> bool:
        """Return whether nothing of single clients is asked for."""
        return engine.sums(self.is_shift) and not self.algorithm.keepers

    def sum_gradients(self, engine: SummingEngine) -> None:
        """Gather ḡ alone: the clients' displacements are made where their gradients are."""
        total = torch.zeros(self.state.point.x.shape, dtype=torch.float64)
        weighted = [(client, self.weights[client]) for client in self.clients]
        limit = self.federation.local.gradient_examples
        for clients, reply in engine.gradient_sums(
            self.state.point, weighted, round_index=self.state.round, limit=limit
        ):
            self.require_finite("gradient", clients, reply.losses, reply.gradient)
            total.add_(reply.gradient.cpu())
            self.gradient_examples += reply.examples
        self.mean_gradient = total.div_(self.total_weight).to(self.state.point.x.dtype)
        self.shift = self.algorithm.shift(self.mean_gradient)

    def require_finite(self, what: str, clients: Sequence[int], losses: Sequence[float], vector: Tensor) -> None:
        """Say which client of a group diverged, when one did."""
        if math.isfinite(sum(losses)) and all_finite(vector):
            return
        lost = [client for client, loss in zip(clients, losses, strict=True) if not math.isfinite(loss)]
        where = f"at client {lost[0]}" if lost else f"at one of the clients {clients[0]} to {clients[-1]}"
        raise _diverged(what, self.state.round, where, self.federation)

    def view(self, client: int, label: str) -> ClientView:
        """Return what the named algorithm sees of this client."""
        return ClientView(
            x=self.state.point.x,
            lr=self.lr,
            weight=self.weights[client] / self.total_weight,
            participants=len(self.clients),
            gradient=self.gradients.get(client),
            mean_gradient=self.mean_gradient,
            kept=self.state.kept.get(label, {}).get(client, self.zero),
            shared=self.shared.get(label, self.zero),
        )

    def require_enough(self, answered: int, phase: str, engine: Engine | SummingEngine) -> None:
        """Refuse to go on when fewer clients answered than ``min_fraction`` asks for, or none."""
        sampled = len(self.weights)
        least = 0 if self.federation.dropout else 1  # simulated dropout may silence a whole round
        needed = max(least, math.ceil(self.federation.min_fraction * sampled))
        if answered >= needed:
            return
        failures = engine.failures if isinstance(engine, RemoteEngine) else {}
        reasons = "".join(f"; client {client}: {reason}" for client, reason in sorted(failures.items())[:3])
        raise TooFewClientsError(
            f"only {answered} of {sampled} clients answered the {phase} of round {self.state.round + 1}, "
            f"and {needed} are needed{reasons}"
        )

    def views(self) -> Iterator[tuple[int, dict[str, ClientView]]]:
        """Yield what is known of the clients that do not fall silent, one at a time."""
        for client in self.speaking():
            yield client, {part.label: self.view(client, part.label) for part in self.algorithm.parts}

    def speaking(self) -> Iterator[int]:
        """Yield the clients that do not fall silent."""
        return (client for client in self.clients if not self.federation.silent(self.state.round, client))

    def weighted_plans(self) -> Iterator[tuple[int, Plan, float]]:
        """Yield the plans and weights of the clients that do not fall silent; beside a shift there is none to make."""
        if self.shift is not None or (self.is_shift and not self.algorithm.needs_gradients):
            nothing = Plan()
            return ((client, nothing, self.weights[client]) for client in self.speaking())
        return ((client, self.algorithm.plan(views), self.weights[client]) for client, views in self.views())

    def train(self, engine: Engine) -> Iterator[tuple[int, ClientUpdate]]:
        """Have plans made, here or at the clients, and carried out."""
        point, when = self.state.point, self.state.round
        if isinstance(engine, RemoteEngine):
            return engine.train_views(point, self.algorithm, self.views(), round_index=when, lr=self.lr)
        plans = ((client, self.algorithm.plan(views)) for client, views in self.views())
        return engine.train(point, plans, round_index=when, lr=self.lr)

    def train_phase(self, engine: Engine) -> Tally:
        """Let the clients train and add up what they report."""
        if isinstance(engine, SummingEngine) and self.sums_suffice(engine):
            return self.train_in_groups(engine)
        tally = Tally(self.state)
        for client, reply in self.train(engine):
            if not math.isfinite(reply.loss) or not all_finite(reply.update):
                raise _diverged("loss", self.state.round, f"at client {client}", self.federation)
            # The weights of ḡ are those of the average.
            weight = self.weights[client] if self.gradients else self.told_weight(client)
            tally.add(reply, weight)
            for part in self.algorithm.keepers:
                view = self.view(client, part.label)
                old = view.memory()[0]
                tally.add_kept(
                    part.label, client, old, part.keep(view, reply.update.cpu(), reply.total_step_size), weight
                )
        self.require_enough(tally.reported, "training phase", engine)
        return tally

    def train_in_groups(self, engine: SummingEngine) -> Tally:
        """Let the clients train and add up the sums of neighbours: nothing of single clients is kept."""
        tally = Tally(self.state)
        plans, when = self.weighted_plans(), self.state.round
        for clients, reply in engine.train_sums(
            self.state.point, plans, round_index=when, lr=self.lr, shift=self.shift
        ):
            self.require_finite("loss", clients, reply.losses, reply.update)
            tally.add_sum(reply)
        self.require_enough(tally.reported, "training phase", engine)
        return tally

    def spent(self, tally: Tally) -> Totals:
        """Return the totals after this round."""
        phases = 2 if self.algorithm.needs_gradients else 1
        point, vector = self.state.point.nbytes, self.zero.numel() * self.zero.element_size()
        extra = sum(part.extra_vectors for part in self.algorithm.parts) * vector
        gradient = vector if phases == 2 else 0
        before = self.state.totals
        # Down: x and the buffers, ḡ after the gradient phase, the keepers' s.
        # Up: Δ_i and the buffers, g_i in the gradient phase, the keepers' k_i⁺ − k_i.
        return Totals(
            communication_rounds=before.communication_rounds + phases,
            local_updates=before.local_updates + tally.steps,
            examples=before.examples + self.gradient_examples + tally.examples,
            bytes_down=before.bytes_down + len(self.clients) * (point + gradient + extra),
            bytes_up=before.bytes_up + len(self.clients) * gradient + tally.reported * (point + extra),
        )

    def close(self, tally: Tally) -> ServerState:
        """Take the server's step."""
        state, total = self.state, len(self.federation.task.clients)
        after = replace(state, round=state.round + 1, totals=self.spent(tally))
        if not tally.reported:
            return after
        shared = dict(state.shared)
        for label, change in tally.kept_change.items():
            before = shared.get(label, torch.zeros_like(change))
            shared[label] = before + (tally.reported / total) * (change / tally.weight)
        update = self.algorithm.corrected(tally.update / tally.weight, shared, tally.reported)
        x, memory = self.algorithm.server.step(state.point.x.double(), update, state.memory)
        x = x.to(state.point.x.dtype)
        if not all_finite(x):
            raise _diverged("model", state.round, "on the server", self.federation)
        floats = (tally.floats / tally.weight).to(state.point.floats.dtype)
        # New dictionaries, so that the state before the round stays whole if anything after this goes wrong.
        kept = {label: {**state.kept.get(label, {}), **new} for label, new in tally.kept.items()}
        return replace(after, point=Point(x, floats, tally.ints), memory=memory, shared=shared, kept=kept)


def play_round(
    federation: Federation,
    engine: Engine,
    state: ServerState,
    known_gradients: Mapping[int, ClientGradient] | None = None,
) -> tuple[ServerState, RoundFacts]:
    """Play one round and return the state after it.

    Args:
        federation: What stays the same over all rounds.
        engine: The machine that does the clients' work.
        state: The state before the round; left as it is.
        known_gradients: Clients' gradients at exactly this point, when someone measured them already.
    """
    # The server's own sums gain little from threads, and would take the cores away from the workers.
    with one_thread():
        return _play(_Round(federation, state), engine, known_gradients or {})


def _play(
    play: _Round, engine: Engine, known_gradients: Mapping[int, ClientGradient]
) -> tuple[ServerState, RoundFacts]:
    federation, state = play.federation, play.state
    if play.algorithm.needs_gradients:
        play.gradient_phase(engine, known_gradients)
    tally = play.train_phase(engine)
    loss = tally.loss / tally.weight if tally.reported else None
    silent = sum(federation.silent(state.round, client) for client in play.clients)
    facts = RoundFacts(
        lr=play.lr,
        beta=play.algorithm.beta,
        local_loss=loss,
        sampled=len(play.weights),
        reported=tally.reported,
        failed=len(play.weights) - silent - tally.reported,
    )
    return play.close(tally), facts


def probe_clients(clients: int, limit: int, seed: int) -> list[int]:
    """Return the fixed clients on which alignment and training loss are measured: all, or 0 and a seeded choice."""
    if limit >= clients:
        return list(range(clients))
    others = numpy_stream(seed, Purpose.PROBE).choice(clients - 1, limit - 1, replace=False, shuffle=False)
    return [0, *sorted(int(i) + 1 for i in np.atleast_1d(others))]
