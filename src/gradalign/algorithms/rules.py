"""Server rules: how the server moves its point x by the clients' mean update u = Σ p_i Δ_i.

A rule is pure: ``step(x, u, memory)`` returns the new point and the new memory and changes neither argument.
Vectors are float64 here, whatever the model's precision: the server's arithmetic is cheap and should not round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradalign.algorithms.schedule import require
from gradalign.errors import GradalignError

Memory = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ServerRule:
    """x ← x + lr · u, the plain average of the clients for lr = 1 (McMahan et al. 2017)."""

    label: ClassVar[str] = "fedavg"
    lr: float = 1.0

    def __post_init__(self) -> None:
        require("server.lr", self.lr, above=0.0)

    def step(self, x: Tensor, update: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return x + self.lr * update, {}


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerRule):
    """m ← momentum·m + u;  x ← x + lr·m  (Hsu, Qi & Brown 2019).

    With ``nesterov`` the step looks ahead: x ← x + lr·(u + momentum·m).
    """

    label: ClassVar[str] = "fedavgm"
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise GradalignError(f"server.momentum must be in [0, 1), got {self.momentum:g}")

    def step(self, x: Tensor, update: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
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

    def step(self, x: Tensor, update: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        if not memory:
            memory = {"m": torch.zeros_like(update), "v": torch.full_like(update, self.tau**2)}
        m = self.beta1 * memory["m"] + (1.0 - self.beta1) * update
        v = self.second_moment(memory["v"], update.square())
        return x + self.lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(_Adaptive):
    """v ← v + u² (Reddi et al. 2021, who use β1 = 0 here)."""

    label: ClassVar[str] = "fedadagrad"
    beta1: float = 0.0

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True, kw_only=True)
class FedAdam(_Adaptive):
    """v ← β2·v + (1−β2)·u² (Reddi et al. 2021)."""

    label: ClassVar[str] = "fedadam"
    beta2: float = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1.0 - self.beta2) * squared


@dataclass(frozen=True, kw_only=True)
class FedYogi(_Adaptive):
    """v ← v − (1−β2)·u²·sign(v − u²) (Reddi et al. 2021)."""

    label: ClassVar[str] = "fedyogi"
    beta2: float = 0.99

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1.0 - self.beta2) * squared * torch.sign(v - squared)
