"""From a spec to the objects it describes; tasks and algorithms by name."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from gradalign.algorithms import known_algorithms
from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerRule
from gradalign.algorithms.schedule import SCHEDULES
from gradalign.client import LocalTraining
from gradalign.errors import ClientError, GradalignError, no_exit
from gradalign.server.federation import Federation, make_federation, single_step
from gradalign.server.measure import Measure, require_measurable
from gradalign.tasks.digits import digits
from gradalign.tasks.holdout import hold_out
from gradalign.tasks.paper import cifar10, cifar100, emnist, shakespeare
from gradalign.tasks.table import table_task
from gradalign.tasks.task import Task, with_metrics

if TYPE_CHECKING:
    from gradalign.recipes.spec import AlgorithmSpec, LocalSpec, ServerSpec, Settings, Spec

TASKS: dict[str, Callable[..., Task]] = {
    make.__name__: make for make in (digits, emnist, cifar10, cifar100, shakespeare)
} | {"table": table_task}
SERVER_RULES: dict[str, type[ServerRule]] = {kind.label: kind for kind in (FedAvgM, FedAdagrad, FedAdam, FedYogi)}


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.strip().lower())


def algorithm_names(name: str) -> list[str]:
    """Split ``fedga+fedadam`` into known names, or say which one is not known."""
    names = [_plain(part) for part in name.split("+")]
    known = [*known_algorithms(), *SERVER_RULES]
    for part in names:
        if part not in known:
            problem = f'"{part}" is not an algorithm; known are {", ".join(known)}, joined by "+"'
            raise GradalignError(f"algorithm.name: {problem}")
    return names


def parts_of(name: str) -> dict[str, type[Algorithm]]:
    """Return the algorithms that a name joins, without the server's rule."""
    known = known_algorithms()
    return {part: known[part] for part in algorithm_names(name) if part in known}


def _rule(name: str) -> type[ServerRule]:
    rules = [SERVER_RULES[part] for part in algorithm_names(name) if part in SERVER_RULES]
    if len(rules) > 1:
        raise GradalignError(f"algorithm.name: {name} names more than one server rule")
    return rules[0] if rules else ServerRule


def _keys(*kinds: type[Algorithm] | type[ServerRule]) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


def accepted_parameters(name: str) -> set[str]:
    """Return the keys of the [algorithm] table that this algorithm, or combination, has."""
    return _keys(*parts_of(name).values())


def unfit_keys(name: str) -> dict[str, set[str]]:
    """Return the keys of the [algorithm] and [server] tables that other algorithms have, but not this one."""
    algorithms, rules = _keys(*known_algorithms().values()), _keys(*SERVER_RULES.values())
    own = accepted_parameters(name) | {"name", "parts"}
    return {"algorithm": algorithms - own, "server": rules - _keys(_rule(name))}


def require_known_keys(spec: Spec, source: str) -> None:
    """Refuse keys of the [algorithm] and [server] tables that no algorithm and no rule has."""
    from gradalign.recipes.spec import unknown_setting

    algorithms, rules = _keys(*known_algorithms().values()), _keys(*SERVER_RULES.values())
    tables: list[tuple[str, Settings, set[str]]] = [("server", spec.server, rules)]
    tables.append(("algorithm", spec.algorithm, algorithms | {"name", "parts"}))
    tables += [(f"algorithm.parts.{name}", part, algorithms) for name, part in (spec.algorithm.parts or {}).items()]
    for where, table, known in tables:
        for key in sorted(set(table.given()) - known):
            raise GradalignError(f"{source}: {unknown_setting(f'{where}.{key}', key, sorted(known))}")


def build_schedule(setting: Any, where: str) -> Any:
    """Return the schedule that a setting describes; anything else as it is."""
    from gradalign.recipes.spec import ScheduleSpec

    if not isinstance(setting, ScheduleSpec):
        return setting
    given = setting.model_dump(exclude_none=True)
    make = SCHEDULES[given.pop("kind")]
    expected = dict(inspect.signature(make).parameters)
    missing = [name for name, p in expected.items() if p.default is inspect.Parameter.empty and name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        raise GradalignError(
            f'{where}: a "{setting.kind}" schedule has the keys {", ".join(expected)}; '
            + (f"{missing[0]} is missing" if missing else f"{unknown[0]} is not one of them")
        )
    for name, kind, what in (("at_rounds", int, "round numbers"), ("at_shares", float, "shares of the run")):
        if name in given:
            try:
                given[name] = {kind(start): value for start, value in given[name].items()}
            except ValueError:
                raise GradalignError(f"{where}.{name}: the keys must be {what}") from None
    try:
        return make(**given)
    except GradalignError as error:
        raise GradalignError(f"{where}: {error}") from None


def build_algorithm(spec: AlgorithmSpec, rule: ServerSpec) -> Combination:
    """Compose the algorithm that the [algorithm] and [server] tables describe."""
    kinds = parts_of(spec.name)
    own_tables = {_plain(name): table for name, table in (spec.parts or {}).items()}
    strangers = sorted(set(own_tables) - set(kinds))
    if strangers:
        raise GradalignError(f"algorithm.parts.{strangers[0]} is set, but {spec.name} has no such part; remove it")
    refusal = "{} has no such parameter; remove it"
    given = _parameters(spec, "algorithm", _keys(*kinds.values()), refusal.format(spec.name))
    parts: list[Algorithm | ServerRule] = []
    for name, kind in kinds.items():
        known = _keys(kind)
        own = {key: value for key, value in given.items() if key in known}
        if name in own_tables:
            own |= _parameters(own_tables[name], f"algorithm.parts.{name}", known, refusal.format(name))
        if any(field.name == "beta" and field.default is MISSING for field in fields(kind)) and "beta" not in own:
            raise GradalignError(f"algorithm.beta is needed for {spec.name}: the strength of the alignment, e.g. 0.1")
        parts.append(_made(kind, own, "algorithm"))
    server_rule = _rule(spec.name)
    known = _keys(server_rule)
    refusal = f"the server rule {server_rule.label} has only {', '.join(sorted(known))}"
    return combine(*parts, _made(server_rule, _parameters(rule, "server", known, refusal), "server"))


def _parameters(table: Settings, where: str, known: set[str], refusal: str) -> dict[str, Any]:
    """Return the values that a table sets, all of which the algorithm or the rule must have."""
    given = table.given()
    unused = set(given) - known
    if unused:
        raise GradalignError(f"{where}.{min(unused)} is set, but {refusal}")
    return {key: build_schedule(value, f"{where}.{key}") for key, value in given.items()}


Made = TypeVar("Made", bound=Algorithm | ServerRule)


def _made(kind: type[Made], given: Mapping[str, Any], where: str) -> Made:
    """Make an algorithm or a rule; values must be of their fields' types, ranges are the class's own to check."""
    hints = get_type_hints(kind)
    return kind(**{key: _typed(value, hints[key], f"{where}.{key}") for key, value in given.items()})


def _typed(value: Any, hint: Any, where: str) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if hint is int and isinstance(value, float) and value.is_integer():  # tables have one kind of numbers
        return int(value)
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].replace("Input should", "must", 1)
        raise GradalignError(f"{where}: {problem}, got {value!r}") from None


def build_local(spec: LocalSpec, algorithm: Combination) -> LocalTraining:
    """Return the local training that the [local] table describes, K = 1 for the algorithms that ask for it."""
    given = dict(spec) | {"lr": build_schedule(spec.lr, "local.lr")}
    if spec.batch_size == "whole":
        given["batch_size"] = None
    return single_step(LocalTraining(**given), algorithm)


def _user_function(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a user's file beside the recipe, as with python -m
    if not module_name or not attribute:
        raise GradalignError(f'task.name: "{name}" is not package.module:function')
    try:
        with no_exit(f"task.name: importing {module_name}"):
            module = importlib.import_module(module_name)
    except GradalignError:
        raise
    except ImportError as error:
        raise GradalignError(f'task.name: cannot import "{module_name}": {error}') from error
    except Exception as error:
        raise ClientError(f"task.name: importing {module_name} failed: {type(error).__name__}: {error}") from error
    target = getattr(module, attribute, None)
    if target is None:
        raise GradalignError(f'task.name: the module {module_name} has no "{attribute}"')
    if not callable(target):
        raise GradalignError(f"task.name: {name} is not a function that makes a Task")
    return target  # type: ignore[no-any-return]


def build_task(name: str, *, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """Make a task by name: a built-in one, or the user's ``package.module:function``.

    Options become the function's keyword arguments. A function without a ``seed`` argument is not given one.
    """
    if name not in TASKS and ":" not in name:
        raise GradalignError(
            f'task.name: "{name}" is not a task; known are {", ".join(TASKS)}, or give package.module:function'
        )
    make = TASKS[name] if name in TASKS else _user_function(name)
    options = dict(options or {})
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:
        raise GradalignError(f"task.name: {name} is not a function that makes a Task") from None
    if "seed" in options:
        raise GradalignError("task.seed is not a setting: the run's own seed (seed, --seed) is the task's too")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_all else sorted(set(options) - set(parameters))
    if unknown:
        known = ", ".join(p for p in parameters if p != "seed") or "none"
        raise GradalignError(f"task.{unknown[0]} is not a setting of the task {name}; known here: {known}")
    if "seed" in parameters or takes_all:
        options["seed"] = seed
    try:
        with no_exit(f"the task {name}"):
            task = make(**options)
    except GradalignError:
        raise
    except Exception as error:
        raise ClientError(f"the task {name} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise GradalignError(f"{name} must return a gradalign.Task, got {type(task).__name__}")
    return task


def task_of(spec: Spec) -> Task:
    """Make the task that a spec describes, with its validation examples held out where the spec asks for it."""
    task = build_task(spec.task.name, seed=spec.seed, options=spec.task.options())
    return task if spec.clients.holdout is None else hold_out(task, spec.clients.holdout, spec.seed)


def build_federation(spec: Spec, task: Task | None = None) -> Federation:
    """Return the federation that a spec describes; a task made by ``task_of`` already may be given."""
    algorithm = build_algorithm(spec.algorithm, spec.server)
    local = replace(build_local(spec.local, algorithm), precision=spec.precision)
    federation = make_federation(
        with_metrics(task or task_of(spec), spec.measure.metrics),
        algorithm,
        local,
        **spec.clients.model_dump(exclude={"holdout"}),
        seed=spec.seed,
        fast=spec.fast,
        rounds=spec.rounds,
    )
    require_measurable(Measure(**spec.measure.model_dump()), federation)
    return federation
