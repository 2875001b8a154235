"""Recipes: experiments as TOML files, found, and with settings laid over them. The shipped ones lie here too.

Imports nothing heavy: what checks and builds a recipe is loaded when one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradalign.errors import GradalignError, need
from gradalign.runs.untrusted import LARGEST_TABLE, parse_toml

if TYPE_CHECKING:
    from gradalign.recipes.spec import CompareSpec, Section, Spec, SweepSpec
    from gradalign.recipes.tracking import TrackingSpec
    from gradalign.tracking import Tracker, Trackers

_Table = TypeVar("_Table", bound="Section")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as plain data, before an algorithm is chosen.

    ``source`` is what to call it in messages, ``data`` the file's tables without [compare] and [sweep], ``changes`` the
    command line's settings, which go over everything. ``tracking`` and ``device`` are where a run happens, and so are
    not in the spec.
    """

    source: str
    data: Mapping[str, Any]
    compare: CompareSpec
    sweep: SweepSpec
    changes: Mapping[str, Any]
    tracking: TrackingSpec
    device: str = "cpu"

    def trackers(self) -> Trackers:
        """Return the trackers that the recipe asks for; one whose package is not installed says so."""
        from gradalign.tracking import Trackers
        from gradalign.tracking.services import TensorBoard, WeightsAndBiases

        wanted: list[Tracker] = [TensorBoard()] if self.tracking.tensorboard else []
        if self.tracking.wandb is not None:
            wanted.append(WeightsAndBiases(**self.tracking.wandb.model_dump()))
        return Trackers(wanted)

    def spec(self) -> Spec:
        """Return the one experiment that ``gradalign run`` runs.

        When the command line chooses another algorithm, the file's parameters of its own one are left behind.
        """
        from gradalign.recipes.scale import lay_settings

        chosen = found(self.changes, "algorithm", "name")
        name = self.own_name if chosen is None else str(chosen)
        data = self._settled(self.data, name) if chosen is None else self._fitted(self.data, str(chosen), self.own_name)
        return _checked(lay_settings(data, self._settled(self.changes, name)), self.source)

    def spec_for(self, entry: str, seed: int) -> Spec:
        """Return the experiment of one entry of a comparison.

        An entry is an algorithm's name, or any name whose [compare.settings] say which algorithm it is. Of the recipe's
        own [algorithm] table it takes what its algorithm has, of [server] what was written for its rule.
        """
        return _checked(self.tables_for(entry), f"{self.source} ({entry})", seed=seed)

    def tables_for(self, entry: str) -> dict[str, Any]:
        """Return the tables of one entry of a comparison, with its fair share of rounds, before they are scaled."""
        from gradalign.recipes.scale import at_equal_communication

        return at_equal_communication(self, entry)

    def settings_of(self, entry: str) -> dict[str, Any]:
        """Return the tables of one entry of a comparison with the recipe's rounds, or its own settings'."""
        from gradalign.recipes.scale import lay_over, lay_settings

        settings = self.stated_of(entry)
        if not isinstance(settings.get("algorithm", {}), Mapping):
            raise GradalignError(f"{self.source}: compare.settings.{entry}.algorithm must be a table of settings")
        name = str(merge({"algorithm": {"name": entry}}, settings)["algorithm"]["name"])
        data = merge(self._fitted(self.data, name, self.own_name), {"algorithm": {"name": entry}})
        data = lay_settings(lay_over(data, self._settled(settings, name)), self.changes_for(entry, name))
        data["algorithm"]["name"] = name
        return data

    def stated_of(self, entry: str) -> Mapping[str, Any]:
        """Return an entry's own [compare.settings], however its name is spelled."""
        from gradalign.recipes.names import plain_name

        known = self.compare.settings
        alike = (own for name, own in known.items() if plain_name(name) == plain_name(entry))
        return known[entry] if entry in known else next(alike, {})

    def changes_for(self, entry: str, name: str) -> dict[str, Any]:
        """Return the command line's settings that are for an entry: a β is not for one that is defined by "auto"."""
        changes = self._fitted(self.changes, name, name)
        own = changes.get("algorithm")
        if isinstance(own, Mapping) and found(self.stated_of(entry), "algorithm", "beta") == "auto":
            changes["algorithm"] = {key: value for key, value in own.items() if key != "beta" or value == "auto"}
        return changes

    @property
    def own_name(self) -> str | None:
        """The name of the recipe's own algorithm, for whose rule its [server] is; None where it has none."""
        name = found(self.data, "algorithm", "name")
        return name if isinstance(name, str) else None

    def _fitted(self, tables: Mapping[str, Any], name: str, written_for: str | None) -> dict[str, Any]:
        """Return of tables what the named algorithm and its rule have; ``written_for`` is whose [server] it is."""
        from gradalign.recipes.names import fitting

        return self._settled(fitting(tables, name, written_for), name)

    def _settled(self, tables: Mapping[str, Any], name: str | None) -> dict[str, Any]:
        """Return tables with the named rule's ``[server.RULE]`` in [server], and no other's."""
        from gradalign.recipes.names import settle_server
        from gradalign.recipes.trust import is_outside

        entries = {entry: found(self.compare.settings, entry, "algorithm", "name") for entry in self.compare.algorithms}
        mentioned = [str(named or entry) for entry, named in entries.items()] + [self.own_name or ""]
        return settle_server(tables, name, filter(is_outside, mentioned))


def _checked(tables: Mapping[str, Any], source: str, **more: Any) -> Spec:
    from gradalign.recipes.build import require_known_keys
    from gradalign.recipes.scale import apply_scale
    from gradalign.recipes.spec import validate

    spec = validate(apply_scale(tables, source) | more, source)
    require_known_keys(spec, source)
    return spec


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe file as plain data."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_TABLE + 1)
        if len(raw) > LARGEST_TABLE:
            raise OSError(f"it has more than {LARGEST_TABLE:,} bytes")
        return parse_toml(raw)
    except FileNotFoundError:
        raise GradalignError(f"there is no recipe {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GradalignError(f"cannot read the recipe {path}: {error}") from None
    except ValueError as error:
        raise GradalignError(f"{path} is not valid TOML: {error}") from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return base with changes laid over it, table by table."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def found(data: Any, *path: str) -> Any:
    """Return what lies at the end of a path of keys; None where there is nothing, or no table on the way."""
    for step in path:
        data = data.get(step) if isinstance(data, Mapping) else None
    return data


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Turn ``section.key=value`` words into nested tables; values are TOML, bare words are strings."""
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = [step.strip() for step in key.split(".")]
        if not equals or not all(path) or len(path) > 20:
            raise GradalignError(f'--set takes section.key=value, got "{setting[:200]}"')
        try:
            value: Any = parse_toml(f"value = {text}")["value"]
        except ValueError:
            value = text.strip()
        for step in reversed(path):
            value = {step: value}
        changes = merge(changes, value)
    return changes


def load_recipe(
    name: str,
    settings: Iterable[str] = (),
    seed: int | None = None,
    task: str | Mapping[str, Any] | None = None,
    *,
    trust_task: bool = False,
) -> Recipe:
    """Read a recipe by file or by shipped name, with settings laid over it.

    Another ``task``, a name or a whole [task] table, takes the place of the recipe's own, whose settings and paper's
    numbers would not fit it. A recipe that lies in a run folder may name a task or an algorithm outside this package
    only with ``trust_task``.
    """
    need("pydantic", "recipes")
    from gradalign.recipes.spec import CompareSpec, SweepSpec
    from gradalign.recipes.trust import require_trust

    shipped = shipped_recipes()
    path = Path(name)
    if not path.is_file() and name in shipped:
        path = shipped[name]
    elif path.is_dir():
        raise GradalignError(f"{path} is a folder, not a recipe file")
    elif not path.is_file():
        raise GradalignError(f'there is no recipe file "{name}"; shipped recipes are: {", ".join(shipped)}')
    data = read_recipe(path)
    if isinstance(task, str):
        task = {"name": task}
    if task is not None:
        own_name = Path(task["path"]).stem if "path" in task else task["name"]
        data |= {"task": dict(task), "paper": None, "name": own_name}
    changes = parse_settings(settings)
    if seed is not None:
        changes["seed"] = seed
    if not trust_task:
        require_trust(path, data, changes, (task or {}).get("name"))
    _pin_files(data, changes)
    compare = _command_table(CompareSpec, "compare", data, changes, path.name)
    sweep = _command_table(SweepSpec, "sweep", data, changes, path.name)
    data.setdefault("name", path.stem)
    return Recipe(
        source=path.name,
        device=_take_device(data, changes, path.name),
        tracking=_take_tracking(data, changes, path.name),
        data=data,
        compare=compare,
        sweep=sweep,
        changes=changes,
    )


def _take_device(data: dict[str, Any], changes: dict[str, Any], source: str) -> str:
    given = [table.pop("device") for table in (data, changes) if "device" in table] or ["cpu"]
    if not isinstance(given[-1], str):
        raise GradalignError(f'{source}: device must be a word such as "cuda:0", got {given[-1]!r}')
    return given[-1]


def _pin_files(data: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put the digest of a table's file beside its path, so that a run does not go on with another file's rows."""
    if (found(changes, "task", "name") or found(data, "task", "name")) != "table":
        return
    from gradalign.tasks.columns import file_digest

    settings = found(data, "compare", "settings")
    for tables in (data, changes, *(settings.values() if isinstance(settings, Mapping) else ())):
        path = found(tables, "task", "path")
        if isinstance(path, str) and "sha256" not in tables["task"]:
            tables["task"]["sha256"] = file_digest(path)


def _command_table(kind: type[_Table], name: str, data: dict[str, Any], changes: dict[str, Any], source: str) -> _Table:
    """Take the table that belongs to one command out of a recipe and its changes, and check it."""
    from gradalign.recipes.spec import checked

    tables = data.pop(name, {}), changes.pop(name, {})
    if not all(isinstance(table, Mapping) for table in tables):
        raise GradalignError(f"{source}: {name}: must be a table of settings")
    return checked(kind, merge(*tables), f"{source}: {name}")


def _take_tracking(data: dict[str, Any], changes: dict[str, Any], source: str) -> TrackingSpec:
    from gradalign.recipes.spec import checked
    from gradalign.recipes.tracking import TrackingSpec

    names = list(TrackingSpec.model_fields)
    asked = {name: data.pop(name) for name in names if name in data}
    for name in [name for name in names if name in changes]:
        change = changes.pop(name)
        if not (change is True and isinstance(asked.get(name), Mapping)):  # "on" keeps the recipe's own table
            asked = merge(asked, {name: change})
    wandb = asked.get("wandb")
    if not isinstance(wandb, bool | Mapping | None):
        raise GradalignError(f"{source}: wandb must be true, false or a table of settings, got {wandb!r}")
    if isinstance(wandb, bool):
        asked["wandb"] = {} if wandb else None
    return checked(TrackingSpec, asked, source)
