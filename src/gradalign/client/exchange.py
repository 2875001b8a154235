"""What clients answer: a gradient, an update, the score of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClientGradient:
    """∇f_i(x) and what was seen on the way."""

    gradient: Tensor
    loss: float
    accuracy: float | None
    examples: int


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """Δ_i = y_K − y_0, the client's buffers after training, and what was seen on the way."""

    update: Tensor
    floats: Tensor
    ints: Tensor
    loss: float
    steps: int
    examples: int
    total_step_size: float


@dataclass(frozen=True, kw_only=True)
class GroupGradient:
    """Σ w_i ∇f_i(x) over a group of clients with weights w_i, each client's loss, and the examples of all."""

    gradient: Tensor
    losses: list[float]
    examples: int


@dataclass(frozen=True, kw_only=True)
class GroupUpdate:
    """Σ w_i Δ_i over a group of clients with weights w_i, the same sum of their buffers, and what was seen."""

    update: Tensor
    floats: Tensor
    ints: Tensor
    """The first client's, as for every average."""
    weights: list[float]
    losses: list[float]
    steps: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sums over evaluated examples, so that parts can be added."""

    loss: float = 0.0
    correct: float | None = 0.0
    examples: int = 0

    def __add__(self, other: Score) -> Score:
        known = self.correct is not None and other.correct is not None
        return Score(
            loss=self.loss + other.loss,
            correct=(self.correct or 0.0) + (other.correct or 0.0) if known else None,
            examples=self.examples + other.examples,
        )
