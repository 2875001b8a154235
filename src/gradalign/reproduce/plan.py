"""The list of experiments (experiments.toml), and each of them as a recipe for one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from gradalign.algorithms import known_algorithms
from gradalign.errors import GradalignError
from gradalign.recipes import Recipe, found, load_recipe, merge, read_recipe
from gradalign.recipes.build import build_algorithm
from gradalign.recipes.scale import lay_over, rounds_within
from gradalign.recipes.spec import Count, Section, Seeds, Spec, SweepSpec, Whole, checked
from gradalign.reproduce.verdicts import Claim
from gradalign.sweep.grid import PLACES, Point, apply_point

Scale = Literal["small", "medium", "paper"]
_POINTS = 60  # measurements of a run: enough that a tenth of it has several
_EVERY = ("test_every", "train_every")
SEARCH_SEED = 100  # settings are chosen with another seed, and so another division, than those reported


def _setting(name: str) -> str:
    if name not in PLACES:
        raise ValueError(f"must be one of {', '.join(PLACES)}")
    return name


SettingName = Annotated[str, AfterValidator(_setting)]


class Chosen(Section):
    """Settings of one algorithm, by the names that a sweep gives them, and where they come from."""

    values: dict[SettingName, float | int | str]
    source: str


class Tuning(Section):
    """How settings are chosen: how long a trial is, and what is tried for each algorithm.

    What an algorithm's lists leave out is the value chosen for ``base``, or the recipe's. Of an algorithm with β, the
    values of the one without are chosen on the way.
    """

    budget: Count
    lists: dict[str, SweepSpec]
    base: str = "fedavg"


class ScaledExperiment(Section):
    """An experiment at one scale.

    Attributes:
        budget: How long runs are, counted as the experiment's ``equal`` says.
        measured_as: Another length, whose measuring runs have: then runs of that one can go on to this.
        hours: About what all of it takes on one core, measured once, for the list.
    """

    budget: Count
    measured_as: Count | None = None
    seeds: Seeds = 3
    hours: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    tune: Tuning | None = None
    chosen: dict[str, Chosen] = Field(default_factory=dict)


class Experiment(Section):
    """One entry of the list; in the file, ``like`` names another whose algorithms, claims and lists it has.

    There, the scale small has medium's settings, and its lists to choose from, where it gives none.

    Attributes:
        algorithms: The entries in the order of their worth: each group is run with all seeds before the next.
        equal: What the entries' lengths have alike: "communication", or "rounds" or "steps" (of a client).
        papers_setting: Whether it is the paper's up to length and the size of the data: then the paper's numbers may
            stand beside the result.
        settings_from: Another experiment, whose chosen settings are taken over by algorithm.
        entries: Settings of single entries, as in a recipe's [compare.settings].
        train_points: How often training accuracy and drift are measured in a run.
        provenance: Where the settings come from: the paper's text, the authors' published settings, or our choice.
    """

    name: str
    title: str
    recipe: str
    algorithms: list[list[str]]
    equal: Literal["communication", "rounds", "steps"] = "communication"
    papers_setting: bool = False
    settings_from: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    train_points: Whole = 12
    entries: dict[str, dict[str, Any]] = Field(default_factory=dict)
    provenance: dict[str, str] = Field(default_factory=dict)
    claims: list[Claim] = Field(default_factory=list)
    scales: dict[Scale, ScaledExperiment]

    def at(self, scale: Scale) -> ScaledExperiment:
        """Return the experiment at a scale: what is not given there is the next smaller one's."""
        order: tuple[Scale, ...] = get_args(Scale)
        smaller = [one for one in order[: order.index(scale) + 1] if one in self.scales]
        if not smaller:
            raise GradalignError(f"{self.name} has no scale {scale}; it has {', '.join(self.scales)}")
        return self.scales[smaller[-1]]

    def entry_names(self) -> list[str]:
        return [entry for group in self.algorithms for entry in group]

    @property
    def baseline(self) -> str:
        """The entry that the others stand beside: FedAvg, or the one whose settings the others take, or the first."""
        bases = {"fedavg", *(one.tune.base for one in self.scales.values() if one.tune)}
        return next((entry for entry in self.entry_names() if entry in bases), self.entry_names()[0])

    def recipe_at(self, scale: Scale, chosen: Mapping[str, Point], budget: int | None = None) -> Recipe:
        """Return the recipe of all entries, with their chosen settings and lengths; ``budget`` is another length.

        An entry of which nothing is chosen has the values of the tuning's base, as far as it does not fix them itself.
        """
        own, base = self.at(scale), load_recipe(self.recipe)
        data = lay_over(base.data, merge(self.settings, own.settings)) | {"name": self.name}
        if not self.papers_setting:
            data["paper"] = None
        names = {*self.entry_names(), *base.compare.settings, *chosen, *([own.tune.base] if own.tune else [])}
        fixed, common = self.fixed(), chosen.get(own.tune.base, {}) if own.tune else {}
        for where, stated in {"settings": self.settings, f"scales.{scale}": own.settings, **fixed}.items():
            lengths_of = [found(stated, "rounds"), *(found(stated, "measure", key) for key in _EVERY)]
            if lengths_of != [None, None, None]:
                raise GradalignError(
                    f"{self.name}: {where} sets rounds, {_EVERY[0]} or {_EVERY[1]}, which the budget decides; "
                    "leave it out"
                )
        points = {name: chosen.get(name, left_free(fixed.get(name, {}), common)) for name in names}
        recipe = replace(base, data=data, compare=base.compare.model_copy(update={"settings": fixed}))
        given = {name: apply_point(fixed.get(name, {}), points[name], recipe.settings_of(name)) for name in names}
        recipe = replace(base, data=data, compare=base.compare.model_copy(update={"settings": given}))
        specs = {name: recipe.spec_for(name, 0) for name in names}
        lengths = (budget or own.budget, budget or own.measured_as or own.budget)
        given = {name: merge(given[name], self._length(spec, *lengths)) for name, spec in specs.items()}
        about: dict[str, Any] = {"algorithms": self.entry_names(), "seeds": own.seeds, "settings": given}
        return replace(recipe, compare=base.compare.model_copy(update=about))

    def fixed(self) -> dict[str, dict[str, Any]]:
        """Return what the recipe's comparison and the plan say of single entries, the plan having the last word."""
        theirs = load_recipe(self.recipe).compare.settings
        return {name: merge(theirs.get(name, {}), self.entries.get(name, {})) for name in {*theirs, *self.entries}}

    def _length(self, spec: Spec, budget: int, measured_as: int) -> dict[str, Any]:
        rounds, measured = self._rounds(spec, budget), self._rounds(spec, measured_as)
        train = max(1, measured // self.train_points) if self.train_points else 0
        return {"rounds": rounds, "measure": dict(zip(_EVERY, (max(1, measured // _POINTS), train), strict=True))}

    def _rounds(self, spec: Spec, budget: int) -> int:
        if self.equal == "communication":
            return rounds_within(budget, build_algorithm(spec.algorithm, spec.server))
        return max(1, budget // (spec.local.steps or 1)) if self.equal == "steps" else budget


def left_free(fixed: Mapping[str, Any], point: Point) -> Point:
    """Return the values of a point that an entry's own settings do not fix; K and epochs are one choice."""
    own = {name for name, place in PLACES.items() if found(fixed, *place) is not None}
    own |= {"K", "epochs"} if own & {"K", "epochs"} else set()
    return {name: value for name, value in point.items() if name not in own}


def read_plan(path: Path | None = None) -> list[Experiment]:
    """Return the experiments in the order of their worth; without a path, the list that comes with the package."""
    path = Path(__file__).with_name("experiments.toml") if path is None else path
    tables = read_recipe(path).get("experiment")
    if not isinstance(tables, list) or not tables:
        raise GradalignError(f"{path.name} has no [[experiment]]")
    found = [
        checked(Experiment, _with_small(_whole(table, tables, path.name)), f"{path.name}: experiment {n}")
        for n, table in enumerate(tables, start=1)
    ]
    names = [one.name for one in found]
    for one in found:
        if names.count(one.name) > 1:
            raise GradalignError(f'{path.name}: the experiment "{one.name}" is there twice')
        known = {*one.entry_names(), *(f"{other.name}/{entry}" for other in found for entry in other.entry_names())}
        sides = {side for claim in one.claims for side in (claim.first, claim.second) if isinstance(side, str)}
        # What has settings or lists may have been an entry once, and then it is an algorithm.
        strangers = ", ".join(sorted((sides - known) | (_with_settings(one) - {*known, *known_algorithms()})))
        if strangers or (one.settings_from is not None and one.settings_from not in names):
            raise GradalignError(
                f'{path.name}: {one.name} names "{strangers or one.settings_from}", which is not there'
            )
        for claim in one.claims:
            if claim.first.removeprefix(f"{one.name}/") == str(claim.second).removeprefix(f"{one.name}/"):
                raise GradalignError(f'{path.name}: {one.name}: "{claim.text}" compares an entry with itself')
        if one.settings_from == one.name:
            raise GradalignError(f"{path.name}: {one.name} takes settings from itself")
        if any(other.settings_from is not None for other in found if other.name == one.settings_from):
            raise GradalignError(f"{path.name}: {one.settings_from} has its own settings from another; name that one")
    return found


def _with_settings(one: Experiment) -> set[str]:
    tunes = [own.tune for own in one.scales.values() if own.tune is not None]
    chosen = {entry for own in one.scales.values() for entry in own.chosen}
    return {*one.entries, *chosen, *(entry for tune in tunes for entry in (*tune.lists, tune.base))}


def _whole(table: Any, tables: Sequence[Any], where: str) -> Any:
    """Return an experiment's table laid over that of the one it is ``like``, but for what belongs to its data alone."""
    if not isinstance(table, Mapping) or "like" not in table:
        return table
    own = {key: value for key, value in table.items() if key != "like"}
    model = next((one for one in tables if isinstance(one, Mapping) and one.get("name") == table["like"]), None)
    if model is None or "like" in model:
        raise GradalignError(f'{where}: like = "{table["like"]}" names no experiment that stands for itself')
    taken = {key: value for key, value in model.items() if key not in ("settings", "provenance")}
    scales = own.get("scales", taken.get("scales", {}))  # whose lists are for other data would not be known to be
    return merge(taken | {"scales": {name: taken.get("scales", {}).get(name, {}) for name in scales}}, own)


def _with_small(table: Any) -> Any:
    """Return an experiment's table whose small scale has medium's settings and lists where it has none of its own."""
    scales = table.get("scales") if isinstance(table, Mapping) else None
    if not isinstance(scales, Mapping) or not all(isinstance(scales.get(one), Mapping) for one in ("small", "medium")):
        return table
    small, medium = scales["small"], scales["medium"]
    taken = {"settings": medium.get("settings", {})} if "settings" not in small else {}
    tunes = small.get("tune"), medium.get("tune")
    if all(isinstance(one, Mapping) for one in tunes) and "lists" not in tunes[0]:
        taken["tune"] = {**tunes[1], **tunes[0]}
    return {**table, "scales": {**scales, "small": {**small, **taken}}}


def scale_of(name: str) -> Scale:
    """Return the scale of this name."""
    found: Scale | None = next((one for one in get_args(Scale) if one == name), None)
    if found is None:
        raise GradalignError(f'--scale must be {", ".join(get_args(Scale))}, got "{name}"')
    return found


def choose(experiments: Sequence[Experiment], names: Sequence[str]) -> list[Experiment]:
    """Return the named experiments in the list's order, all without a name."""
    known = [one.name for one in experiments]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise GradalignError(f'there is no experiment "{unknown[0]}"; known are {", ".join(known)}')
    return [one for one in experiments if not names or one.name in names]
