"""What a sweep tries: the names of the values, where they go in a recipe, and the lists they are taken from."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from gradalign.algorithms.schedule import Cosine
from gradalign.errors import GradalignError
from gradalign.recipes import found, merge
from gradalign.recipes.names import accepted_parameters, parts_of, plain_name
from gradalign.recipes.scale import replaced
from gradalign.recipes.spec import ScheduleSpec, Spec, SweepSpec, checked
from gradalign.report.experiments import shown_value

Value = float | int | str
Point = dict[str, Value]
Lists = dict[str, list[Value]]

# Where each value goes in a recipe; also the order in which values are always shown.
PLACES: dict[str, tuple[str, str]] = {
    "lr": ("local", "lr"),
    "batch": ("local", "batch_size"),
    "K": ("local", "steps"),
    "epochs": ("local", "epochs"),
    "weight_decay": ("local", "weight_decay"),
    "clip_norm": ("local", "clip_norm"),
    "server_lr": ("server", "lr"),
    "beta": ("algorithm", "beta"),
    "beta_schedule": ("algorithm", "beta"),
    "mu": ("algorithm", "mu"),
    "alpha": ("algorithm", "alpha"),
    "rho": ("algorithm", "rho"),
}
_OTHER_NAMES = {"batch_size": "batch", "k": "K", "steps": "K", "local_steps": "K", "wd": "weight_decay"}
FINE, SCHEDULE = "beta_fine", "beta_schedule"
_ALIGNED = ("fedga", "gradalign")  # whose β is searched
_SCHEDULE = re.compile(r"constant|cosine|(warmup|off-until|cosine) (0?\.\d*[1-9]\d*|1(\.0*)?)")

# The paper's values, and those of the papers of FedProx, FedDyn and SAM.
_LR, _STEPS, _EPOCHS, _WEIGHT_DECAY = (0.05, 0.1, 0.2, 0.4), (1, 10, 20, 40), (1, 2, 4), (0.001, 0.0001)
_OWN_VALUES = {"beta": (0.01, 0.1, 1.0, 5.0), "mu": (0.001, 0.01, 0.1, 1.0), "alpha": (0.001, 0.01, 0.1)}
_OWN_VALUES |= {"rho": (0.01, 0.02, 0.05, 0.1, 0.2)}


def parse_grid(words: Iterable[str]) -> Lists:
    """Turn ``lr=.05,.1`` words into lists, checked as a recipe's [sweep] table is."""
    lists: Lists = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = _OTHER_NAMES.get(name.strip(), name.strip())
        known = [*PLACES, FINE]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"known are {', '.join(known)}"
            raise GradalignError(f'--grid: "{name}" is not a value that can be swept; {hint}')
        values = [part.strip() for part in text.split(",") if part.strip()]
        if not equals or not values:
            raise GradalignError(f"--grid {name} has no values; give for example --grid lr=.05,.1,.2")
        if name in lists:
            raise GradalignError(f"--grid {name} is given twice; put all its values into one list")
        lists[name] = [_number(name, value) for value in values]
    section = checked(SweepSpec, lists, "--grid")
    return {name: _distinct(getattr(section, name)) for name in lists}


def _number(name: str, text: str) -> Value:
    if name == SCHEDULE or (name == "batch" and text == "whole"):
        return text
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    allowed = 'numbers, or "whole" for all of a client' if name == "batch" else "numbers"
    raise GradalignError(f'--grid {name}: "{text}" is not a number; its values must be {allowed}')


def _distinct(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def default_lists(spec: Spec) -> Lists:
    """Return the paper's values for whatever a recipe's algorithm has, each list with the recipe's own value in it."""
    local = spec.local
    lr = local.lr.value if isinstance(local.lr, ScheduleSpec) else local.lr
    lists: Lists = {
        "lr": sorted({*_LR, lr}),
        "batch": _distinct([local.batch_size or "whole", "whole"]),
        "weight_decay": sorted({*_WEIGHT_DECAY, local.weight_decay}),
    }
    if local.steps is None:
        lists["epochs"] = sorted({*_EPOCHS, local.epochs or 1})
    else:
        lists["K"] = sorted({*_STEPS, local.steps})
    for name in [name for name in _OWN_VALUES if name in accepted_parameters(spec.algorithm.name)]:
        own = stated_value(spec, name)
        lists[name] = sorted({*_OWN_VALUES[name], *([own] if isinstance(own, int | float) else [])})
    return lists


def stated_value(spec: Spec, name: str) -> Any:
    """Return what is said of an algorithm's parameter, None for nothing; of a schedule, the value it is about."""
    parts = {part: table.given() for part, table in (spec.algorithm.parts or {}).items()}
    *_, where, key = _place({"algorithm": {"name": spec.algorithm.name, "parts": parts}}, name)
    value = parts.get(where, spec.algorithm.given()).get(key)
    return getattr(value, "value", value)


def choose_lists(spec: Spec, section: SweepSpec, given: Lists, fixed: Mapping[str, Any] | None = None) -> Lists:
    """Return the lists of a sweep: the defaults, over them the recipe's [sweep], over that the command line's.

    What the spec's algorithm does not have is left out of the recipe's ``section``; in ``given`` it is a mistake. What
    the tables ``fixed`` say, and a β that sets itself, is searched only where values of it are ``given``; where nobody
    says "auto", it being the default, also where the section has some.
    """
    stated = {name: _distinct(values) for name in [*PLACES, FINE] if (values := getattr(section, name))}
    lists, own = default_lists(spec), accepted_parameters(spec.algorithm.name)
    beta = stated_value(spec, "beta")
    defaults = [getattr(kind, "beta", None) for kind in parts_of(spec.algorithm.name).values()]
    if beta == "auto" or (beta is None and "auto" in defaults):
        lists.pop("beta", None)
    if beta == "auto":
        stated = {name: values for name, values in stated.items() if not name.startswith("beta")}
    elif isinstance(found(fixed, "algorithm", "beta"), Mapping):
        stated.pop(SCHEDULE, None)
    values = {name: found(fixed, *_place(fixed or {}, name)) for name in PLACES if name != SCHEDULE}
    held: Lists = {name: [one] for name, one in values.items() if isinstance(one, int | float | str) and one != "auto"}
    held = {name: one for name, one in held.items() if name not in _OWN_VALUES or name in own}
    for layer in (stated, held | ({FINE: held["beta"]} if "beta" in held and "beta" not in given else {}), given):
        if "K" in layer and "epochs" in layer:
            raise GradalignError("a sweep goes over K (local steps) or over epochs, not both")
        for name, other in (("K", "epochs"), ("epochs", "K")):
            if name in layer:
                lists.pop(other, None)
        lists |= layer
    not_its_own = [name for name in (*_OWN_VALUES, FINE) if name.removesuffix("_fine") not in own]
    hints = (get_type_hints(part).get("beta") for part in parts_of(spec.algorithm.name).values())
    kinds = [get_args(hint) for hint in hints if hint is not None]
    if not kinds or not all(Cosine in one for one in kinds):  # FedInit's is a number
        not_its_own.append(SCHEDULE)
    wrong = [name for name in not_its_own if name in given]
    if wrong:
        raise GradalignError(f"--grid {wrong[0]}: {spec.algorithm.name} has no such parameter")
    if "beta" not in lists:
        if {FINE, SCHEDULE} & set(given):
            raise GradalignError('beta is "auto" and stays so without --grid beta=…, values to search it among')
        not_its_own += [FINE, SCHEDULE]
    if any(part.one_step for part in parts_of(spec.algorithm.name).values()) and not {"K", "epochs"} & set(given):
        lists.pop("epochs", None)
        lists["K"] = [1]
    return {name: values for name, values in lists.items() if name not in not_its_own}


def apply_point(
    tables: Mapping[str, Any], point: Mapping[str, Value], within: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a recipe's tables with a point's values in their places; of a schedule, the value it is about.

    ``within`` are the whole tables where these are laid over others: a schedule or a part's table may stand there.
    """
    data, whole = dict(tables), tables if within is None else within
    for name, value in point.items():
        if name != SCHEDULE:
            path = _place(whole, name)
            change: Any = {"value": value} if isinstance(found(whole, *path), Mapping) else value
            for step in reversed(path):
                change = {step: change}
            data = merge(data, change)
    for name, other in (("K", "epochs"), ("epochs", "K")):
        if name in point:
            data["local"].pop(PLACES[other][1], None)
    if SCHEDULE in point:
        path = _place(whole, SCHEDULE)
        beta = found(data, *path)
        value = beta["value"] if isinstance(beta, Mapping) else beta
        data = replaced(data, path, scheduled(str(point[SCHEDULE]), value))
    return data


def _place(tables: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return where a value goes: its place, or that in the table of the part that states it, of β the aligned part."""
    table, key = PLACES[name]
    parts = found(tables, table, "parts")
    having = [part for part in parts if found(parts, part, key) is not None] if isinstance(parts, Mapping) else []
    if key == "beta" and {*_ALIGNED} & {*plain_name(str(found(tables, table, "name"))).split("+")}:
        having = [part for part in having if plain_name(part) in _ALIGNED]
    return (table, "parts", having[0], key) if having else (table, key)


def scheduled(words: str, value: float) -> float | dict[str, Any]:
    """Return β as a recipe has it, by a schedule in words: "constant", "warmup 0.1", "off-until 0.25", "cosine"."""
    if _SCHEDULE.fullmatch(words) is None:
        forms = '"constant" or "cosine", or "warmup", "off-until" or "cosine" with a share of the run, as "warmup 0.1"'
        raise GradalignError(f'beta_schedule: "{words}" is not one; give {forms}')
    kind, _, share = words.partition(" ")
    if kind == "constant":
        return value
    return {"kind": kind, "value": value} | ({"share": float(share)} if share else {})


def combinations(lists: Mapping[str, Sequence[Value]]) -> list[Point]:
    """Return every combination of the values, the last list varying fastest."""
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def ordered(point: Mapping[str, Value]) -> Point:
    return {name: point[name] for name in PLACES if name in point}


def fine_values(best: float, coarse: Sequence[float]) -> list[float]:
    """Return values around the best of a coarse list: two on either side, evenly spaced in ratio up to its neighbours.

    At an end of the list the missing neighbour lies as far out as the other one lies in; values have two digits.
    """
    lower = max((value for value in coarse if 0 < value < best), default=None)
    higher = min((value for value in coarse if value > best), default=None)
    if best == 0:
        steps = [(higher or 0.1) / 10 ** (k / 3) for k in (3, 2, 1)]
    else:
        above = higher or best * (best / lower if lower else 10.0)
        below = lower or best / (higher / best if higher else 10.0)
        steps = [best * (below / best) ** (k / 3) for k in (2, 1)] + [best * (above / best) ** (k / 3) for k in (1, 2)]
    return [value for value in dict.fromkeys(float(f"{step:.2g}") for step in steps) if value not in coarse]


def describe_point(point: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {shown_value(value)}" for name, value in point.items())
