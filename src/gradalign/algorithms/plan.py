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
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from gradalign.algorithms.rules import ServerRule
from gradalign.algorithms.schedule import Schedule
from gradalign.algorithms.view import ClientView, Plan, SharedSums
from gradalign.errors import GradalignError

_KNOWN: dict[str, type[Algorithm]] = {}  # by label; ``gradalign.algorithms.known_algorithms`` returns it


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The base of all: it plans nothing, which is FedAvg. A subclass is known by its ``label`` once it is defined."""

    label: ClassVar[str] = "algorithm"
    """The algorithm's name in recipes and tables: unless given, the class's in small letters."""
    one_step: ClassVar[bool] = False
    """Whether the algorithm is only defined for K = 1."""
    pushes_all: ClassVar[bool] = False
    """Whether all clients' steps have one vector added that does not sum to zero, as a momentum."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "label" not in vars(cls):
            cls.label = cls.__name__.lower()
        # Nobody's own class takes the name of one of ours; a cell that is run again replaces what it made before.
        if cls.label not in _KNOWN or _KNOWN[cls.label].__module__ == cls.__module__:
            _KNOWN[cls.label] = cls

    @property
    def keeps(self) -> bool:
        """Whether the algorithm remembers a vector per client."""
        return False

    @property
    def extra_down(self) -> int:
        """Parameter-sized vectors that a client is sent beside x, the gradient phase not counted."""
        return 0

    @property
    def extra_up(self) -> int:
        """Parameter-sized vectors that a client sends beside Δ, the gradient phase not counted."""
        return 0

    @property
    def needs_gradients(self) -> bool:
        """Whether a round begins with the clients sending g_i and receiving ḡ: one more communication."""
        return False

    @property
    def uses_own_gradient(self) -> bool:
        """Whether the plan uses g_i: a client whose gradient at x is not known takes it before its steps."""
        return self.needs_gradients

    @property
    def infers_gradients(self) -> bool:
        """Whether it takes −Δ_i/(αK) for a mean gradient, which it is where clients step by plain SGD alone."""
        return False

    @property
    def only_displaces(self) -> bool:
        """Whether the plan is nothing but a ``Blend``, or empty: then clients may be summed where they train."""
        return type(self).plan is Algorithm.plan

    @property
    def plans_alike(self) -> bool:
        """Whether the plan, a ``Blend`` not written out, is the same for all clients of a round."""
        return type(self).plan is Algorithm.plan

    @property
    def strength(self) -> float:
        """The displacement's β in force, 0 for algorithms without one; resolve schedules with ``at`` first."""
        return 0.0

    def at(self, round_index: int) -> Self:
        """Return the algorithm with its schedules resolved for this round."""
        return self

    def informed(self, numbers: Mapping[str, float], lr: float) -> Self:
        """Return the algorithm for a round with this α, given what ``next_numbers`` left; {} in the first round."""
        return self

    def gradient_limit(self, limit: int | None, numbers: Mapping[str, float]) -> int | None:
        """Return how many examples clients take their gradients of in this round, given the setting; None is all."""
        return limit

    def require_given(self) -> None:
        """Refuse settings that are not for a user to give."""

    def over(self, rounds: int) -> Self:
        """Return the algorithm with schedules that are given in shares of the run spread over its rounds."""
        schedules = {name: value for name, value in self.values().items() if isinstance(value, Schedule)}
        return replace(self, **{name: schedule.over(rounds) for name, schedule in schedules.items()})

    def values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def plan(self, view: ClientView) -> Plan:
        """Return this client's plan."""
        return Plan()

    @property
    def reports(self) -> bool:
        """Whether clients report ``facts`` beside Δ_i."""
        return False

    def facts(self, view: ClientView) -> Mapping[str, float]:
        """Return what a client reports beside Δ_i; the server gets the weighted means, as ``SharedSums.facts``."""
        return {}

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        """Return k_i⁺ from Δ_i and ``total_step_size``, the sum of the round's step sizes: αK without momentum."""
        raise NotImplementedError(f"{self.label} keeps nothing")

    def next_shared(self, shared: Tensor | None, sums: SharedSums) -> Tensor | None:
        """Return s after the round, None for none: the mean of all k_i, s + (1/N) Σ (k_i⁺ − k_i) with equal weights."""
        return sums.mean_kept(shared, everyone=True)

    def next_numbers(self, sums: SharedSums) -> Mapping[str, float]:
        """Return the numbers to carry to the next round beside s; ``sums.numbers`` has those of the round before."""
        return {}

    def multiple(self, participants: int) -> float:
        """Return m: how many times the mean update the server takes, given how many clients reported."""
        return 1.0

    def offset(self, shared: Tensor) -> Tensor | None:
        """Return o, given the new s: what the server adds to the multiple of the mean update; None is nothing."""
        return None

    def __add__(self, other: Algorithm | ServerRule | Combination) -> Combination:
        return combine(self, other)

    def __radd__(self, other: ServerRule) -> Combination:
        return combine(other, self)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """McMahan et al. 2017: v = 0, c = 0, μ = 0. The clients' updates are averaged and that is all."""


@dataclass(frozen=True, repr=False)
class Combination:
    """Several algorithms and one server rule, acting together in the same round."""

    parts: tuple[Algorithm, ...]
    server: ServerRule

    def __repr__(self) -> str:
        """Return the sum that makes it."""
        return " + ".join(map(repr, (*self.parts, *([] if self.server == ServerRule() else [self.server]))))

    @classmethod
    def from_values(cls, values: Mapping[str, Mapping[str, Any]], known: Mapping[str, type[Algorithm]]) -> Combination:
        """Return the algorithms that ``values()`` describes, made from known classes; the server's rule is left out."""
        return cls(tuple(known[label](**given) for label, given in values.items()), ServerRule())

    def values(self) -> dict[str, dict[str, Any]]:
        """Return every part's settings under its label: all of a round's algorithm where its classes are known."""
        return {part.label: part.values() for part in self.parts}

    def with_values(self, values: Mapping[str, Mapping[str, Any]]) -> Combination:
        """Return the combination with the settings of another one of the same parts."""
        known, parts = {part.label: part for part in self.parts}, list[Algorithm]()
        for label, given in values.items():
            new = {name: value for name, value in given.items() if getattr(known[label], name) != value}
            parts.append(replace(known[label], **new) if new else known[label])
        return replace(self, parts=tuple(parts))

    @property
    def label(self) -> str:
        """The parts' names joined by ``+``; the server's rule is named when it is not the plain average."""
        names = [part.label for part in self.parts if part.label != "fedavg"]
        names += [self.server.label] if type(self.server) is not ServerRule else []
        return "+".join(names) or "fedavg"

    @property
    def needs_gradients(self) -> bool:
        return any(part.needs_gradients for part in self.parts)

    @property
    def uses_own_gradient(self) -> bool:
        return any(part.uses_own_gradient for part in self.parts)

    @property
    def reports(self) -> bool:
        return any(part.reports for part in self.parts)

    @property
    def only_displaces(self) -> bool:
        return all(part.only_displaces for part in self.parts)

    @property
    def plans_alike(self) -> bool:
        return all(part.plans_alike for part in self.parts)

    @property
    def one_step(self) -> bool:
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
        return replace(self, parts=tuple(part.over(rounds) for part in self.parts))

    def at(self, round_index: int) -> Combination:
        return replace(self, parts=tuple(part.at(round_index) for part in self.parts))

    def informed(self, numbers: Mapping[str, Mapping[str, float]], lr: float) -> Combination:
        return replace(self, parts=tuple(part.informed(numbers.get(part.label, {}), lr) for part in self.parts))

    def gradient_limit(self, limit: int | None, numbers: Mapping[str, Mapping[str, float]]) -> int | None:
        users = [part for part in self.parts if part.uses_own_gradient]
        # Of several nobody has a say: what one wants to measure is not the others' to pay.
        return users[0].gradient_limit(limit, numbers.get(users[0].label, {})) if len(users) == 1 else limit

    def plan(self, views: Mapping[str, ClientView]) -> Plan:
        """Return the sum of the parts' plans; ``views`` has each part's own view under its label."""
        plans = {part.label: part.plan(views[part.label]) for part in self._by_name}
        if not self.only_displaces:  # a blend meets vectors of other parts
            plans = {label: plan.written_out(views[label].gradient) for label, plan in plans.items()}
        return sum(plans.values(), Plan())

    def corrected(self, mean: Tensor, shared: Mapping[str, Tensor], participants: int) -> Tensor:
        """Return the update to hand to the server's rule, given Σ p_i Δ_i and the new s by label."""
        update = math.prod(part.multiple(participants) for part in self._by_name) * mean
        offsets = [part.offset(shared[part.label]) for part in self._by_name if part.label in shared]
        return sum((offset for offset in offsets if offset is not None), start=update)

    def __add__(self, other: Algorithm | ServerRule | Combination) -> Combination:
        return combine(self, other)

    def __radd__(self, other: ServerRule) -> Combination:
        return combine(other, self)


def combine(*things: Algorithm | ServerRule | Combination) -> Combination:
    """Join algorithms and at most one server rule that is not the plain average; FedAvg adds nothing to others."""
    parts: dict[str, Algorithm] = {}
    servers: list[ServerRule] = []
    for thing in things:
        for each in (*thing.parts, thing.server) if isinstance(thing, Combination) else (thing,):
            if isinstance(each, ServerRule):
                servers += [each] if each != ServerRule() else []
            elif not isinstance(each, Algorithm):
                hint = "give algorithms such as FedGA(beta=0.1) and server rules"
                raise GradalignError(f"cannot combine {each!r}: {hint}")
            elif each.label in parts:
                raise GradalignError(f"{each.label} was given twice in one combination")
            elif type(each) is not FedAvg:
                each.require_given()
                parts[each.label] = each
    pushing = next((part.label for part in parts.values() if part.pushes_all), None)
    fooled = next((one.label for one in parts.values() if one.infers_gradients and not one.pushes_all), None)
    if pushing and fooled:
        raise GradalignError(f"{fooled} would take {pushing}'s momentum for a gradient; do not combine the two")
    if len(servers) > 1:
        raise GradalignError("a combination has one server rule, got " + " and ".join(s.label for s in servers))
    return Combination(tuple(parts.values()) or (FedAvg(),), servers[0] if servers else ServerRule())
