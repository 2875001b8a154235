"""FedGA in its three forms, and its neighbours: all displace a client's start by v_i = a·g_i − b·s, or nearly.

    FedGA, fresh     a = b = β, s = ḡ of this round (two communications)
    FedGA, running   a = b = β, s = a running mean of earlier rounds' gradients
    FedGA, kept      as running, with the client's last k_i in place of g_i
    FedInit          the client's last end point in place of a gradient
    FedSAM           a = ρ/‖g_i‖, b = 0
    FedLESAM         a = 0, −b·s a step of length ρ back along the server's last move
    FedCM            no displacement: s is a momentum inside every step

``docs/alignment-family.md`` says what each regularises, and ``gradalign verify`` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from gradalign.algorithms.auto import AUTO, LENGTH, beta_of, halves, marks, measured, newest_share
from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.schedule import Schedule, require, setting_of, value_at
from gradalign.algorithms.view import Blend, ClientView, Plan, SharedSums
from gradalign.errors import GradalignError, real, whole


@dataclass(frozen=True, kw_only=True)
class FedGA(Algorithm):
    """Federated Gradient Alignment (Dandi, Barba & Jaggi 2022, Algorithm 2): v_i = −β(ḡ − g_i).

    Each client starts from x displaced towards its own gradient, which adds −αβK∇r(x) to a round of FedAvg, r being
    half the variance of the clients' gradients. Unlike SCAFFOLD, β is free and all K steps feel it alike.

    Attributes:
        beta: β, a number, a schedule over rounds, or "auto": set by how far the clients' gradients lie apart (see
            ``auto.py``), for which each reports a few numbers. Until that is measured β = 0, and with one local step a
            round it stays 0: give clients several, or use FedAvg, which is the same for less.
        mean: Where ḡ comes from; unless given, "running" with "auto" and the paper's "fresh" with a β of one's own.
            "fresh": the clients send g_i first, a communication of its own. "running": v_i = −β(s − g_i), where the
            client takes g_i itself before its steps, and the server sends with x the running mean
            s ← λs + (1−λ)(−Σ p_i Δ_i/(αK)) of what it has seen, corrected for its start. One communication, and only
            sums reach the server. "kept": v_i = −β(s − k_i), where k_i = −Δ_i/(αK) is of the client's last visit and
            s the mean of those seen: no gradient beside the steps, but memory.
        decay: λ of the running mean; 0 is the last round's.
        length: ρ of "auto", a number or a schedule over rounds; 0 is FedAvg.
        gradient_every: Align in every m-th round only; the others are FedAvg's; kept gradients are sent there, too.
        form: "start" displaces once; "step", the appendix's Algorithm 3, inside every step. The two are equal.
    """

    beta: float | Schedule | str = AUTO
    mean: str | None = None
    decay: float = 0.9
    gradient_every: int = 1
    form: str = "start"
    length: float | Schedule | None = None

    def __post_init__(self) -> None:
        if self.mean is None:
            object.__setattr__(self, "mean", "running" if self.beta == AUTO else "fresh")
        if not isinstance(self.beta, str):
            require("algorithm.beta", self.beta, least=0.0)
            object.__setattr__(self, "beta", setting_of("algorithm.beta", self.beta))
        elif self.beta != AUTO:
            raise GradalignError(f'algorithm.beta must be a number, a schedule or "{AUTO}", got "{self.beta}"')
        elif self.length is None:
            object.__setattr__(self, "length", LENGTH)
        if self.length is not None:
            require("algorithm.length", self.length, least=0.0)
            object.__setattr__(self, "length", setting_of("algorithm.length", self.length))
        object.__setattr__(self, "decay", real("algorithm.decay", self.decay, 0.0, 1.0, below=True))
        object.__setattr__(self, "gradient_every", whole("algorithm.gradient_every", self.gradient_every, 1))
        for name, allowed in (("mean", ("fresh", "running", "kept")), ("form", ("start", "step"))):
            if getattr(self, name) not in allowed:
                names = " or ".join(f'"{one}"' for one in allowed)
                raise GradalignError(f'algorithm.{name} must be {names}, got "{getattr(self, name)}"')

    def require_given(self) -> None:
        if self.length is not None and self.beta != AUTO:  # only a round's own number, worked out, stands beside it
            raise GradalignError(f'algorithm.length is for beta = "{AUTO}"; remove it, or the other beta')

    @property
    def keeps(self) -> bool:
        return self.mean == "kept"

    @property
    def infers_gradients(self) -> bool:
        return self.mean != "fresh"

    @property
    def extra_down(self) -> int:
        return int(self.mean != "fresh" and self._aligns)  # s

    @property
    def extra_up(self) -> int:
        return int(self.keeps)  # k_i⁺ − k_i

    @property
    def _aligns(self) -> bool:
        return self.beta != 0.0 or self.length is not None  # a schedule is not 0; ``at`` makes it this round's number

    @property
    def needs_gradients(self) -> bool:
        return self.mean == "fresh" and self._aligns

    @property
    def uses_own_gradient(self) -> bool:
        return not self.keeps and self._aligns

    @property
    def reports(self) -> bool:
        return self.length is not None

    @property
    def only_displaces(self) -> bool:
        return type(self).plan is FedGA.plan and not self.keeps  # somebody's own variant may plan more

    @property
    def plans_alike(self) -> bool:
        return type(self).plan is FedGA.plan and not self.keeps

    @property
    def strength(self) -> float:
        return 0.0 if isinstance(self.beta, str) else value_at(self.beta, 0)

    def at(self, round_index: int) -> Self:
        length = None if self.length is None else value_at(self.length, round_index)
        if round_index % self.gradient_every or length == 0.0:
            return replace(self, beta=0.0, length=None)
        beta = self.beta if isinstance(self.beta, str) else value_at(self.beta, round_index)
        return replace(self, beta=beta, length=length)

    def informed(self, numbers: Mapping[str, float], lr: float) -> Self:
        if self.mean != "fresh" and not numbers.get("rounds"):
            return replace(self, beta=0.0, length=None)  # before the first s there is nothing to align with
        if self.beta != AUTO or self.length is None:
            return self
        return replace(self, beta=beta_of(value_at(self.length, 0), numbers, lr))

    def gradient_limit(self, limit: int | None, numbers: Mapping[str, float]) -> int | None:
        known = self.mean == "fresh" or bool(numbers.get("rounds"))  # else nothing is measured
        # The chance of a mini-batch is what one step's alignment is about.
        halved = self.reports and not (self.keeps or self.one_step) and known and halves(limit, numbers)
        return limit // 2 if halved and limit is not None else limit

    def plan(self, view: ClientView) -> Plan:
        if not self.strength or (self.keeps and view.kept is None):
            return Plan()
        every_step = self.form == "step"
        if self.keeps:
            own, common = view.memory()
            return Plan(displacement=-self.strength * (common - own), every_step=every_step)
        return Plan(displacement=Blend(self._common(view), self.strength, self.strength), every_step=every_step)

    def _common(self, view: ClientView) -> Tensor:
        return view.mean() if self.mean == "fresh" else view.memory()[1]

    def facts(self, view: ClientView) -> Mapping[str, float]:
        if self.keeps and view.kept is None:
            return {}
        own = view.memory()[0] if self.keeps else view.own()
        facts = {"square": float((own.double() - self._common(view)).square().sum())}
        facts |= marks(own) if self.mean == "running" else {}
        if view.sample is None or self.keeps:
            return facts
        taken, examples = view.sample
        return facts | {"inverse": 1.0 / taken, "inverse all": 1.0 / examples}

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        return view.mean_step(update, total_step_size) if total_step_size else view.memory()[0]

    def next_shared(self, shared: Tensor | None, sums: SharedSums) -> Tensor | None:
        if sums.kept_change is not None:
            return sums.mean_kept(shared, everyone=False)
        if self.mean == "fresh" or not sums.total_step_size:  # a round with α = 0 teaches nothing
            return shared
        new = sums.mean_step()
        rounds = sums.numbers.get("rounds", 0.0) + 1.0
        return new if shared is None else shared + newest_share(self.decay, rounds) * (new - shared)

    def next_numbers(self, sums: SharedSums) -> Mapping[str, float]:
        """Carry how many rounds s has seen, and for "auto" how far apart the clients were."""
        carried = dict(sums.numbers)
        if self.mean != "fresh":
            carried["rounds"] = carried.get("rounds", 0.0) + bool(sums.total_step_size)
        if "square" not in sums.facts:
            return carried
        return measured(carried, sums, self.decay, one_step=self.one_step)


@dataclass(frozen=True, kw_only=True)
class LargeBatchGradAlign(FedGA):
    """GradAlign (Dandi, Barba & Jaggi 2022, Algorithm 1): FedGA with K = 1, one mini-batch per client."""

    label: ClassVar[str] = "gradalign"
    one_step: ClassVar[bool] = True
    mean: str | None = "fresh"


@dataclass(frozen=True, kw_only=True)
class FedInit(Algorithm):
    """FedInit (Sun, Shen & Tao 2023): start away from where this client last ended, v_i = β(x − y_i).

    With everyone in every round x − y_i = αK(g_i − ḡ) of the round before: FedGA with old gradients and β·αK in place
    of β. Where few take part, y_i belongs to an older x, and the way that the server has gone since comes in. As
    everywhere here Δ_i = y_K − y_0, and y_0 is the displaced start.
    """

    keeps: ClassVar[bool] = True
    beta: float = 0.1

    def __post_init__(self) -> None:
        require("algorithm.beta", self.beta, least=0.0)

    @property
    def strength(self) -> float:
        return self.beta

    def _displacement(self, view: ClientView) -> Tensor | None:
        return None if view.kept is None or not self.beta else self.beta * (view.x - view.kept)

    def plan(self, view: ClientView) -> Plan:
        return Plan(displacement=self._displacement(view))

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        displacement = self._displacement(view)
        return view.x + update if displacement is None else view.x + displacement + update

    def next_shared(self, shared: Tensor | None, sums: SharedSums) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class FedSAM(Algorithm):
    """FedSAM (Qu et al. 2022) with one ascent a round: v_i = ρ g_i/‖g_i‖, the client's own gradient at x.

    It regularises the length of each client's gradient, Σ p_i ‖g_i‖, not their disagreement. The paper ascends
    anew before every step, on its mini-batch; for K = 1 on the same examples the two are equal.
    """

    uses_own_gradient: ClassVar[bool] = True
    rho: float = 0.05

    def __post_init__(self) -> None:
        require("algorithm.rho", self.rho, above=0.0)

    def plan(self, view: ClientView) -> Plan:
        return Plan(displacement=_of_length(self.rho, view.own()))


@dataclass(frozen=True, kw_only=True)
class FedLESAM(Algorithm):
    """FedLESAM (Fan et al. 2024): all start a step back along the server's last move, v = ρ (x⁻ − x)/‖x⁻ − x‖.

    x⁻ is the point of the round before, so v estimates ρ ḡ/‖ḡ‖ without a gradient: it regularises ‖ḡ‖, the sharpness of
    the mean. In the paper x⁻ is the point that the client itself was last sent; here the server's, which it sends.
    """

    extra_down: ClassVar[int] = 1
    rho: float = 0.05

    def __post_init__(self) -> None:
        require("algorithm.rho", self.rho, above=0.0)

    def plan(self, view: ClientView) -> Plan:
        return Plan(displacement=None if view.shared is None else _of_length(self.rho, view.shared - view.x))

    def next_shared(self, shared: Tensor | None, sums: SharedSums) -> Tensor:
        return sums.x


@dataclass(frozen=True, kw_only=True)
class FedCM(Algorithm):
    """FedCM (Xu et al. 2021): every step goes along a·∇f_i + (1−a)·s, s being the last round's mean direction.

    Written with c = ((1−a)/a)·s, so that local.lr is the step along the gradient: the paper's η_l is lr/a, and
    s⁺ = −a·Σ p_i Δ_i/(αK). The momentum is the same for all clients, so it changes no variance: there is no ∇r in it.
    """

    extra_down: ClassVar[int] = 1
    infers_gradients: ClassVar[bool] = True
    pushes_all: ClassVar[bool] = True
    alpha: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", real("algorithm.alpha", self.alpha, 0.0, 1.0))
        require("algorithm.alpha", self.alpha, above=0.0)

    def plan(self, view: ClientView) -> Plan:
        return Plan(correction=None if view.shared is None else (1.0 - self.alpha) / self.alpha * view.shared)

    def next_shared(self, shared: Tensor | None, sums: SharedSums) -> Tensor | None:
        return -self.alpha * sums.update / sums.total_step_size if sums.total_step_size else shared


def _of_length(length: float, vector: Tensor) -> Tensor | None:
    """Return a vector along this one with the given length; None for the zero vector."""
    norm = float(vector.norm())
    return length / norm * vector if norm > 0.0 else None
