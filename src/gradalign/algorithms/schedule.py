"""How a number (the learning rate, β) changes over the rounds.

A schedule is a frozen dataclass with one method, ``at(round)``, where the first round is 0. A plain float is a
constant schedule; ``value_at`` accepts both. When something happens is given in rounds, or in shares of the run, which
``over(rounds)`` turns into rounds once the length of the run is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from gradalign.errors import GradalignError


def _one_of(what: str, **given: object) -> None:
    names = [name for name, value in given.items() if value not in (None, {})]
    if len(names) != 1:
        raise GradalignError(f"{what} is given by {' or '.join(given)}, got {' and '.join(names) or 'neither'}")


def _span(what: str, rounds: float | None, share: float | None) -> None:
    if rounds is not None and rounds < 1:
        raise GradalignError(f"{what} needs rounds >= 1, got {rounds}")
    if share is not None and not 0.0 < share < math.inf:
        raise GradalignError(f"{what} needs a share of the run above 0, got {share!r}")


def _begin(what: str, share: float | None) -> None:
    if share is not None and not 0.0 <= share < math.inf:
        raise GradalignError(f"{what} needs a share of the run of at least 0, got {share!r}")


def _in_rounds(share: float, rounds: int, least: float = 0.0) -> float:
    return max(least, round(share * rounds, 9))  # rounded, so that 0.07 of 100 rounds is 7


def _known(rounds: float | None) -> float:
    if rounds is None:
        problem = "a schedule in shares of the run needs the run's length"
        raise GradalignError(f"{problem}; give rounds, or use over(rounds or steps)")
    return rounds


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Start at ``value``; from each round in ``at_rounds``, or share of the run in ``at_shares``, use the one there."""

    value: float
    at_rounds: Mapping[int, float] | Mapping[float, float] = field(default_factory=dict)
    at_shares: Mapping[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.at_shares:
            _one_of("when steps are taken", at_rounds=self.at_rounds, at_shares=self.at_shares)
        for share in self.at_shares:
            _begin("a step", share)

    def over(self, rounds: int) -> Self:
        if not self.at_shares:
            return self
        starts = {_in_rounds(share, rounds): value for share, value in self.at_shares.items()}
        return replace(self, at_rounds=starts, at_shares={})

    def at(self, round_index: int) -> float:
        _known(None if self.at_shares else 0)
        passed = {start: value for start, value in self.at_rounds.items() if start <= round_index}
        return passed[max(passed)] if passed else self.value


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """Rise linearly from ``start`` in round 0 to ``value`` in round ``rounds``, or over a ``share`` of the run."""

    value: float
    rounds: float | None = None
    start: float = 0.0
    share: float | None = None

    def __post_init__(self) -> None:
        _one_of("a warm-up's length", rounds=self.rounds, share=self.share)
        _span("a warm-up", self.rounds, self.share)

    def over(self, rounds: int) -> Self:
        return self if self.share is None else replace(self, rounds=_in_rounds(self.share, rounds, 1.0), share=None)

    def at(self, round_index: int) -> float:
        done = min(1.0, round_index / _known(self.rounds))
        return self.start + (self.value - self.start) * done


@dataclass(frozen=True, kw_only=True)
class OffUntil:
    """Zero before round ``round`` (or a ``share`` of the run), ``value`` from then on."""

    value: float
    round: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        _one_of("the end of being off", round=self.round, share=self.share)
        _begin("being off", self.share)

    def over(self, rounds: int) -> Self:
        return self if self.share is None else replace(self, round=_in_rounds(self.share, rounds), share=None)

    def at(self, round_index: int) -> float:
        return self.value if round_index >= _known(self.round) else 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Fall from ``value`` in round 0 to ``end`` in round ``rounds`` along half a cosine, then stay.

    Instead of ``rounds``, a ``share`` of the run; with neither it is the whole run, whose end then has ``end``.
    """

    value: float
    rounds: float | None = None
    end: float = 0.0
    share: float | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and self.share is not None:
            _one_of("a cosine's length", rounds=self.rounds, share=self.share)
        _span("a cosine schedule", self.rounds, self.share)

    def over(self, rounds: int) -> Self:
        if self.rounds is not None:
            return self
        return replace(self, rounds=_in_rounds(1.0 if self.share is None else self.share, rounds, 1.0), share=None)

    def at(self, round_index: int) -> float:
        done = min(1.0, round_index / _known(self.rounds))
        return self.end + (self.value - self.end) * 0.5 * (1.0 + math.cos(math.pi * done))


Schedule = Steps | Warmup | OffUntil | Cosine
SCHEDULES: dict[str, type[Schedule]] = {"steps": Steps, "warmup": Warmup, "off-until": OffUntil, "cosine": Cosine}
"""Every schedule by its kind in a recipe."""


def setting_of(name: str, value: Any) -> float | Schedule:
    """Return a schedule, or a plain float for anything that is a number (NumPy and torch scalars too)."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise GradalignError(f"{name} must be a number or a schedule, got {value!r}")
    return float(value)


def spanning(setting: float | Schedule, rounds: int) -> float | Schedule:
    """Return the setting for a run of this length: what is given in shares of the run, in rounds."""
    return setting.over(rounds) if isinstance(setting, Schedule) else setting


def value_at(setting: float | Schedule, round_index: int) -> float:
    """Return the number a constant or a schedule gives in this round."""
    return float(setting) if isinstance(setting, int | float) else setting.at(round_index)


def require(name: str, setting: float | Schedule, *, above: float | None = None, least: float | None = None) -> None:
    """Raise unless every number that the setting may give is finite and inside its range."""
    for value in _numbers(setting_of(name, setting)):
        if not math.isfinite(value):
            raise GradalignError(f"{name} must be a finite number, got {value}")
        if above is not None and value <= above:
            raise GradalignError(f"{name} must be greater than {above:g}, got {value:g}")
        if least is not None and value < least:
            raise GradalignError(f"{name} must be at least {least:g}, got {value:g}")


def _numbers(setting: float | Schedule) -> tuple[float, ...]:
    match setting:
        case Steps():
            return (setting.value, *setting.at_rounds.values(), *setting.at_shares.values())
        case Warmup(value=value, start=other) | Cosine(value=value, end=other):
            return (value, other)
        case OffUntil(value=value):
            return (value,)
    return (setting,)


def as_plain(setting: float | Schedule) -> float | dict[str, Any]:
    """Return a number as it is, a schedule as plain values, so that ``torch.load(weights_only=True)`` reads it."""
    if not isinstance(setting, Schedule):
        return setting
    values = {field.name: getattr(setting, field.name) for field in fields(setting)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {"kind": type(setting).__name__, **plain}


def from_plain(value: float | Mapping[str, Any]) -> float | Schedule:
    """Return the setting that ``as_plain`` was given."""
    if not isinstance(value, Mapping):
        return value
    settings, kinds = dict(value), {kind.__name__: kind for kind in SCHEDULES.values()}
    try:
        return kinds[settings.pop("kind")](**settings)
    except (KeyError, TypeError):
        problem = f"the state dict's beta is a schedule that this version does not know: {dict(value)}"
        raise GradalignError(problem) from None
