"""Server rules: how the server moves its point x by the clients' mean update u = Σ p_i Δ_i.

A rule is pure: ``step(x, u, memory)`` returns the new point and the new memory and changes neither argument.
Vectors are float64 here, whatever the model's precision: the server's arithmetic is cheap and should not round.

A rule that goes by single clients (``sees_each``) is told of each: its share, its steps, the norm of its update; and
it may count each update so many times, u = Σ p_i a_i Δ_i. That is enough for FedNova and FedExP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradalign.algorithms.schedule import require
from gradalign.errors import GradalignError

Memory = dict[str, Tensor]
_KNOWN: dict[str, type[ServerRule]] = {}


@dataclass(frozen=True, kw_only=True)
class ClientReport:
    """What a rule that ``sees_each`` may look at of one client's answer."""

    client: int
    weight: float
    """p_i, its share of the average; in ``factor``, while answers are still coming in, w_i before it is a share."""
    steps: int
    """τ_i, the local steps it took."""
    total_step_size: float
    """The sum of its step sizes: αK without momentum."""
    norm: float
    """‖Δ_i‖."""


@dataclass(frozen=True, kw_only=True)
class ServerRule:
    """x ← x + lr · u, the plain average of the clients for lr = 1 (McMahan et al. 2017).

    The base of all rules: a subclass has its own ``step``, and is known by its ``label`` once it is defined.
    """

    label: ClassVar[str] = "fedavg"
    """The rule's name in recipes and tables: unless given, the class's in small letters."""
    sees_each: ClassVar[bool] = False
    """Whether ``step`` is told of every client, and ``factor`` counts; then no updates are summed on their way."""
    lr: float = 1.0

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "label" not in vars(cls):
            cls.label = cls.__name__.lower()
        # As with algorithms: nobody's own class takes the name of one of ours.
        if not cls.__name__.startswith("_") and (
            cls.label not in _KNOWN or _KNOWN[cls.label].__module__ == cls.__module__
        ):
            _KNOWN[cls.label] = cls

    def __post_init__(self) -> None:
        require("server.lr", self.lr, above=0.0)

    def factor(self, one: ClientReport) -> float:
        """Return a_i, how many times this client's update counts in u = Σ p_i a_i Δ_i."""
        return 1.0

    def step(
        self, x: Tensor, update: Tensor, memory: Memory, clients: Sequence[ClientReport] = ()
    ) -> tuple[Tensor, Memory]:
        """Return the new point and the new memory; ``clients`` is empty unless the rule ``sees_each``."""
        return x + self.lr * update, {}


def known_rules() -> dict[str, type[ServerRule]]:
    """Return every server rule that is defined by its label, the plain average left out, the built-in ones first."""
    return dict(_KNOWN)


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerRule):
    """m ← momentum·m + u;  x ← x + lr·m  (Hsu, Qi & Brown 2019).

    With ``nesterov`` the step looks ahead: x ← x + lr·(u + momentum·m).
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise GradalignError(f"server.momentum must be in [0, 1), got {self.momentum:g}")

    def step(
        self, x: Tensor, update: Tensor, memory: Memory, clients: Sequence[ClientReport] = ()
    ) -> tuple[Tensor, Memory]:
        velocity = self.momentum * memory["velocity"] + update if memory else update.clone()
        direction = update + self.momentum * velocity if self.nesterov else velocity
        return x + self.lr * direction, {"velocity": velocity}


@dataclass(frozen=True, kw_only=True)
class _Adaptive(ServerRule):
    """m ← β1·m + (1−β1)·u;  v by the rule;  x ← x + lr·m / (√v + τ), from m = 0, v = τ².

    Algorithm 2 of Reddi et al., "Adaptive Federated Optimization" (ICLR 2021). As there, no bias correction.
    """

    lr: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require("server.tau", self.tau, above=0.0)
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name, 0.0) < 1.0:
                raise GradalignError(f"server.{name} must be in [0, 1), got {getattr(self, name):g}")

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        raise NotImplementedError

    def step(
        self, x: Tensor, update: Tensor, memory: Memory, clients: Sequence[ClientReport] = ()
    ) -> tuple[Tensor, Memory]:
        if not memory:
            memory = {"m": torch.zeros_like(update), "v": torch.full_like(update, self.tau**2)}
        m = self.beta1 * memory["m"] + (1.0 - self.beta1) * update
        v = self.second_moment(memory["v"], update.square())
        return x + self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(_Adaptive):
    """v ← v + u² (Reddi et al. 2021, who use β1 = 0 here)."""

    beta1: float = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """v ← β2·v + (1−β2)·u² (Reddi et al. 2021)."""

    beta2: float = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1.0 - self.beta2) * squared


@dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    """v ← v − (1−β2)·u²·sign(v − u²) (Reddi et al. 2021)."""

    beta2: float = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1.0 - self.beta2) * squared * torch.sign(v - squared)
