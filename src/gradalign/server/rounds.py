"""One round, seen from the server: who takes part, the two phases, the averages, the server's step.

``play_round`` returns the next state. A round that fails leaves the last good one as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradalign.algorithms.rules import ClientReport, ServerRule
from gradalign.algorithms.view import SharedSums
from gradalign.client.exchange import NOTHING, Broadcast, Participant, Reply, Update
from gradalign.client.flat import Point, all_finite
from gradalign.client.trainer import one_thread
from gradalign.engines import Engine
from gradalign.errors import DivergedError, TooFewClientsError, named_failure
from gradalign.server.federation import Federation
from gradalign.server.state import ServerState, Totals


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


class Sums:
    """The server's sums over one phase's replies, in float64 and client order, and what was spent on them.

    With a rule that ``sees_each``, also Σ w_i a_i Δ_i and what that rule is told of every client.
    """

    def __init__(self, point: Point, rule: ServerRule | None = None) -> None:
        self.vector = torch.zeros(point.x.shape, dtype=torch.float64)
        self._rule = rule if rule is not None and rule.sees_each else None
        self.counted = self.vector if self._rule is None else torch.zeros_like(self.vector)
        self.reports: list[ClientReport] = []
        self.floats = torch.zeros(point.floats.shape, dtype=torch.float64)
        self.ints = point.ints
        self.weight = self.loss = self.total_step_size = self.step_size = 0.0
        self.weights: dict[int, float] = {}
        self.steps = self.examples = 0
        self.kept: dict[str, dict[int, Tensor]] = {}
        self.kept_change: dict[str, Tensor] = {}
        """Σ w_i⁺k_i⁺ − w_i k_i, w_i being the weight that k_i was counted with when it came."""
        self._facts: dict[str, list[float]] = {}

    @property
    def reported(self) -> int:
        return len(self.weights)

    def add(self, reply: Reply) -> None:
        """Add what one client answers, or several together; the weights are the reply's."""
        self.vector.add_(reply.vector.cpu(), alpha=reply.factor)
        if isinstance(reply, Update):
            self.floats.add_(reply.floats, alpha=reply.factor)
            self.ints = self.ints if self.weights else reply.ints.clone()
            self.steps += sum(reply.steps)
            sizes = zip(reply.weights, reply.total_step_sizes, strict=True)
            self.total_step_size += sum(weight * size for weight, size in sizes)
            each = zip(reply.weights, reply.total_step_sizes, reply.steps, strict=True)
            self.step_size += sum(weight * size / steps for weight, size, steps in each if steps)
            if self._rule is not None:
                self._count(reply, self._rule)
        self.weights |= zip(reply.clients, reply.weights, strict=True)
        self.weight += sum(reply.weights)
        self.loss += sum(weight * loss for weight, loss in zip(reply.weights, reply.losses, strict=True))
        self.examples += reply.examples
        for name, values in reply.facts.items():
            fact = self._facts.setdefault(name, [0.0, 0.0])
            fact[0] += sum(weight * value for weight, value in zip(reply.weights, values, strict=True))
            fact[1] += sum(reply.weights)

    def facts(self, label: str) -> dict[str, float]:
        """Return the means of what clients reported for the algorithm of this label, over those that did."""
        own = {name: fact for name, fact in self._facts.items() if name.startswith(f"{label}.")}
        return {name.removeprefix(f"{label}."): total / weight for name, (total, weight) in own.items()}

    def _count(self, reply: Update, rule: ServerRule) -> None:
        """Add a lone client's update as often as the rule counts it."""
        (client,), (weight,), vector = reply.clients, reply.weights, reply.vector.cpu()
        norm, (steps,), (size,) = float(vector.double().norm()), reply.steps, reply.total_step_sizes
        one = ClientReport(client=client, weight=weight, steps=steps, total_step_size=size, norm=norm)
        self.counted.add_(vector, alpha=reply.factor * rule.factor(one))
        self.reports.append(one)

    def add_kept(self, label: str, client: int, old: tuple[Tensor, float] | None, new: Tensor, weight: float) -> None:
        """Add a client's new k_i and its weight, given the old ones."""
        self.kept.setdefault(label, {})[client] = new
        change = self.kept_change.setdefault(label, torch.zeros(new.shape, dtype=torch.float64))
        change.add_(new if old is None else new - old[0], alpha=weight)
        if old is not None and old[1] != weight:  # a client whose data have grown
            change.add_(old[0], alpha=weight - old[1])


class _Round:
    """The working memory of one round."""

    def __init__(self, federation: Federation, state: ServerState) -> None:
        self.federation, self.state = federation, state
        self.clients = federation.sample(state.round)
        self.weights = {client: federation.weight(client) for client in self.clients}
        self.sampled = len(self.clients)
        self.gradient_examples = 0
        self.gradients: dict[int, Tensor] = {}
        """g_i, where what a client keeps may depend on it."""
        algorithm = federation.algorithm_at(state.round).informed(state.numbers, federation.lr_at(state.round))
        zero = torch.zeros_like(state.point.x)
        sent = {part.label for part in algorithm.parts if part.extra_down or part.keeps}
        shared = {name: vector.to(zero.dtype) for name, vector in state.shared.items() if name in sent}
        self.told = Broadcast(
            point=state.point,
            round=state.round,
            algorithm=algorithm,
            lr=federation.lr_at(state.round),
            gradient_examples=algorithm.gradient_limit(federation.local.gradient_examples, state.numbers),
            participants=self.sampled,
            shared={part.label: zero for part in algorithm.keepers} | shared,
            weight_decay=federation.local.weight_decay,
            one_by_one=bool(algorithm.keepers) or algorithm.server.sees_each,
        )

    def participants(self) -> list[Participant]:
        total, everyone = sum(self.weights[client] for client in self.clients), self.state.kept.items()
        return [
            Participant(
                client=client,
                weight=self.weights[client],
                share=self.weights[client] / total,
                kept={label: own[client] for label, own in everyone if client in own} if everyone else NOTHING,
            )
            for client in self.clients
        ]

    def gradient_phase(self, engine: Engine) -> None:
        """Gather g_i and ḡ; clients that do not answer leave the round."""
        algorithm, sums = self.told.algorithm, Sums(self.state.point)
        told = replace(self.told, one_by_one=self.told.one_by_one or not algorithm.only_displaces)
        for reply in engine.gradients(told, self.participants()):
            self.require_finite("gradient", reply)
            sums.add(reply)
            if algorithm.keepers:
                self.gradients[reply.clients[0]] = reply.vector.to("cpu", copy=True)
        self.clients = [client for client in self.clients if client in sums.weights]
        self.require_enough(sums, "gradient phase", engine)
        self.weights |= sums.weights
        self.gradient_examples = sums.examples
        mean = (sums.vector / sums.weight).to(self.state.point.x.dtype)
        self.told = replace(self.told, mean=mean, participants=len(self.clients))

    def train(self, engine: Engine) -> Sums:
        """Let the clients train that do not fall silent, and add up what they report."""
        speaking = [one for one in self.participants() if not self.federation.silent(self.state.round, one.client)]
        known, sums = {one.client: one for one in speaking}, Sums(self.state.point, self.told.algorithm.server)
        for reply in engine.train(self.told, speaking):
            self.require_finite("loss", reply)
            with named_failure(f"the server's part of {self.told.algorithm.label}"):
                sums.add(reply)
                for part in self.told.algorithm.keepers:
                    one = known[reply.clients[0]]
                    view = self.told.view(part.label, one, self.gradients.get(one.client))
                    new = part.keep(view, reply.vector.cpu(), reply.total_step_sizes[0])  # k_i⁺
                    last = self.state.last_kept(part.label, one.client)
                    sums.add_kept(part.label, one.client, last, new, reply.weights[0])
        self.require_enough(sums, "training phase", engine)
        return sums

    def require_finite(self, what: str, reply: Reply) -> None:
        """Say which client of a reply diverged, when one did."""
        if math.isfinite(sum(reply.losses)) and all_finite(reply.vector):
            return
        first, *others = reply.clients
        lost = [client for client, loss in zip(reply.clients, reply.losses, strict=True) if not math.isfinite(loss)]
        if lost or not others:
            raise self.diverged(what, f"at client {lost[0] if lost else first}")
        raise self.diverged(what, f"at one of the clients {first} to {others[-1]}")

    def diverged(self, what: str, where: str) -> DivergedError:
        return DivergedError(
            f"the {what} became NaN or infinite in round {self.state.round + 1} {where} "
            f"(local.lr = {self.told.lr:g}); lower local.lr or algorithm.beta, or set local.clip_norm"
        )

    def require_enough(self, sums: Sums, phase: str, engine: Engine) -> None:
        """Refuse to go on when fewer clients answered than ``min_fraction`` asks for, or none."""
        # Simulated dropout may silence a whole round, after the gradient phase.
        least = 0 if self.federation.dropout and phase == "training phase" else 1
        needed = max(least, math.ceil(self.federation.min_fraction * self.sampled))
        if sums.reported >= needed:
            return
        reasons = "".join(f"; client {client}: {reason}" for client, reason in sorted(engine.failures.items())[:3])
        raise TooFewClientsError(
            f"only {sums.reported} of {self.sampled} clients answered the {phase} of round {self.state.round + 1}, "
            f"and {needed} are needed{reasons}"
        )

    def spent(self, sums: Sums) -> Totals:
        algorithm, x = self.told.algorithm, self.state.point.x
        phases, point, vector = 1 + algorithm.needs_gradients, self.state.point.nbytes, x.numel() * x.element_size()
        gradient = vector if algorithm.needs_gradients else 0
        down = sum(part.extra_down for part in algorithm.parts if part.label in self.told.shared)
        up = sum(part.extra_up for part in algorithm.parts)
        before, clients = self.state.totals, len(self.clients)
        # Down: x and the buffers, ḡ after the gradient phase, s of those that have one.
        # Up: Δ_i and the buffers, g_i in the gradient phase, the keepers' k_i⁺ − k_i.
        return Totals(
            communication_rounds=before.communication_rounds + phases,
            local_updates=before.local_updates + sums.steps,
            examples=before.examples + self.gradient_examples + sums.examples,
            bytes_down=before.bytes_down + clients * (point + gradient + down * vector),
            bytes_up=before.bytes_up + clients * gradient + sums.reported * (point + up * vector),
        )

    def close(self, sums: Sums) -> ServerState:
        """Take the server's step."""
        state, algorithm = self.state, self.told.algorithm
        ended = replace(state, round=state.round + 1, totals=self.spent(sums))
        if not sums.reported:
            return ended
        mean, shared, numbers = sums.vector / sums.weight, dict(state.shared), dict(state.numbers)
        # New dictionaries, so that the state before the round stays whole if anything after this goes wrong.
        kept = {label: {**state.kept.get(label, {}), **new} for label, new in sums.kept.items()}
        weights = {label: {**state.kept_weights.get(label, {}), **sums.weights} for label in kept}
        for part in algorithm.parts:
            change = sums.kept_change.get(part.label)
            known = [one.get(part.label, {}).values() for one in (state.kept_weights, weights)]
            seen = SharedSums(
                update=mean,
                kept_change=None if change is None else change / sums.weight,
                total_step_size=sums.total_step_size / sums.weight,
                step_size=sums.step_size / sums.weight if sums.steps else self.told.lr,
                lr=self.told.lr,
                reported=sums.reported,
                clients=len(self.federation.task.clients),
                x=state.point.x.double(),
                weight_decay=self.told.weight_decay,
                gradient_share=(self.told.gradient_examples or 1) / (self.federation.local.gradient_examples or 1),
                weight=sums.weight,
                known=(len(known[0]), len(known[1])),
                known_weight=(math.fsum(known[0]), math.fsum(known[1])),
                numbers=state.numbers.get(part.label, {}),
                facts=sums.facts(part.label),
            )
            new = part.next_shared(state.shared.get(part.label), seen)
            if new is not None:
                shared[part.label] = new
            numbers[part.label] = dict(part.next_numbers(seen))
        update = algorithm.corrected(sums.counted / sums.weight, shared, sums.reported)
        clients = [replace(one, weight=one.weight / sums.weight) for one in sums.reports]
        told = (clients,) if algorithm.server.sees_each else ()
        x, memory = algorithm.server.step(state.point.x.double(), update, state.memory, *told)
        x = x.to(state.point.x.dtype)
        if not all_finite(x):
            raise self.diverged("model", "on the server")
        floats = (sums.floats / sums.weight).to(state.point.floats.dtype)
        return replace(
            ended,
            point=Point(x, floats, sums.ints),
            memory=memory,
            shared=shared,
            numbers=numbers,
            kept=kept,
            kept_weights=weights,
        )


def play_round(federation: Federation, engine: Engine, state: ServerState) -> tuple[ServerState, RoundFacts]:
    """Play one round and return the state after it; the state before is left as it is."""
    # The server's own sums gain little from threads, and would take the cores away from the workers.
    with one_thread():
        with named_failure(f"the server's part of {federation.algorithm.label}"):  # it may be anybody's own code
            play = _Round(federation, state)
        if play.told.algorithm.needs_gradients:
            play.gradient_phase(engine)
        sums = play.train(engine)
        silent = sum(federation.silent(state.round, client) for client in play.clients)
        facts = RoundFacts(
            lr=play.told.lr,
            beta=play.told.algorithm.beta,
            local_loss=sums.loss / sums.weight if sums.reported else None,
            sampled=play.sampled,
            reported=sums.reported,
            failed=play.sampled - silent - sums.reported,
        )
        with named_failure(f"the server's part of {federation.algorithm.label}"):
            return play.close(sums), facts
