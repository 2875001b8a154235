"""A federation made from Python objects as plain values: what a recipe would have said."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from gradalign.experiment.federation import Federation
from gradalign.experiment.measure import Measure
from gradalign.tasks.task import plain_value


def describe(federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return a federation made from objects as plain TOML values, for the run folder."""
    algorithm: dict[str, Any] = {"name": federation.algorithm.label}
    for part in federation.algorithm.parts:
        algorithm |= _plain(part)
    facts = federation.task.describe()
    return {
        "seed": federation.seed,
        "fast": federation.fast,
        "task": plain_value(facts),
        "algorithm": algorithm,
        "server": _plain(federation.algorithm.server),
        "local": _plain(federation.local),
        "clients": {
            "per_round": federation.per_round,
            "weights": "examples" if federation.by_examples else "uniform",
            "dropout": federation.dropout,
            "min_fraction": federation.min_fraction,
        },
        "measure": _plain(measure),
    }


def _plain(thing: Any) -> dict[str, Any]:
    """Return a dataclass's fields as TOML values; unset ones are left out."""
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: _described(value) for name, value in values.items() if value is not None}


def _described(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__.lower()} | _plain(value)
    return plain_value(value)
