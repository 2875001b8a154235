"""Algorithms and server rules by name, the library's and anybody's own, and which settings of a recipe are whose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gradalign.algorithms import known_algorithms
from gradalign.algorithms.plan import Algorithm
from gradalign.algorithms.rules import ServerRule, known_rules
from gradalign.errors import GradalignError
from gradalign.recipes.trust import imported, is_outside

if TYPE_CHECKING:
    from gradalign.recipes import Recipe

Kind = type[Algorithm] | type[ServerRule]


def plain_name(name: str) -> str:
    """Return a name as it is compared: in small letters, without hyphens, underscores and spaces."""
    return re.sub(r"[-_ ]", "", name.strip().lower())


def algorithm_names(name: str) -> list[str]:
    """Split ``fedga+my_module:FedExP`` into names of known classes and of classes to import, or refuse one."""
    names = [part.strip() if is_outside(part) else plain_name(part) for part in name.split("+")]
    known = known_algorithms() | known_rules()
    for part in names:
        if not is_outside(part) and part not in known:
            problem = f'"{part}" is not an algorithm; known are {", ".join(known)}, joined by "+"'
            raise GradalignError(f"algorithm.name: {problem}; one of your own is package.module:Class")
    return names


def _kind(name: str) -> Kind:
    if not is_outside(name):
        return (known_rules() | known_algorithms())[name]
    kind = imported(name, "algorithm.name", "Class")
    if not isinstance(kind, type) or not issubclass(kind, Algorithm | ServerRule):
        problem = f"{name} is not a subclass of gradalign.Algorithm or gradalign.ServerRule"
        raise GradalignError(f"algorithm.name: {problem}")
    return kind


def kinds_of(name: str) -> list[Kind]:
    """Return the classes that a name joins."""
    return [_kind(part) for part in algorithm_names(name)]


def parts_of(name: str) -> dict[str, type[Algorithm]]:
    """Return the algorithms that a name joins, by label, without the server's rule."""
    return {plain_name(kind.label): kind for kind in kinds_of(name) if issubclass(kind, Algorithm)}


def rule_of(name: str | None) -> type[ServerRule]:
    """Return the server's rule that a name has among its parts: the plain average if there is none."""
    rules = [kind for kind in (kinds_of(name) if name else []) if issubclass(kind, ServerRule)]
    if len(rules) > 1:
        raise GradalignError(f"algorithm.name: {name} names more than one server rule")
    return rules[0] if rules else ServerRule


def keys_of(*kinds: Kind) -> set[str]:
    """Return the settings that any of these classes have: their fields."""
    return {field.name for kind in kinds for field in fields(kind)}


def accepted_parameters(name: str) -> set[str]:
    """Return the keys of the [algorithm] table that this algorithm, or combination, has."""
    return keys_of(*parts_of(name).values())


def _shared(name: str, own: str | None) -> set[str]:
    """Return the parameters of one algorithm that a table written for another may be about.

    Those that both have are meant only where they are the same class's: FedInit's β and FedGA's share but a name.
    """
    both = [{*a.__mro__} & {*b.__mro__} for a in parts_of(name).values() for b in parts_of(own or name).values()]
    meant = {key for classes in both for c in classes for key in getattr(c, "__dataclass_fields__", ())}
    return accepted_parameters(name) - (accepted_parameters(own or name) - meant)


def algorithm_keys(*names: str) -> set[str]:
    """Return every key that an [algorithm] table may have for some known algorithm, or for one of these."""
    return keys_of(*known_algorithms().values()).union(*map(accepted_parameters, names))


def server_keys(*names: str | None) -> set[str]:
    """Return every key that a [server] table may have for some known rule, or for that of one of these."""
    return keys_of(ServerRule, *known_rules().values(), *map(rule_of, names))


def fitting(tables: Mapping[str, Any], name: str, own: str | None) -> dict[str, Any]:
    """Leave out of [algorithm] and [server] what the named algorithm does not have, and others have.

    ``own`` is the name that these tables were written for: what [server] says of its rule is said of no other rule.
    """
    fit, algorithm, server = dict(tables), tables.get("algorithm"), tables.get("server")
    if isinstance(algorithm, Mapping):
        unfit = algorithm_keys(*([own] if own else [])) - _shared(name, own) - {"name", "parts"}
        parts = algorithm.get("parts")
        if isinstance(parts, Mapping):  # without tables of algorithms that are not among these
            others = (known_algorithms().keys() | parts_of(own or name).keys()) - parts_of(name).keys()
            parts = {key: one for key, one in parts.items() if plain_name(key) not in others}
        fit["algorithm"] = {key: value for key, value in algorithm.items() if key not in unfit | {"parts"}}
        fit["algorithm"] |= {"parts": parts} if parts else {}
    if isinstance(server, Mapping):
        rule, written_for = rule_of(name), rule_of(own)
        unfit = server_keys(own) - keys_of(rule)
        if rule is not written_for:
            unfit |= keys_of(written_for)
        fit["server"] = {key: value for key, value in server.items() if key not in unfit}
    return fit


def is_rules_table(value: Any) -> bool:
    """Return whether a value in [server] is a table ``[server.RULE]``, and not a schedule."""
    return isinstance(value, Mapping) and "kind" not in value


def settle_server(tables: Mapping[str, Any], name: str | None, mentioned: Iterable[str] = ()) -> dict[str, Any]:
    """Return tables whose [server] is the named rule's alone: its ``[server.RULE]`` goes over what [server] says.

    ``mentioned`` are further names whose rules may have a table there.
    """
    server = tables.get("server")
    if not isinstance(server, Mapping) or not any(map(is_rules_table, server.values())):
        return dict(tables)
    own = rule_of(name)
    named: list[type[ServerRule]] = [ServerRule, *map(rule_of, mentioned), own]
    rules = known_rules() | {plain_name(rule.label): rule for rule in named}
    settled = {key: value for key, value in server.items() if not is_rules_table(value)}
    for key in server.keys() - settled.keys():
        if plain_name(key) not in rules:
            raise GradalignError(f'server.{key}: "{key}" is not a server rule; known are {", ".join(rules)}')
        rule = rules[plain_name(key)]
        if strange := server[key].keys() - keys_of(rule):
            has = ", ".join(sorted(keys_of(rule)))
            raise GradalignError(f"server.{key}.{min(strange)} is set, but the server rule {rule.label} has only {has}")
        if rule is own:
            settled |= server[key]
    return {**tables, "server": settled}


def require_used(recipe: Recipe, entries: Sequence[str]) -> None:
    """Refuse a setting of the command line's [algorithm] and [server] that none of the entries can use.

    A setting of [server] that the rules of several entries have must say whose it is.
    """
    names = [recipe.spec_for(entry, 0).algorithm.name for entry in entries]
    rules = {plain_name(rule.label): rule for rule in map(rule_of, names)}
    used = {"algorithm": {"name"}, "server": set[str]()}
    for entry, name in zip(entries, names, strict=True):
        used["algorithm"].update(recipe.changes_for(entry, name).get("algorithm", {}))
        used["server"].update(fitting({"server": recipe.changes.get("server", {})}, name, name)["server"])
    for key, value in recipe.changes.get("server", {}).items():
        having = [label for label, rule in rules.items() if key in keys_of(rule)]
        if is_rules_table(value) and plain_name(key) not in rules:
            used["server"].discard(key)
        elif len(having) > 1:
            said = f"--set server.{having[-1]}.{key}={value}"
            raise GradalignError(f"--set server.{key} is for which server rule, {' or '.join(having)}? Say {said}")
    for table, keys in used.items():
        for key in recipe.changes.get(table, {}):
            if key not in keys:  # β is one that sets itself, or there is none
                has = f'a {key} but "auto"' if any(key in accepted_parameters(n) for n in names) else "such a parameter"
                raise GradalignError(f"--set {table}.{key}: none of {', '.join(entries)} has {has}")
