"""How long and how large a run is: a recipe scaled down, and comparisons at equal communication.

A scaled federation is the whole one with fewer members: the data is divided among all clients first, then some clients
and some of their examples remain. Every class stays, with all of its test examples. Where clients are told apart by
their classes, one class each say, none of them can go, and only their examples become fewer.

In a comparison every algorithm may talk to its clients as often as the recipe's own one does. A round of FedGA or of
fresh SCAFFOLD goes to the clients and back twice, one of FedAvg once; so FedAvg plays twice as many rounds.
``[compare] equal = "updates"`` gives all of them the same rounds instead.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from gradalign.algorithms.plan import Combination
from gradalign.errors import GradalignError
from gradalign.recipes import Recipe, found, merge
from gradalign.recipes.build import TASKS, build_algorithm
from gradalign.recipes.names import keys_of, parts_of, plain_name
from gradalign.recipes.spec import AlgorithmSpec, Portion, Section, Spec, TaskSpec, checked, validate

_SHARES = {"client_share": "clients", "data_share": "data"}  # the task's settings that a scale makes use of
_BY_CLASS = ("one-class", "separate", "classes")  # partitions that give clients their classes
_COUNTS = {"rounds": ("rounds",), "per_round": ("clients", "per_round"), "batch": ("local", "batch_size")}


class ScaleSpec(Section):
    """How far a recipe is scaled down: shares of the rounds, the clients and each client's examples.

    The clients of a round follow the clients, and batches the examples, unless they have a share of their own.
    """

    all: Portion = 1.0
    rounds: Portion | None = None
    clients: Portion | None = None
    data: Portion | None = None
    per_round: Portion | None = None
    batch: Portion | None = None

    def of(self, what: Literal["rounds", "clients", "data", "per_round", "batch"]) -> float:
        """Return the share of one thing: its own, or that of all."""
        own: float | None = getattr(self, what)
        if own is None and what in ("per_round", "batch"):
            return self.of("clients" if what == "per_round" else "data")
        return self.all if own is None else own


def lay_settings(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables with the command line's settings over them.

    A count that is set there is meant as it stands: no scale shrinks it. Another task, or another number of clients a
    round, is not the problem that the paper's numbers are of. What a part's own table states has to be named there.
    """
    parts, changed = found(tables, "algorithm", "parts"), found(settings, "algorithm")
    if isinstance(parts, Mapping) and isinstance(changed, Mapping) and "name" not in changed:
        kinds = parts_of(str(found(tables, "algorithm", "name")))
        for key in changed.keys() - {"parts"}:
            saying = [part for part in parts if found(parts, part, key) is not None]
            if saying and {*map(plain_name, saying)} >= {name for name, kind in kinds.items() if key in keys_of(kind)}:
                here = f"algorithm.parts.{saying[0]}.{key}"
                raise GradalignError(f"--set algorithm.{key} says nothing beside the recipe's {here}: say --set {here}")
    merged = lay_over(tables, settings)
    exact = {name: 1.0 for name, path in _COUNTS.items() if found(settings, *path) is not None}
    if exact and merged.get("scale") is not None:
        merged["scale"] = _as_table(merged["scale"]) | exact
    return merged if _problem(merged) == _problem(tables) else _unlike_paper(merged)


def _problem(tables: Mapping[str, Any]) -> Any:
    task = found(tables, "task")
    own = {key: value for key, value in task.items() if key != "data_dir"} if isinstance(task, Mapping) else task
    return own, found(tables, "clients", "per_round")


def _unlike_paper(tables: dict[str, Any]) -> dict[str, Any]:
    return merge(tables, {"paper": {"applies": False}}) if isinstance(tables.get("paper"), Mapping) else tables


def apply_scale(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe's tables with its ``scale`` worked in, so that running the result needs no scale any more.

    ``scale`` is a share for everything, or a table of shares.
    """
    plain = {key: value for key, value in data.items() if key != "scale"}
    if data.get("scale") is None:
        return plain
    scale = _read_scale(data["scale"], source)
    full = checked(Spec, {key: plain[key] for key in ("rounds",) if key in plain}, source)
    shares = {key: scale.of(what) for key, what in _SHARES.items() if key in _taken(plain.get("task"))}  # type: ignore[arg-type]
    shares = {key: share for key, share in shares.items() if share < 1.0}
    changes: dict[str, Any] = {
        "rounds": max(1, round(scale.of("rounds") * full.rounds)),
        "full_size": {"rounds": full.rounds},
        "task": shares,
    }
    per_round, share = found(plain, "clients", "per_round"), scale.of("per_round")
    if isinstance(per_round, int) and share < 1.0 and "client_share" in shares:
        # Alignment is between clients: a round with one of them would have none.
        changes["clients"] = {"per_round": max(min(2, per_round), round(share * per_round))}
        changes["full_size"]["per_round"] = per_round
    # A step still sees the same share of a client, and curves keep their points.
    if "data_share" in shares:
        changes |= _shrink(plain, "local", ("batch_size", "gradient_examples"), scale.of("batch"))
    changes |= _shrink(plain, "measure", ("test_every", "train_every", "clients_every"), scale.of("rounds"))
    scaled = lay_over(plain, changes)
    return _unlike_paper(scaled) if shares else scaled


def unscaled(tables: Mapping[str, Any], source: str) -> Spec:
    """Return what tables describe before they are scaled."""
    return validate({key: value for key, value in tables.items() if key != "scale"}, source)


def _taken(task: Any) -> set[str]:
    """Return the shares that a task takes without becoming another problem; a user's own function may take both."""
    make = TASKS.get(str(found(task, "name") or TaskSpec().name))
    if make is None:
        return set(_SHARES)
    known = inspect.signature(make).parameters
    partition = found(task, "partition") or getattr(known.get("partition"), "default", None)
    return {key for key in _SHARES if key in known} - ({"client_share"} if partition in _BY_CLASS else set())


_WHEN = ("rounds", "round", "at_rounds", "share", "at_shares")  # a schedule's keys that say when


def _tables_in(tables: Mapping[str, Any], *path: str) -> list[tuple[str, ...]]:
    """Return where the schedules of a table are, and of the tables of its parts."""
    table = found(tables, *path)
    own = [key for key, value in table.items() if isinstance(value, Mapping)] if isinstance(table, Mapping) else []
    inner = _tables_in(tables, *path, "parts") if "parts" in own else []
    if path[-1] == "parts":
        return [place for key in own for place in _tables_in(tables, *path, key)]
    return [(*path, key) for key in own if key != "parts"] + inner


def lay_over(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's tables with changes over them; schedules in rounds follow a change of ``rounds``.

    A schedule that the changes place in time themselves stays as they say. One with a ``kind`` replaces what was there.
    """
    merged = merge(tables, changes)
    before_rounds, rounds = _rounds(tables), _rounds(merged)
    factor = Fraction(rounds, before_rounds) if rounds and before_rounds else Fraction(1)
    for path in [("local", "lr"), *_tables_in(merged, "algorithm")]:
        before, change, now = (found(data, *path) for data in (tables, changes, merged))
        if isinstance(change, Mapping) and "kind" in change:
            now = dict(change)
        elif isinstance(change, Mapping) and isinstance(before, Mapping) and any(key in change for key in _WHEN):
            now = {key: value for key, value in before.items() if key not in _WHEN} | dict(change)
        elif factor != 1 and isinstance(now, Mapping) and (change is None or isinstance(change, Mapping)):
            now = _stretched(now, factor, rounds)
        else:
            continue
        merged = replaced(merged, path, now)
    return merged


def replaced(data: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return tables with another value at the end of a path, whatever was there."""
    step, *rest = path
    return {**data, step: replaced(data[step], tuple(rest), value) if rest else value}


def _rounds(data: Mapping[str, Any]) -> int:
    """Return the number of rounds, or 0 for one that will be refused."""
    given = data.get("rounds", Spec.model_fields["rounds"].default)
    return given if type(given) is int and given > 0 else 0


def _stretched(schedule: Mapping[str, Any], factor: Fraction, rounds: int) -> dict[str, Any]:
    """Return a schedule that takes the same share of a run that is longer by a factor and now has so many rounds."""
    stretched = {key: value for key, value in schedule.items() if key not in ("rounds", "round", "at_rounds")}
    for key in ("rounds", "round"):
        if type(schedule.get(key)) is not int:
            continue
        moved = schedule[key] * factor
        stretched |= {key: int(moved)} if moved.denominator == 1 else {"share": float(moved / rounds)}
    steps = schedule.get("at_rounds")
    if isinstance(steps, Mapping):
        try:
            starts = {int(start) * factor: value for start, value in steps.items()}
        except ValueError:
            return dict(schedule)  # refused later, with a word on what is wrong
        if all(start.denominator == 1 for start in starts):
            stretched["at_rounds"] = {str(int(start)): value for start, value in starts.items()}
        else:
            stretched["at_shares"] = {str(float(start / rounds)): value for start, value in starts.items()}
    return stretched


def _shrink(data: Mapping[str, Any], table: str, keys: tuple[str, ...], share: float) -> dict[str, Any]:
    given = data.get(table)
    if share == 1.0 or not isinstance(given, Mapping):
        return {}
    counts = {key: given[key] for key in keys if type(given.get(key)) is int and given[key] > 0}
    return {table: {key: max(1, round(share * count)) for key, count in counts.items()}}


def _as_table(scale: Any) -> dict[str, Any]:
    return dict(scale) if isinstance(scale, Mapping) else {"all": scale}


def _read_scale(given: Any, source: str) -> ScaleSpec:
    shares = {key: float(share) if type(share) is int else share for key, share in _as_table(given).items()}
    try:
        return checked(ScaleSpec, shares, f"{source}: scale")
    except GradalignError as error:
        raise GradalignError(str(error).replace(": scale: all:", ": scale:")) from None


def describe_scale(spec: Spec) -> str | None:
    """Return in words at what scale a run is, None when it is the recipe's own; the task's facts tell the numbers."""
    full = spec.full_size
    if full is None:
        return None
    words = [f"{spec.rounds:,} of {full.rounds:,} rounds"] if spec.rounds < full.rounds else []
    if full.per_round is not None:
        words.append(f"{spec.clients.per_round} instead of {full.per_round} clients a round")
    shares = spec.task.options()
    for key, what in (("client_share", "the clients"), ("data_share", "each client's examples")):
        if key in shares:
            words.append(f"{100 * shares[key]:.4g} % of {what}")
    if "data_share" in shares and isinstance(spec.local.batch_size, int):
        words.append(f"batches of {spec.local.batch_size}")
    return ", ".join(words) or None


def at_equal_communication(recipe: Recipe, entry: str) -> dict[str, Any]:
    """Return an entry's tables with as many rounds as communicate as often as the recipe's own algorithm does.

    Rounds that the entry's own settings give are obeyed, unless the command line gives others.
    """
    tables, source = recipe.settings_of(entry), f"{recipe.source} ({entry})"
    given = "rounds" in recipe.stated_of(entry) and "rounds" not in recipe.changes
    if recipe.compare.equal == "updates" or given:
        return tables
    own = found(recipe.changes, "algorithm", "name") or found(recipe.data, "algorithm", "name") or AlgorithmSpec().name
    rounds, trips = _rounds_and_trips(tables, source)
    own_rounds, own_trips = _rounds_and_trips(recipe.settings_of(str(own)), recipe.source)
    fair = max(1, round(own_rounds * own_trips / trips))
    return tables if fair == rounds else lay_over(tables, {"rounds": fair})


def _rounds_and_trips(tables: Mapping[str, Any], source: str) -> tuple[int, Fraction]:
    """Return how many rounds there are before scaling, and how often one of them communicates on average."""
    spec = unscaled(tables, source)
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
