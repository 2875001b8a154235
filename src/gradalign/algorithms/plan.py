"""The plan: what a client does with the server's point x in one round, and how algorithms that make plans combine.

For client i in a round that starts at x, with g_i = ∇f_i(x) and ḡ = Σ p_i g_i over the clients taking part:

    start     y_0 = x + v_i                                      v_i: the displacement
    step      y ← y − α ( ∇f_i(y; ζ) + wd·y + c_i + μ (y − x) )  c_i: the correction, μ: the pull to x
    report    Δ_i = y_K − y_0
    server    x ← rule(x, m·Σ p_i Δ_i + o)                       m: the multiple, o: the offset; mostly 1 and 0

An algorithm fills in (v_i, c_i, μ), and m and o where it corrects the server's average. It is arithmetic on flat
vectors and knows nothing of models, data or processes. Algorithms combine by ``+``:
``FedGA(beta=0.1) + FedProx(mu=0.01) + FedAdam(lr=0.03)`` displaces like the first, pulls like the second and lets the
server step like the third. The order makes no difference: v, c, μ and o are summed and m multiplied, always in the
order of the parts' names, and all multiples come before all offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from torch import Tensor

from gradalign.algorithms.rules import ServerRule
from gradalign.algorithms.schedule import Schedule, spanning
from gradalign.errors import GradalignError


@dataclass(frozen=True, kw_only=True)
class ClientView:
    """What an algorithm may look at when it plans for one client."""

    x: Tensor
    lr: float
    weight: float
    """p_i, this client's share of the average."""
    participants: int
    """|S|, the number of clients planned for in this round."""
    gradient: Tensor | None = None
    """g_i, when the round has a gradient phase."""
    mean_gradient: Tensor | None = None
    """ḡ, when the round has a gradient phase."""
    kept: Tensor | None = None
    """k_i, when the algorithm keeps a vector per client."""
    shared: Tensor | None = None
    """s, the server's running mean of the kept vectors."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return (g_i, ḡ), or say that the round's gradient phase was skipped."""
        if self.gradient is None or self.mean_gradient is None:
            raise GradalignError("this algorithm needs the clients' gradients at x, and none were given")
        return self.gradient, self.mean_gradient

    def memory(self) -> tuple[Tensor, Tensor]:
        """Return (k_i, s), or say that they are missing."""
        if self.kept is None or self.shared is None:
            raise GradalignError("this algorithm needs the client's kept vector and the server's, and none were given")
        return self.kept, self.shared


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client does in one round: (v, c, μ). ``None`` stands for the zero vector."""

    displacement: Tensor | None = None
    correction: Tensor | None = None
    pull: float = 0.0
    every_step: bool = False
    """Apply the displacement inside every step and undo it there, instead of once at the start."""

    def __add__(self, other: Plan) -> Plan:
        return Plan(
            displacement=_plus(self.displacement, other.displacement),
            correction=_plus(self.correction, other.correction),
            pull=self.pull + other.pull,
            every_step=self.every_step or other.every_step,
        )


@dataclass(frozen=True)
class Shift:
    """Displacements of the form v_i = common + along·g_i: beside its own gradient a client needs only what all need."""

    common: Tensor | None = None
    along: float = 0.0

    def __add__(self, other: Shift) -> Shift:
        return Shift(_plus(self.common, other.common), self.along + other.along)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The base of all: it plans nothing, which is FedAvg."""

    one_step: ClassVar[bool] = False
    """Whether the algorithm is only defined for K = 1."""

    @property
    def keeps(self) -> bool:
        """Whether the algorithm remembers a vector per client."""
        return False

    @property
    def extra_vectors(self) -> int:
        """Parameter-sized vectors sent each way beside x and Δ, the gradient phase not counted."""
        return 0

    @property
    def label(self) -> str:
        """The algorithm's name in recipes and tables."""
        return type(self).__name__.lower()

    @property
    def needs_gradients(self) -> bool:
        """Whether a round begins with the clients sending g_i and receiving ḡ: one more communication."""
        return False

    def at(self, round_index: int) -> Self:
        """Return the algorithm with its schedules resolved for this round."""
        return self

    @property
    def strength(self) -> float:
        """The displacement's β in force, 0 for algorithms without one; resolve schedules with ``at`` first."""
        return 0.0

    def plan(self, view: ClientView) -> Plan:
        """Return this client's plan."""
        return Plan()

    def shift(self, mean_gradient: Tensor) -> Shift | None:
        """Return the plan as a shift, given ḡ; None when it is anything else."""
        return Shift() if type(self).plan is Algorithm.plan else None

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        """Return k_i⁺ from Δ_i and ``total_step_size``, the sum of the round's step sizes: αK without momentum."""
        raise NotImplementedError(f"{self.label} keeps nothing")

    def multiple(self, participants: int) -> float:
        """Return m: how many times the mean update the server takes, given how many clients reported."""
        return 1.0

    def offset(self, shared: Tensor) -> Tensor | None:
        """Return o, given the new s: what the server adds to the multiple of the mean update; None is nothing."""
        return None

    def over(self, rounds: int) -> Self:
        """Return the algorithm with schedules that are given in shares of the run spread over its rounds."""
        schedules = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Schedule)}
        return replace(self, **{name: spanning(schedule, rounds) for name, schedule in schedules.items()})

    def __add__(self, other: Algorithm | ServerRule | Combination) -> Combination:
        return combine(self, other)

    def __radd__(self, other: ServerRule) -> Combination:
        return combine(other, self)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """McMahan et al. 2017: v = 0, c = 0, μ = 0. The clients' updates are averaged and that is all."""


@dataclass(frozen=True)
class Combination:
    """Several algorithms and one server rule, acting together in the same round."""

    parts: tuple[Algorithm, ...]
    server: ServerRule

    @property
    def label(self) -> str:
        """The parts' names joined by ``+``; the server's rule is named when it is not the plain average."""
        names = [part.label for part in self.parts if part.label != "fedavg"]
        if type(self.server) is not ServerRule:
            names.append(self.server.label)
        return "+".join(names) or "fedavg"

    @property
    def needs_gradients(self) -> bool:
        """Whether any part needs the gradient phase."""
        return any(part.needs_gradients for part in self.parts)

    @property
    def one_step(self) -> bool:
        """Whether any part is only defined for K = 1."""
        return any(part.one_step for part in self.parts)

    @property
    def keepers(self) -> tuple[Algorithm, ...]:
        """The parts that keep a vector per client."""
        return tuple(part for part in self.parts if part.keeps)

    @property
    def _by_name(self) -> list[Algorithm]:
        """The parts in an order that does not depend on how they were joined: sums have the same bits."""
        return sorted(self.parts, key=lambda part: part.label)

    @property
    def beta(self) -> float:
        """The displacement's β in force (0 when no part displaces by one); resolve schedules with ``at`` first."""
        return sum(part.strength for part in self._by_name)

    def over(self, rounds: int) -> Combination:
        """Return the combination with schedules in shares of the run spread over its rounds."""
        return Combination(tuple(part.over(rounds) for part in self.parts), self.server)

    def at(self, round_index: int) -> Combination:
        """Return the combination with all schedules resolved for this round."""
        return Combination(tuple(part.at(round_index) for part in self.parts), self.server)

    def corrected(self, mean: Tensor, shared: Mapping[str, Tensor], participants: int) -> Tensor:
        """Return the update to hand to the server's rule, given Σ p_i Δ_i and the keepers' new s by label."""
        update = math.prod(part.multiple(participants) for part in self._by_name) * mean
        offsets = [part.offset(shared[part.label]) for part in self._by_name if part.label in shared]
        return sum((offset for offset in offsets if offset is not None), start=update)

    def plan(self, views: dict[str, ClientView]) -> Plan:
        """Return the sum of the parts' plans; ``views`` has each part's own view under its label."""
        return sum((part.plan(views[part.label]) for part in self._by_name), Plan())

    def shift(self, mean_gradient: Tensor) -> Shift | None:
        """Return the sum of the parts' shifts; None when a part plans anything else."""
        shifts = [part.shift(mean_gradient) for part in self._by_name]
        known = [shift for shift in shifts if shift is not None]
        return sum(known, Shift()) if len(known) == len(shifts) else None

    def __add__(self, other: Algorithm | ServerRule | Combination) -> Combination:
        return combine(self, other)

    def __radd__(self, other: ServerRule) -> Combination:
        return combine(other, self)


def _flatten(things: tuple[Algorithm | ServerRule | Combination, ...]) -> Iterator[Algorithm | ServerRule]:
    for thing in things:
        if isinstance(thing, Combination):
            yield from thing.parts
            yield thing.server
        elif isinstance(thing, Algorithm | ServerRule):
            yield thing
        else:
            raise GradalignError(f"cannot combine {thing!r}: give algorithms such as FedGA(beta=0.1) and server rules")


def combine(*things: Algorithm | ServerRule | Combination) -> Combination:
    """Join algorithms and at most one server rule that is not the plain average; FedAvg adds nothing to others."""
    parts: dict[str, Algorithm] = {}
    servers: list[ServerRule] = []
    for thing in _flatten(things):
        if isinstance(thing, ServerRule):
            servers += [thing] if thing != ServerRule() else []
        elif type(thing) is FedAvg:
            continue
        elif thing.label in parts:
            raise GradalignError(f"{thing.label} was given twice in one combination")
        else:
            parts[thing.label] = thing
    if len(servers) > 1:
        raise GradalignError("a combination has one server rule, got " + " and ".join(s.label for s in servers))
    return Combination(tuple(parts.values()) or (FedAvg(),), servers[0] if servers else ServerRule())
