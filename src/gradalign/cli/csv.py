"""``--csv``, ``--target`` and ``--client``: the user's own table in place of a recipe's task."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradalign.errors import GradalignError

if TYPE_CHECKING:
    from gradalign.recipes import Recipe

_FILE = Option("--csv", "--parquet", metavar="FILE", help="Train on this table, CSV or Parquet; needs no recipe.")
_KIND = Option("--regression/--classes", help="With --csv: predict a number, or a class (default: by the values).")
_OPTIONS: dict[str, Any] = {
    "csv": Annotated[Path | None, _FILE],
    "target": Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column to predict.")],
    "client": Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column that says who holds a row.")],
    "regression": Annotated[bool | None, _KIND],
}
_INSTEAD = "a table: --csv FILE --target COLUMN --client COLUMN"


@dataclass(frozen=True)
class TableOptions:
    """What was given of the options."""

    csv: Path | None = None
    target: str | None = None
    client: str | None = None
    regression: bool | None = None

    def task(self) -> dict[str, Any] | None:
        """Return the [task] table that the options describe; None when they are not used."""
        columns = {"--target": self.target, "--client": self.client}
        if self.csv is None:
            given = [name for name, value in columns.items() if value is not None]
            given += [] if self.regression is None else ["--regression" if self.regression else "--classes"]
            if given:
                raise GradalignError(f"{given[0]} belongs to a table; name its file with --csv")
            return None
        missing = next((name for name, value in columns.items() if value is None), None)
        if missing:
            from gradalign.tasks.columns import read_table

            names = ", ".join(read_table(self.csv).names)
            raise GradalignError(f"--csv needs {missing} too, one of the columns of {self.csv}: {names}")
        kind = {} if self.regression is None else {"kind": "regression" if self.regression else "classes"}
        return {"name": "table", "path": str(self.csv), "target": self.target, "client": self.client, **kind}


NO_TABLE = TableOptions()


def takes_table(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that has an argument ``table`` the options that describe one."""
    known = inspect.signature(command, eval_str=True)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in _OPTIONS.items()
    ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        command(table=TableOptions(**{name: given.pop(name) for name in _OPTIONS}), **given)

    others = [parameter for name, parameter in known.parameters.items() if name != "table"]
    with_options.__signature__ = known.replace(parameters=[*others, *own])  # type: ignore[attr-defined]
    return with_options


def load(
    recipe: str | None,
    settings: Sequence[str] | None,
    seed: int | None,
    task: str | None,
    table: TableOptions,
    *,
    trust_task: bool,
    default: str | None = None,
) -> Recipe:
    """Read the recipe, or the one for tables where there is a table and no recipe."""
    from gradalign.recipes import load_recipe

    own = table.task()
    if own is not None and task is not None:
        raise GradalignError("--task and --csv both say what to train; give one of them")
    name = recipe or ("table" if own else default)
    if name is None:
        raise GradalignError(f"name a recipe, such as digits, or {_INSTEAD}")
    return load_recipe(name, settings or (), seed, own or task, trust_task=trust_task)


def task_and_options(task: str | None, table: TableOptions) -> tuple[str, dict[str, Any]]:
    """Return a task's name and options: the one that was named, or the table's."""
    own = table.task()
    if (task is None) == (own is None):
        raise GradalignError(f"name a task, such as digits, or {_INSTEAD}")
    own = own or {"name": task}
    return own.pop("name"), own
