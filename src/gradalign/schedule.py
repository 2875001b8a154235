"""How a number (the learning rate, β) changes over the rounds.

A schedule is a frozen dataclass with one method, ``at(round)``, where the first round is 0. A plain float is a
constant schedule; ``value_at`` accepts both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradalign.errors import GradalignError


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Start at ``value``; from each round in ``at_rounds`` on, use the value given there."""

    value: float
    at_rounds: Mapping[int, float] = field(default_factory=dict)

    def at(self, round_index: int) -> float:
        """Return the value in force in this round."""
        passed = [start for start in self.at_rounds if start <= round_index]
        return self.at_rounds[max(passed)] if passed else self.value


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Rise linearly from ``start`` in round 0 to ``value`` in round ``rounds``, then stay."""

    value: float
    rounds: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise GradalignError(f"a warm-up needs rounds >= 1, got {self.rounds}")

    def at(self, round_index: int) -> float:
        """Return the value in force in this round."""
        share = min(1.0, round_index / self.rounds)
        return self.start + (self.value - self.start) * share


@dataclass(frozen=True, kw_only=True)
class OffUntil:
    """Zero before round ``round``, ``value`` from then on."""

    value: float
    round: int

    def at(self, round_index: int) -> float:
        """Return the value in force in this round."""
        return self.value if round_index >= self.round else 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Fall from ``value`` in round 0 to ``end`` in round ``rounds`` along half a cosine, then stay."""

    value: float
    rounds: int
    end: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise GradalignError(f"a cosine schedule needs rounds >= 1, got {self.rounds}")

    def at(self, round_index: int) -> float:
        """Return the value in force in this round."""
        share = min(1.0, round_index / self.rounds)
        return self.end + (self.value - self.end) * 0.5 * (1.0 + math.cos(math.pi * share))


Schedule = Steps | Warmup | OffUntil | Cosine


def number(name: str, value: Any) -> float:
    """Return a plain float for anything that is a number (NumPy and torch scalars too), or say that it is none."""
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise GradalignError(f"{name} must be a number or a schedule, got {value!r}")
    return float(value)


def setting_of(name: str, value: Any) -> float | Schedule:
    """Return a number or a schedule as given by a user."""
    return value if isinstance(value, Schedule) else number(name, value)


def value_at(setting: float | Schedule, round_index: int) -> float:
    """Return the number a constant or a schedule gives in this round."""
    return float(setting) if isinstance(setting, int | float) else setting.at(round_index)


def values_of(setting: float | Schedule) -> tuple[float, ...]:
    """Return every number that the setting can be built from, for range checks."""
    match setting:
        case Steps():
            return (setting.value, *setting.at_rounds.values())
        case Warmup():
            return (setting.value, setting.start)
        case OffUntil():
            return (setting.value,)
        case Cosine():
            return (setting.value, setting.end)
        case _:
            return (float(setting),)


def require(name: str, setting: float | Schedule, *, above: float | None = None, least: float | None = None) -> None:
    """Raise unless every number of the setting is finite and inside its range."""
    for value in values_of(setting_of(name, setting)):
        if not math.isfinite(value):
            raise GradalignError(f"{name} must be a finite number, got {value}")
        if above is not None and value <= above:
            raise GradalignError(f"{name} must be greater than {above:g}, got {value:g}")
        if least is not None and value < least:
            raise GradalignError(f"{name} must be at least {least:g}, got {value:g}")
