"""What server and clients say to each other in a round, in the server's words and the clients'.

The server tells every client of a phase the same ``Broadcast``, and of each ``Participant`` what it knows. A client
makes its own plan from the two, and answers with a ``Gradient`` or an ``Update``. Neighbouring clients that work in one
process may answer together, with the weighted sum of their vectors; a lone client is a group of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradalign.algorithms.plan import Combination
from gradalign.algorithms.view import ClientView, Plan
from gradalign.client.flat import Point

NOTHING: Mapping[str, Tensor] = {}  # one for all: a dict for each client is work for Python's collector


@dataclass(frozen=True, kw_only=True)
class Participant:
    """What the server knows of one client of a phase."""

    client: int
    weight: float = 1.0
    """w_i, as summed; NaN for one elsewhere that has yet to tell it, with its reply."""
    share: float = 1.0
    """p_i = w_i / Σ w."""
    kept: Mapping[str, Tensor] = field(default_factory=lambda: NOTHING)
    """k_i of every keeping part by its label; none for a client never seen."""


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """What the server tells all clients of a phase."""

    point: Point
    round: int
    algorithm: Combination
    """With its schedules resolved for this round."""
    lr: float = 0.0
    gradient_examples: int | None = None
    """How many of its examples a client takes its gradient at x of; None: all."""
    participants: int = 0
    """|S|; 0 when the server only measures."""
    mean: Tensor | None = None
    """ḡ, after a gradient phase."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """s of every part that has one, by its label."""
    weight_decay: float = 0.0
    one_by_one: bool = False
    """Whether the server needs every client's own vector; else neighbours may be summed."""

    def view(
        self, label: str, who: Participant, gradient: Tensor | None = None, sample: tuple[int, int] | None = None
    ) -> ClientView:
        """Return what the part with this label sees of a client."""
        return ClientView(
            x=self.point.x,
            lr=self.lr,
            weight=who.share,
            participants=self.participants,
            gradient=gradient,
            mean_gradient=self.mean,
            kept=who.kept.get(label),
            shared=self.shared.get(label),
            weight_decay=self.weight_decay,
            sample=sample,
        )

    def sample(self, examples: int) -> tuple[int, int]:
        """Return how many examples a client with so many takes its gradient of, and how many it has."""
        return min(examples, self.gradient_examples or examples), examples

    def plan(self, who: Participant, gradient: Tensor | None = None) -> Plan:
        """Return a client's plan, given its gradient at x where that is written out. Nobody else makes plans."""
        return self.algorithm.plan({part.label: self.view(part.label, who, gradient) for part in self.algorithm.parts})

    def facts(
        self, who: Participant, gradient: Tensor | None = None, sample: tuple[int, int] | None = None
    ) -> dict[str, float]:
        """Return what a client reports beside its update, by the part's label and the fact's name."""
        return {
            f"{part.label}.{name}": float(value)
            for part in self.algorithm.parts
            if part.reports
            for name, value in part.facts(self.view(part.label, who, gradient, sample)).items()
        }


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one client answers, or several neighbours together: Σ w_i of their vectors is factor · vector.

    Tensors are valid until the next reply is asked for.
    """

    clients: tuple[int, ...]
    weights: tuple[float, ...]
    vector: Tensor
    factor: float
    """w_i when the vector is a lone client's own, 1 when it is a sum."""
    losses: tuple[float, ...]
    """In a sum, NaN for a client whose vector is not finite."""
    examples: int
    """Seen by all of them together."""
    facts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Further numbers of every client, by name."""


@dataclass(frozen=True, kw_only=True)
class Gradient(Reply):
    """The vector is ∇f_i(x)."""

    accuracies: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Update(Reply):
    """The vector is Δ_i = y_K − y_0; with it come the buffers after training."""

    floats: Tensor
    """The clients' float buffers, summed as the vector is."""
    ints: Tensor
    """The first client's."""
    steps: tuple[int, ...]
    total_step_sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sums over evaluated examples, so that parts can be added."""

    loss: float = 0.0
    correct: float | None = 0.0
    examples: int = 0
    predictions: tuple[tuple[Tensor, Tensor], ...] = ()
    """(outputs, targets) of each part, in order, where the task has metrics that need them all at once."""

    def __add__(self, other: Score) -> Score:
        known = self.correct is not None and other.correct is not None
        return Score(
            loss=self.loss + other.loss,
            correct=(self.correct or 0.0) + (other.correct or 0.0) if known else None,
            examples=self.examples + other.examples,
            predictions=self.predictions + other.predictions,
        )

    @property
    def mean_loss(self) -> float:
        return self.loss / self.examples

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / self.examples


@dataclass(frozen=True, kw_only=True)
class ClientScore:
    """How a model does on one client's own test examples."""

    client: int
    examples: int
    loss: float
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The task's own metrics by name, without those that are not defined on these examples."""


@dataclass(frozen=True)
class CachedGradient:
    """A client's gradient as it was left by whoever took it."""

    vector: Tensor
    """g_i itself, or the factors of it that ``fast.lockstep`` lays one after the other."""
    rows: int | None = None
    """How many rows the factors have; None when the vector is g_i."""
    reply: Gradient | None = None
    """The answer, when the client was alone: only then may it stand in for another phase at the same point."""


class GradientCache:
    """The clients' gradients at one point, where the clients' work is done; forgotten when the point moves.

    It is never saved: what it held can be taken again, to the same bits.
    """

    def __init__(self) -> None:
        self.entries: dict[int, CachedGradient] = {}
        self._x: Tensor | None = None
        self._phase: tuple[object, ...] = ()

    def begin(self, told: Broadcast, *, alone: bool) -> None:
        """Begin a phase: forget all unless it is of the same gradients.

        ``alone``: whether clients go one by one in all phases of this algorithm. Only then may measured gradients be a
        round's: where clients go together, the bits of one depend on who is beside it, and a resumed run would differ.
        """
        phase = (told.round, told.gradient_examples, alone or told.participants > 0)
        if told.point.x is not self._x or phase != self._phase:
            self.entries.clear()
        self._x, self._phase = told.point.x, phase

    def put(self, client: int, *parts: Tensor, rows: int | None = None, reply: Gradient | None = None) -> None:
        """Remember a client's gradient: one vector, or the parts of its factors with so many rows."""
        vector = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        self.entries[client] = CachedGradient(vector, rows, reply)

    def put_all(self, clients: Sequence[int], vectors: Tensor) -> None:
        """Remember the gradients of several clients, a row for each."""
        for client, vector in zip(clients, vectors, strict=True):
            self.put(client, vector)

    def get(self, client: int) -> CachedGradient | None:
        return self.entries.get(client)

    def known(self, who: Participant) -> Gradient | None:
        """Return the answer of a client whose gradient was taken alone at this point, with its weight of now."""
        entry = self.entries.get(who.client)
        if entry is None or entry.reply is None:
            return None
        return replace(entry.reply, weights=(who.weight,), factor=who.weight)
