"""Finding recipes, laying settings over them, and choosing run folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gradalign.algorithms.rules import ServerRule
from gradalign.errors import GradalignError
from gradalign.recipes.build import SERVER_RULES, accepted_parameters, algorithm_names
from gradalign.recipes.scale import apply_scale, lay_over
from gradalign.recipes.spec import (
    AlgorithmSpec,
    CompareSpec,
    Section,
    ServerSpec,
    Spec,
    SweepSpec,
    explain,
    merge,
    parse_settings,
    read_recipe,
    validate,
)
from gradalign.recipes.tracking import TrackingSpec, make_trackers, take_tracking
from gradalign.recipes.trust import require_trust
from gradalign.runs import readable_name
from gradalign.tracking import Trackers

_Table = TypeVar("_Table", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as plain data, before an algorithm is chosen.

    Attributes:
        source: What to call it in messages.
        data: The file's tables without [compare] and [sweep].
        compare: The [compare] table.
        sweep: The [sweep] table.
        changes: The settings given on the command line, which go over everything.
        tracking: The ``tensorboard`` and ``wandb`` settings, which change no number and so are not in the spec.
    """

    source: str
    data: Mapping[str, Any]
    compare: CompareSpec
    sweep: SweepSpec
    changes: Mapping[str, Any]
    tracking: TrackingSpec = field(default_factory=TrackingSpec)

    def trackers(self) -> Trackers:
        """Return the trackers that the recipe asks for; one whose package is not installed says so."""
        return make_trackers(self.tracking)

    def spec(self) -> Spec:
        """Return the one experiment that ``gradalign run`` runs.

        When the command line chooses another algorithm, the file's parameters of its own one are left behind.
        """
        chosen = self.changes.get("algorithm")
        name = chosen.get("name") if isinstance(chosen, Mapping) else None
        data = self.data if name is None else _fitting(self.data, str(name))
        return validate(apply_scale(lay_over(data, self.changes), self.source), self.source)

    def spec_for(self, entry: str, seed: int) -> Spec:
        """Return the experiment of one entry of a comparison.

        An entry is an algorithm's name, or any name whose [compare.settings] say which algorithm it is. Of the recipe's
        own [algorithm] and [server] tables it takes what its algorithm has.
        """
        source = f"{self.source} ({entry})"
        return validate(apply_scale(self.tables_for(entry), source) | {"seed": seed}, source)

    def tables_for(self, entry: str) -> dict[str, Any]:
        """Return the tables of one entry of a comparison before they are scaled and checked."""
        settings = self.compare.settings.get(entry, {})
        if not isinstance(settings.get("algorithm", {}), Mapping):
            raise GradalignError(f"{self.source}: compare.settings.{entry}.algorithm must be a table of settings")
        name = merge({"algorithm": {"name": entry}}, settings)["algorithm"]["name"]
        data = merge(_fitting(self.data, name), {"algorithm": {"name": entry}})
        data = lay_over(lay_over(data, settings), _fitting(self.changes, name))
        data["algorithm"]["name"] = name
        return data


def unused_changes(recipe: Recipe, entries: Iterable[str]) -> list[str]:
    """Return the command line's [algorithm] and [server] settings that none of the entries can use."""
    unused = []
    for table in ("algorithm", "server"):
        given = recipe.changes.get(table, {})
        used: set[str] = {"name"}
        for entry in entries:
            used |= set(_fitting({table: given}, recipe.spec_for(entry, 0).algorithm.name)[table])
        unused += [f"{table}.{key}" for key in given if key not in used]
    return unused


def _fitting(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Leave out the known [algorithm] and [server] keys that the named algorithm does not have."""
    names = algorithm_names(str(name))
    rules = [SERVER_RULES[part] for part in names if part in SERVER_RULES] or [ServerRule]
    rule_keys = {field.name for kind in rules for field in fields(kind)}
    unfit = {
        "algorithm": set(AlgorithmSpec.model_fields) - accepted_parameters(name) - {"name"} - _own_tables(data, names),
        "server": set(ServerSpec.model_fields) - rule_keys,
    }
    return {
        table: {key: value for key, value in content.items() if key not in unfit[table]}
        if table in unfit and isinstance(content, Mapping)
        else content
        for table, content in data.items()
    }


def _own_tables(data: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return ``parts`` where all that has tables of its own there is among these names."""
    algorithm = data.get("algorithm")
    parts = algorithm.get("parts") if isinstance(algorithm, Mapping) else None
    return {"parts"} if isinstance(parts, Mapping) and set(parts) <= set(names) else set()


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    folder = Path(str(files("gradalign") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(
    name: str,
    settings: Iterable[str] = (),
    seed: int | None = None,
    task: str | None = None,
    *,
    trust_task: bool = False,
) -> Recipe:
    """Read a recipe by file or by shipped name, with settings laid over it.

    Another ``task`` takes the place of the recipe's own, whose settings and paper's numbers would not fit it. A recipe
    that lies in a run folder may name a task outside this package only with ``trust_task``.
    """
    shipped = shipped_recipes()
    path = Path(name)
    if not path.is_file() and name in shipped:
        path = shipped[name]
    elif path.is_dir():
        raise GradalignError(f"{path} is a folder, not a recipe file")
    elif not path.is_file():
        raise GradalignError(f'there is no recipe file "{name}"; shipped recipes are: {", ".join(shipped)}')
    data = dict(read_recipe(path))
    if task is not None:
        data |= {"task": {"name": task}, "paper": None, "name": task}
    changes = parse_settings(settings)
    if seed is not None:
        changes["seed"] = seed
    if not trust_task:
        require_trust(path, data, changes, task)
    compare = _command_table(CompareSpec, "compare", data, changes, path.name)
    sweep = _command_table(SweepSpec, "sweep", data, changes, path.name)
    data.setdefault("name", path.stem)
    tracking = take_tracking(data, changes, path.name)
    return Recipe(source=path.name, data=data, compare=compare, sweep=sweep, changes=changes, tracking=tracking)


def _command_table(kind: type[_Table], name: str, data: dict[str, Any], changes: dict[str, Any], source: str) -> _Table:
    """Take the table that belongs to one command out of a recipe and its changes, and check it."""
    tables = data.pop(name, {}), changes.pop(name, {})
    if not all(isinstance(table, Mapping) for table in tables):
        raise GradalignError(f"{source}: {name}: must be a table of settings")
    try:
        return kind.model_validate(merge(*tables))
    except ValidationError as error:
        raise explain(error, f"{source}: {name}", kind) from None


def output_folder(out: Path | None, name: str, *, resume: bool) -> Path:
    """Return where to write: what was asked for, or runs/NAME with a number where that is taken.

    With ``resume`` and no folder named, it is the newest of the numbered ones.
    """
    if out is not None:
        return out
    name = readable_name(name, "run")
    base = Path("runs") / name
    numbered = [base] + [base.with_name(f"{name}-{n}") for n in range(2, 10_000)]
    taken = next(i for i, path in enumerate(numbered) if not path.exists())
    return numbered[max(0, taken - 1)] if resume else numbered[taken]
