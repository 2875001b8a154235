"""β in a state dict: a number, or a schedule as plain values, so that ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from gradalign.algorithms.schedule import Schedule
from gradalign.errors import GradalignError

KINDS: dict[str, type[Schedule]] = {kind.__name__: kind for kind in get_args(Schedule)}


def as_plain(setting: float | Schedule) -> float | dict[str, Any]:
    """Return a number as it is, a schedule as its name and its settings."""
    if not isinstance(setting, Schedule):
        return setting
    values = {field.name: getattr(setting, field.name) for field in fields(setting)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return {"kind": type(setting).__name__, **plain}


def from_plain(value: float | Mapping[str, Any]) -> float | Schedule:
    """Return the setting that ``as_plain`` was given."""
    if not isinstance(value, Mapping):
        return value
    settings = dict(value)
    kind = KINDS.get(settings.pop("kind", ""))
    try:
        if kind is not None:
            return kind(**settings)
    except TypeError:
        pass
    raise GradalignError(f"the state dict's beta is a schedule that this version does not know: {dict(value)}")
