"""A federation made from Python objects as plain values: what a recipe would have said.

Read as a recipe, the description gives the same objects again. A class that no recipe can name (one of the user's own)
is called by its own name, which a recipe refuses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from gradalign.algorithms.plan import Algorithm, Combination
from gradalign.algorithms.rules import ServerRule
from gradalign.algorithms.schedule import Schedule
from gradalign.recipes.build import ALGORITHMS, SCHEDULES, SERVER_RULES
from gradalign.server.federation import Federation
from gradalign.server.measure import Measure
from gradalign.tasks.task import plain_value


def describe(federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return a federation made from objects as plain TOML values, for the run folder."""
    facts = federation.task.describe()
    local = _plain(federation.local)
    precision = {"precision": local.pop("precision")} if "precision" in local else {}
    return {
        "seed": federation.seed,
        "fast": federation.fast,
        **precision,
        "task": plain_value(facts),
        "algorithm": _algorithm(federation.algorithm),
        "server": _plain(federation.algorithm.server),
        "local": local,
        "clients": {
            "per_round": federation.per_round,
            "weights": "examples" if federation.by_examples else "uniform",
            "dropout": federation.dropout,
            "min_fraction": federation.min_fraction,
        },
        "measure": _plain(measure),
    }


def _algorithm(algorithm: Combination) -> dict[str, Any]:
    """Return all parts' values: in one table, but for those of parts that share a key, also with the table itself."""
    described: dict[str, Any] = {"name": _name(algorithm)}
    tables = {_part_name(part): _plain(part) for part in algorithm.parts}
    times = Counter(key for table in tables.values() for key in table)
    own = {}
    for name, table in tables.items():
        if all(times[key] == 1 and key not in ("name", "parts") for key in table):
            described |= table
        else:
            own[name] = table
    return described | ({"parts": own} if own else {})


def _name(algorithm: Combination) -> str:
    names = [_part_name(part) for part in algorithm.parts]
    names = [name for name in names if name != "fedavg"]
    rule = algorithm.server
    if type(rule) is not ServerRule:
        names.append(rule.label if SERVER_RULES.get(rule.label) is type(rule) else _of_ones_own(rule))
    return "+".join(names) or "fedavg"


def _part_name(part: Algorithm) -> str:
    known = ALGORITHMS.get(part.label)
    return part.label if known is None or known is type(part) else _of_ones_own(part)


def _of_ones_own(thing: object) -> str:
    """Return a name that is not taken for the library's class of the same name."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _plain(thing: Any) -> dict[str, Any]:
    """Return a dataclass's fields as TOML values; unset ones are left out, and so are empty tables."""
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: _described(value) for name, value in values.items() if value is not None and value != {}}


def _described(value: Any) -> Any:
    if isinstance(value, Schedule):
        kind = next(name for name, known in SCHEDULES.items() if known is type(value))
        return {"kind": kind} | _plain(value)
    return plain_value(value)
