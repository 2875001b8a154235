"""From a spec to the objects it describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.algorithms.schedule import SCHEDULES
from gradalign.client import LocalTraining
from gradalign.errors import GradalignError, named_failure
from gradalign.recipes.names import algorithm_keys, keys_of, parts_of, plain_name, rule_of, server_keys
from gradalign.recipes.trust import imported, is_outside
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


def require_known_keys(spec: Spec, source: str) -> None:
    """Refuse keys of the [algorithm] and [server] tables that no algorithm and no rule has."""
    from gradalign.recipes.spec import unknown_setting

    if "name" in spec.server.given():
        problem = "the server's rule is part of the algorithm's name"
        raise GradalignError(f'{source}: server.name: {problem}, for example algorithm.name = "fedga+fedadam"')
    algorithms, rules = algorithm_keys(spec.algorithm.name), server_keys(spec.algorithm.name)
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
    own_tables = {plain_name(name): table for name, table in (spec.parts or {}).items()}
    strangers = sorted(set(own_tables) - set(kinds))
    if strangers:
        raise GradalignError(f"algorithm.parts.{strangers[0]} is set, but {spec.name} has no such part; remove it")
    refusal = "{} has no such parameter; remove it"
    given = _parameters(spec, "algorithm", keys_of(*kinds.values()), refusal.format(spec.name))
    parts: list[Algorithm | ServerRule] = []
    for name, kind in kinds.items():
        known = keys_of(kind)
        own = {key: value for key, value in given.items() if key in known}
        if name in own_tables:
            own |= _parameters(own_tables[name], f"algorithm.parts.{name}", known, refusal.format(name))
        parts.append(_made(kind, own, "algorithm"))
    server_rule = rule_of(spec.name)
    known = keys_of(server_rule)
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
    with named_failure(f"{where}: {kind.__name__}", "could not be made"):  # it may be one of the user's own
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


def build_task(name: str, *, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """Make a task by name: a built-in one, or the user's ``package.module:function``.

    Options become the function's keyword arguments. A function without a ``seed`` argument is not given one.
    """
    if name not in TASKS and not is_outside(name):
        raise GradalignError(
            f'task.name: "{name}" is not a task; known are {", ".join(TASKS)}, or give package.module:function'
        )
    make = TASKS[name] if name in TASKS else imported(name, "task.name", "function")
    if not callable(make):
        raise GradalignError(f"task.name: {name} is not a function that makes a Task")
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
    with named_failure(f"the task {name}", "could not be made"):
        task = make(**options)
    if not isinstance(task, Task):
        raise GradalignError(f"{name} must return a gradalign.Task, got {type(task).__name__}")
    return task


def task_of(spec: Spec, made: dict[str, Task] | None = None) -> Task:
    """Make the task that a spec describes, with its validation examples held out where the spec asks for it.

    Runs that share what was ``made`` share their tasks where seed and data are the same: the clients are read once.
    """
    made = {} if made is None else made
    key = repr((spec.seed, spec.task, spec.clients.holdout))
    if key not in made:
        task = build_task(spec.task.name, seed=spec.seed, options=spec.task.options())
        made[key] = task if spec.clients.holdout is None else hold_out(task, spec.clients.holdout, spec.seed)
    return made[key]


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
