"""Every algorithm as a plan: what a client does with the server's point x in one round.

For client i in a round that starts at x, with g_i = ∇f_i(x) and ḡ = Σ p_i g_i over the clients taking part:

    start     y_0 = x + v_i                                      v_i: the displacement
    step      y ← y − α ( ∇f_i(y; ζ) + wd·y + c_i + μ (y − x) )  c_i: the correction, μ: the pull to x
    report    Δ_i = y_K − y_0
    server    x ← rule(x, Σ p_i Δ_i)

An algorithm fills in (v_i, c_i, μ). It is arithmetic on flat vectors and knows nothing of models, data or
processes. Algorithms combine by ``+``: ``FedGA(beta=0.1) + FedProx(mu=0.01) + FedAdam(lr=0.03)`` displaces like
the first, pulls like the second and lets the server step like the third.

Two of them remember a vector per client (``keeps``): SCAFFOLD's option II and FedDyn. Both obey one law, so the
server needs to know only that law: with the clients' vectors k_i (zero before a client is first seen) and the
server's s, after a round  s ← s + (|S|/N) Σ p_i (k_i⁺ − k_i).  With uniform weights s is always the mean of k_i over
all N clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.schedule import Schedule, require, value_at
from gradalign.server import ServerRule


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

    def plan(self, view: ClientView) -> Plan:
        """Return this client's plan."""
        return Plan()

    def keep(self, view: ClientView, update: Tensor, travel: float) -> Tensor:
        """Return k_i⁺ from Δ_i and the ``travel`` of the round: the sum of all step sizes, αK without momentum."""
        raise NotImplementedError(f"{self.label} keeps nothing")

    def steer(self, update: Tensor, shared: Tensor | None, participants: int) -> Tensor:
        """Return the update to hand to the server's rule, given Σ p_i Δ_i and the new s."""
        return update

    def __add__(self, other: Algorithm | ServerRule | Combination) -> Combination:
        return combine(self, other)

    def __radd__(self, other: ServerRule) -> Combination:
        return combine(other, self)


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """McMahan et al. 2017: v = 0, c = 0, μ = 0. The clients' updates are averaged and that is all."""


@dataclass(frozen=True, kw_only=True)
class LargeBatchSGD(Algorithm):
    """One step a round on the mean gradient: FedAvg with K = 1 and one mini-batch per client."""

    one_step: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    """Li et al. 2020: every step is pulled to x by μ(y − x), the gradient of (μ/2)‖y − x‖²; μ = 0 is FedAvg."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        require("algorithm.mu", self.mu, least=0.0)

    def plan(self, view: ClientView) -> Plan:
        """Return (0, 0, μ)."""
        return Plan(pull=self.mu)


@dataclass(frozen=True, kw_only=True)
class FedGA(Algorithm):
    """Federated Gradient Alignment (Dandi, Barba & Jaggi 2022, Algorithm 2): v_i = −β(ḡ − g_i).

    Each client starts from x displaced towards its own gradient, which adds −αβK∇r(x) to a round of FedAvg, r being
    half the variance of the clients' gradients. ``form="step"`` is the appendix's Algorithm 3: the same
    displacement inside every step. The two are equal. Unlike SCAFFOLD, β is free and all K steps feel it alike.
    """

    beta: float | Schedule
    form: str = "start"

    def __post_init__(self) -> None:
        require("algorithm.beta", self.beta, least=0.0)
        if self.form not in ("start", "step"):
            raise GradalignError(f'algorithm.form must be "start" or "step", got "{self.form}"')

    @property
    def needs_gradients(self) -> bool:
        """True unless β is zero in every round, or in the round asked for by ``at``."""
        return not isinstance(self.beta, int | float) or self.beta != 0.0

    def at(self, round_index: int) -> Self:
        """Return FedGA with this round's β."""
        return replace(self, beta=value_at(self.beta, round_index))

    def plan(self, view: ClientView) -> Plan:
        """Return (−β(ḡ − g_i), 0, 0)."""
        if not self.needs_gradients:
            return Plan()
        own, mean = view.gradients()
        return Plan(displacement=-value_at(self.beta, 0) * (mean - own), every_step=self.form == "step")


@dataclass(frozen=True, kw_only=True)
class GradAlign(FedGA):
    """GradAlign (Dandi, Barba & Jaggi 2022, Algorithm 1): FedGA with K = 1, one mini-batch per client."""

    one_step: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Algorithm):
    """One step that stands for n SGD steps on n mini-batches (Dandi, Barba & Jaggi 2022, appendix on linear scaling).

    x ← x − α Σ_i ∇f_i( x − (α/2) Σ_{j≠i} ∇f_j(x) ): the displacement is the one SGD's earlier steps would have
    made on average. ``aligned=False`` leaves it out: the linear scaling rule of Goyal et al. 2018.
    The clients' updates are summed, not averaged; with weights p_i, f_i counts n·p_i times.
    """

    one_step: ClassVar[bool] = True
    aligned: bool = True

    @property
    def needs_gradients(self) -> bool:
        """True when aligned."""
        return self.aligned

    def plan(self, view: ClientView) -> Plan:
        """Return (−(α/2) n (ḡ − p_i g_i), 0, 0)."""
        if not self.aligned:
            return Plan()
        own, mean = view.gradients()
        return Plan(displacement=-0.5 * view.lr * view.participants * (mean - view.weight * own))

    def steer(self, update: Tensor, shared: Tensor | None, participants: int) -> Tensor:
        """Turn the mean of the updates into their sum."""
        return participants * update


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    """SCAFFOLD (Karimireddy et al. 2020): every step is corrected by the difference to the mean gradient.

    ``control="fresh"`` is the form of Dandi, Barba & Jaggi 2022, without memory: c_i = ḡ − g_i at this round's x.
    ``control="kept"`` is option II: c_i = s − k_i, then k_i⁺ = k_i − s − Δ_i/(αK); one communication instead of two,
    at the price of old gradients. Near FedGA with β = α(K−1)/2, but its effect grows over the K steps.
    """

    control: str = "fresh"

    def __post_init__(self) -> None:
        if self.control not in ("fresh", "kept"):
            raise GradalignError(f'algorithm.control must be "fresh" or "kept", got "{self.control}"')

    @property
    def keeps(self) -> bool:
        """True for option II."""
        return self.control == "kept"

    @property
    def extra_vectors(self) -> int:
        """Option II sends s down and k_i⁺ − k_i up."""
        return 1 if self.keeps else 0

    @property
    def needs_gradients(self) -> bool:
        """True for the fresh form."""
        return not self.keeps

    def plan(self, view: ClientView) -> Plan:
        """Return (0, ḡ − g_i, 0) or (0, s − k_i, 0)."""
        own, mean = view.memory() if self.keeps else view.gradients()
        return Plan(correction=mean - own)

    def keep(self, view: ClientView, update: Tensor, travel: float) -> Tensor:
        """Return k_i − s − Δ_i/(αK)."""
        own, shared = view.memory()
        return own - shared - update / travel


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    """FedDyn (Acar et al. 2021): c_i = −h_i, μ = alpha, then h_i⁺ = h_i − alpha·Δ_i.

    The server takes x ← x + Σ p_i Δ_i − h/alpha, h being the mean of all h_i.
    h_i estimates ∇f_i at the client's last model, so that a client's optimum moves towards the common one. Like
    FedProx it pulls to x, like SCAFFOLD's option II it remembers; unlike both it corrects the server's average too.
    """

    alpha: float = 0.01

    def __post_init__(self) -> None:
        require("algorithm.alpha", self.alpha, above=0.0)

    @property
    def keeps(self) -> bool:
        """True: h_i."""
        return True

    def plan(self, view: ClientView) -> Plan:
        """Return (0, −h_i, alpha)."""
        own, _ = view.memory()
        return Plan(correction=-own, pull=self.alpha)

    def keep(self, view: ClientView, update: Tensor, travel: float) -> Tensor:
        """Return h_i − alpha·Δ_i."""
        own, _ = view.memory()
        return own - self.alpha * update

    def steer(self, update: Tensor, shared: Tensor | None, participants: int) -> Tensor:
        """Return Σ p_i Δ_i − h/alpha with this round's h."""
        return update if shared is None else update - shared / self.alpha


@dataclass(frozen=True)
class Combination:
    """Several algorithms and one server rule, acting together in the same round."""

    parts: tuple[Algorithm, ...]
    server: ServerRule

    @property
    def label(self) -> str:
        """The parts' names joined by ``+``; the server's rule is named when it is not the plain average."""
        names = [part.label for part in self.parts if type(part) is not FedAvg]
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
    def beta(self) -> float:
        """The displacement's β in force (0 when no part displaces by one); resolve schedules with ``at`` first."""
        return sum(value_at(part.beta, 0) for part in self.parts if isinstance(part, FedGA))

    def at(self, round_index: int) -> Combination:
        """Return the combination with all schedules resolved for this round."""
        return Combination(tuple(part.at(round_index) for part in self.parts), self.server)

    def plan(self, views: dict[str, ClientView]) -> Plan:
        """Return the sum of the parts' plans; ``views`` has each part's own view under its label."""
        return sum((part.plan(views[part.label]) for part in self.parts), Plan())

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
    """Join algorithms and at most one server rule that is not the plain average."""
    parts: dict[str, Algorithm] = {}
    servers: list[ServerRule] = []
    for thing in _flatten(things):
        if isinstance(thing, ServerRule):
            servers += [thing] if thing != ServerRule() else []
        elif thing.label in parts and type(thing) is not FedAvg:
            raise GradalignError(f"{thing.label} was given twice in one combination")
        else:
            parts[thing.label] = thing
    if len(servers) > 1:
        raise GradalignError("a combination has one server rule, got " + " and ".join(s.label for s in servers))
    return Combination(tuple(parts.values()) or (FedAvg(),), servers[0] if servers else ServerRule())
