"""Every algorithm as a plan: the displacement v_i, the correction c_i and the pull μ of one client in one round.

See ``plan.py`` for the round they act in. Each class is one row of that picture; its docstring cites the paper, gives
the update and says how it differs from its neighbours.

``known_algorithms()`` has them all by name, also those of a user's own; an algorithm's fields are its keys in a recipe.

FedGA and its neighbours, which displace, are in ``alignment.py``; those here correct, pull or take single steps.
SCAFFOLD's option II and FedDyn remember a vector per client (``keeps``). Both obey one law, so the
server needs to know only that law: its s is the weighted mean of the clients' vectors k_i over all N clients, k_i being
zero before a client is first seen. With uniform weights  s ← s + (1/N) Σ (k_i⁺ − k_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradalign.algorithms.alignment import FedCM as FedCM
from gradalign.algorithms.alignment import FedGA as FedGA
from gradalign.algorithms.alignment import FedInit as FedInit
from gradalign.algorithms.alignment import FedLESAM as FedLESAM
from gradalign.algorithms.alignment import FedSAM as FedSAM
from gradalign.algorithms.alignment import LargeBatchGradAlign as LargeBatchGradAlign
from gradalign.algorithms.plan import _KNOWN, Algorithm
from gradalign.algorithms.plan import FedAvg as FedAvg
from gradalign.algorithms.schedule import require
from gradalign.algorithms.view import ClientView, Plan
from gradalign.errors import GradalignError


def known_algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm that is defined by its label, the built-in ones first."""
    return dict(_KNOWN)


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    """Li et al. 2020: every step is pulled to x by μ(y − x), the gradient of (μ/2)‖y − x‖²; μ = 0 is FedAvg."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        require("algorithm.mu", self.mu, least=0.0)

    def plan(self, view: ClientView) -> Plan:
        return Plan(pull=self.mu)


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
        return self.control == "kept"

    @property
    def infers_gradients(self) -> bool:
        return self.keeps

    @property
    def extra_down(self) -> int:
        return int(self.keeps)  # s

    @property
    def extra_up(self) -> int:
        return int(self.keeps)  # k_i⁺ − k_i

    @property
    def needs_gradients(self) -> bool:
        return not self.keeps

    def plan(self, view: ClientView) -> Plan:
        own, mean = view.memory() if self.keeps else view.gradients()
        return Plan(correction=mean - own)

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        own, shared = view.memory()
        return own - shared - update / total_step_size if total_step_size else own  # a round with α = 0 teaches nothing


@dataclass(frozen=True, kw_only=True)
class LargeBatchSGD(Algorithm):
    """One step a round on the mean gradient: FedAvg with K = 1 and one mini-batch per client."""

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
        return self.aligned

    def plan(self, view: ClientView) -> Plan:
        if not self.aligned:
            return Plan()
        own, mean = view.gradients()
        return Plan(displacement=-0.5 * view.lr * view.participants * (mean - view.weight * own))

    def multiple(self, participants: int) -> float:
        return float(participants)  # the mean of the updates becomes their sum


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    """FedDyn (Acar et al. 2021): c_i = −h_i, μ = alpha, then h_i⁺ = h_i − alpha·Δ_i.

    The server takes x ← x + Σ p_i Δ_i − h/alpha, h being the mean of all h_i.
    h_i estimates ∇f_i at the client's last model, so that a client's optimum moves towards the common one. Like
    FedProx it pulls to x, like SCAFFOLD's option II it remembers; unlike both it corrects the server's average too.
    """

    keeps: ClassVar[bool] = True
    alpha: float = 0.01

    def __post_init__(self) -> None:
        require("algorithm.alpha", self.alpha, above=0.0)

    def plan(self, view: ClientView) -> Plan:
        own, _ = view.memory()
        return Plan(correction=-own, pull=self.alpha)

    def keep(self, view: ClientView, update: Tensor, total_step_size: float) -> Tensor:
        own, _ = view.memory()
        return own - self.alpha * update

    def offset(self, shared: Tensor) -> Tensor | None:
        return -shared / self.alpha
