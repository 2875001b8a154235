"""What an algorithm sees of a client and of a round's sums, and what it answers: the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

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
    """g_i; None where no part uses it, or where it is not written out (see ``Blend``)."""
    mean_gradient: Tensor | None = None
    """ḡ, when the round has a gradient phase."""
    kept: Tensor | None = None
    """k_i, when the algorithm keeps a vector per client; None for a client never seen."""
    shared: Tensor | None = None
    """s, the vector that the server carries from round to round for this algorithm."""
    weight_decay: float = 0.0
    sample: tuple[int, int] | None = None
    """How many examples g_i was taken of, and how many the client has; None where that is not known."""

    def own(self) -> Tensor:
        """Return g_i, or say that it was not taken."""
        return _given(self.gradient)

    def mean_step(self, update: Tensor, total_step_size: float) -> Tensor:
        """Return −Δ_i/(αK) less the decay at x: the mean of the loss gradients along the client's path."""
        return -update / total_step_size - self.weight_decay * self.x

    def mean(self) -> Tensor:
        """Return ḡ, or say that the round's gradient phase was skipped."""
        return _given(self.mean_gradient)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return (g_i, ḡ), or say that the round's gradient phase was skipped."""
        return _given(self.gradient), _given(self.mean_gradient)

    def memory(self) -> tuple[Tensor, Tensor]:
        """Return (k_i, s), or say that they are missing; a client never seen has k_i = 0."""
        if self.shared is None:
            raise GradalignError("this algorithm needs the client's kept vector and the server's, and none were given")
        return torch.zeros_like(self.x) if self.kept is None else self.kept, self.shared


def _given(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise GradalignError("this algorithm needs the clients' gradients at x, and none were given")
    return gradient


@dataclass(frozen=True)
class Blend:
    """The displacement own·g_i − others·common, not written out: a client adds its own gradient where that lies.

    With own = others = β and common = ḡ it is FedGA's −β(ḡ − g_i), and is computed as the paper writes it.
    """

    common: Tensor
    own: float
    others: float

    def of(self, gradient: Tensor | None) -> Tensor:
        """Return the vector, given g_i."""
        if self.own == 0.0:
            return -self.others * self.common
        if self.own == self.others:
            return -self.others * (self.common - _given(gradient))
        return self.own * _given(gradient) - self.others * self.common

    def __add__(self, other: Blend) -> Blend:
        if self.common is other.common:
            return Blend(self.common, self.own + other.own, self.others + other.others)
        common = self.others * self.common + other.others * other.common
        return Blend(common, self.own + other.own, 1.0)


def _plus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client does in one round: (v, c, μ). ``None`` stands for the zero vector."""

    displacement: Tensor | Blend | None = None
    correction: Tensor | None = None
    pull: float = 0.0
    every_step: bool = False
    """Apply the displacement inside every step and undo it there, instead of once at the start."""

    def displaced(self, gradient: Tensor | None) -> Tensor | None:
        """Return v_i as a vector, given g_i."""
        return self.displacement.of(gradient) if isinstance(self.displacement, Blend) else self.displacement

    def written_out(self, gradient: Tensor | None) -> Plan:
        """Return the plan with its displacement as a vector, given g_i."""
        return replace(self, displacement=self.displaced(gradient)) if isinstance(self.displacement, Blend) else self

    def __add__(self, other: Plan) -> Plan:
        return Plan(
            displacement=_plus(self.displacement, other.displacement),
            correction=_plus(self.correction, other.correction),
            pull=self.pull + other.pull,
            every_step=self.every_step or other.every_step,
        )


@dataclass(frozen=True, kw_only=True)
class SharedSums:
    """What an algorithm may look at when it makes the next s: means over the clients that reported, in float64."""

    update: Tensor
    """Σ p_i Δ_i."""
    kept_change: Tensor | None
    """Σ p_i (k_i⁺ − k_i) of this algorithm; None when it keeps nothing. See ``mean_kept``."""
    total_step_size: float
    """The mean of what each round's steps add up to: αK without momentum."""
    reported: int
    clients: int
    """N, all clients of the task."""
    x: Tensor
    """The point that the round began at."""
    lr: float = 0.0
    """α as the server knows it; 0 where only the clients do."""
    step_size: float = 0.0
    """The mean over the clients of what one of their steps adds up to: α without momentum."""
    weight_decay: float = 0.0
    gradient_share: float = 1.0
    """The share of ``local.gradient_examples`` that the clients' gradients were taken of."""
    weight: float = 0.0
    """Σ w_i of the clients that reported: p_i = w_i/Σ w_j."""
    known: tuple[int, int] = (0, 0)
    """How many clients have a k_i of this algorithm, before and after the round."""
    known_weight: tuple[float, float] = (0.0, 0.0)
    """Σ w_i over them, before and after."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What this algorithm carried from the round before."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """The weighted means of what its clients reported, over those that did."""

    def mean_step(self) -> Tensor:
        """Return −Σ p_i Δ_i/(αK) less the decay at x: the mean of the loss gradients along the clients' paths."""
        return -self.update / self.total_step_size - self.weight_decay * self.x

    def mean_kept(self, shared: Tensor | None, *, everyone: bool) -> Tensor | None:
        """Return Σ w_i k_i / Σ w_i after the round, given that of before; None when nothing is kept.

        The sum below is over the clients that have a k_i or, with ``everyone``, over all N, those not seen yet having
        k_i = 0 and a weight like the others'. A round's own p_i would not do: their sum below differs from round to
        round, so that an old k_i would never leave the mean by as much as it came in.
        """
        if self.kept_change is None:
            return None
        pairs = zip(self.known_weight, self.known, strict=True)
        before, after = (weight * self.clients / count if everyone and count else weight for weight, count in pairs)
        change = (self.weight / after) * self.kept_change
        return change if shared is None else (before / after) * shared + change
