"""Comparing at equal communication: every algorithm may talk to its clients as often as the recipe's own one does.

A round of FedGA or of fresh SCAFFOLD goes to the clients and back twice, one of FedAvg once; so FedAvg plays twice as
many rounds. ``[compare] equal = "updates"`` gives all of them the same rounds instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from gradalign.algorithms.plan import Combination
from gradalign.recipes import Recipe, found, merge
from gradalign.recipes.build import build_algorithm
from gradalign.recipes.names import accepted_parameters
from gradalign.recipes.scale import lay_over
from gradalign.recipes.spec import AlgorithmSpec, validate


def at_equal_communication(recipe: Recipe, entry: str) -> dict[str, Any]:
    """Return an entry's tables with as many rounds as communicate as often as the recipe's own algorithm does.

    Rounds that the entry's own settings give are obeyed, unless the command line gives others.
    """
    tables, source = recipe.settings_of(entry), f"{recipe.source} ({entry})"
    given = "rounds" in recipe.compare.settings.get(entry, {}) and "rounds" not in recipe.changes
    if recipe.compare.equal == "updates" or given:
        return tables
    own = found(recipe.changes, "algorithm", "name") or found(recipe.data, "algorithm", "name") or AlgorithmSpec().name
    rounds, trips = _rounds_and_trips(tables, source)
    own_rounds, own_trips = _rounds_and_trips(recipe.settings_of(str(own)), recipe.source)
    fair = max(1, round(own_rounds * own_trips / trips))
    return tables if fair == rounds else lay_over(tables, {"rounds": fair})


def _rounds_and_trips(tables: Mapping[str, Any], source: str) -> tuple[int, Fraction]:
    """Return how many rounds there are before scaling, and how often one of them communicates on average."""
    name = str(found(tables, "algorithm", "name"))
    if "beta" in accepted_parameters(name) and found(tables, "algorithm", "beta") is None:
        tables = merge(tables, {"algorithm": {"beta": 1.0}})  # a recipe for comparing only; any will do for counting
    spec = validate({key: value for key, value in tables.items() if key != "scale"}, source)
    return spec.rounds, Fraction(communications(build_algorithm(spec.algorithm, spec.server), spec.rounds), spec.rounds)


def communications(algorithm: Combination, rounds: int) -> int:
    """Return how often a run of this many rounds communicates: twice in those with a gradient phase, else once."""
    algorithm = algorithm.over(rounds)
    if algorithm == algorithm.at(0) == algorithm.at(1):  # neither a schedule nor rounds that rest
        return rounds * (1 + algorithm.needs_gradients)
    return rounds + sum(algorithm.at(index).needs_gradients for index in range(rounds))


def rounds_within(budget: int, algorithm: Combination) -> int:
    """Return the most rounds, at least one, that communicate no more often than this."""
    lengths = range(1, budget + 1)
    return max(1, bisect_right(lengths, budget, key=lambda rounds: communications(algorithm, rounds)))
