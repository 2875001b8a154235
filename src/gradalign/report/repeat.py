"""How to repeat an experiment: a recipe made from the runs' own settings, and the commands that run it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradalign.recipes.trust import is_outside, task_name
from gradalign.report.experiments import Experiment, Group
from gradalign.runs import readable_name
from gradalign.runs.untrusted import shown_text

_TABLES = ("task", "algorithm", "server", "local", "clients", "measure")


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A recipe as TOML (None when the runs were not made from one), a name for its file, and the commands."""

    recipe: str | None
    file_name: str
    commands: tuple[str, ...]
    outside: tuple[str, ...] = ()
    """The tasks that are not this package's: code that the recipe would run, for which no command is given."""


def how_to_repeat(experiment: Experiment) -> Repeat:
    """Return the recipe that gives these runs again, and the commands."""
    file_name = readable_name(experiment.name, "experiment") + ".toml"
    recipe = _recipe(experiment)
    if recipe is None:
        return Repeat(recipe=None, file_name=file_name, commands=())
    import tomli_w

    names = dict.fromkeys(shown_text(task_name(run.spec)) for run in experiment.runs)
    outside = tuple(name for name in names if is_outside(name))
    if outside:
        return Repeat(recipe=tomli_w.dumps(recipe), file_name=file_name, commands=(), outside=outside)
    quoted = shlex.quote(file_name)
    seeds = sorted({run.seed for run in experiment.runs})
    commands = []
    if seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        commands.append(f"gradalign compare {quoted} --seed {seeds[0]} --seeds {len(seeds)}")
    else:
        commands += [f"gradalign compare {quoted} --seed {seed} --seeds 1" for seed in seeds]
    return Repeat(recipe=tomli_w.dumps(recipe), file_name=file_name, commands=tuple(commands))


def _recipe(experiment: Experiment) -> dict[str, Any] | None:
    """Return a recipe whose entries have these groups' settings: what all share, and each one's own in [compare]."""
    specs = [_checked(group) for group in experiment.groups]
    if any(spec is None for spec in specs):
        return None
    known = [spec for spec in specs if spec is not None]
    shared = _shared(known)
    names = _entry_names(experiment.groups)
    settings = {}
    for name, spec in zip(names, known, strict=True):
        own = _beyond(spec, shared)
        own["algorithm"] = {"name": spec["algorithm"]["name"]} | own.get("algorithm", {})
        settings[name] = own
    seeds = sorted({run.seed for run in experiment.runs})
    return {
        **{key: value for key, value in shared.items() if not isinstance(value, Mapping)},
        "seed": seeds[0],
        **{key: value for key, value in shared.items() if isinstance(value, Mapping) and value},
        "compare": {"algorithms": names, "seeds": len(seeds), "settings": settings},
    }


def _checked(group: Group) -> dict[str, Any] | None:
    """Return a group's settings when a recipe can have them; a run made from Python objects has others."""
    from gradalign.errors import GradalignError
    from gradalign.recipes.spec import validate

    spec = {key: value for key, value in group.runs[0].spec.items() if key != "seed"}
    try:
        validated = validate(spec, "the run").to_dict()
    except (GradalignError, RecursionError):
        return None
    return {key: value for key, value in validated.items() if key in spec}


def _entry_names(groups: Sequence[Group]) -> list[str]:
    """Return names that differ also as folders: the algorithm's own where it is there once, else with a number."""
    names: list[str] = []
    for group in groups:
        alone = sum(other.name == group.name for other in groups) == 1
        number = 1 + sum(other.name == group.name for other in groups[: len(names)])
        names.append(group.name if alone else f"{group.name}-{number}")
    return names


def _shared(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all have alike, tables looked into; the algorithm's are always its own.

    So are schedules where the rounds are not alike: those of the recipe would follow an entry's rounds.
    """
    found: dict[str, Any] = {}
    uneven = any(spec.get("rounds") != specs[0].get("rounds") for spec in specs)
    for key, value in specs[0].items():
        if key == "algorithm":
            continue
        others = [spec.get(key) for spec in specs[1:]]
        if key in _TABLES and isinstance(value, Mapping):
            tables = [other if isinstance(other, Mapping) else {} for other in others]
            alike = {name: one for name, one in value.items() if all(t.get(name) == one for t in tables)}
            found[key] = {name: one for name, one in alike.items() if not (uneven and isinstance(one, Mapping))}
        elif all(other == value for other in others):
            found[key] = value
    return found


def _beyond(spec: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a spec has beyond the shared settings."""
    own: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, Mapping) and key in _TABLES:
            rest = {name: one for name, one in value.items() if name not in shared.get(key, {})}
            if rest:
                own[key] = rest
        elif key not in shared:
            own[key] = value
    return own
