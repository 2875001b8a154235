"""``--csv``, ``--target`` and ``--client``: the user's own table in place of a recipe's task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gradalign.errors import GradalignError

if TYPE_CHECKING:
    from gradalign.recipes import Recipe

Csv = Annotated[
    Path | None,
    Option("--csv", "--parquet", metavar="FILE", help="Train on this table, CSV or Parquet; needs no recipe."),
]
Target = Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column to predict.")]
Client = Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column that says who holds a row.")]
Regression = Annotated[
    bool | None,
    Option("--regression/--classes", help="With --csv: predict a number, or a class (default: by its values)."),
]


def table_options(
    csv: Path | None, target: str | None, client: str | None, regression: bool | None
) -> dict[str, Any] | None:
    """Return the [task] table that the options describe; None when they are not used."""
    given = {"--target": target, "--client": client}
    if csv is None:
        others = [name for name, value in given.items() if value is not None]
        others += [] if regression is None else ["--regression" if regression else "--classes"]
        if others:
            raise GradalignError(f"{others[0]} belongs to a table; name its file with --csv")
        return None
    missing = next((name for name, value in given.items() if value is None), None)
    if missing:
        from gradalign.tasks.columns import read_table

        names = ", ".join(read_table(csv).names)
        raise GradalignError(f"--csv needs {missing} too, one of the columns of {csv}: {names}")
    kind = {} if regression is None else {"kind": "regression" if regression else "classes"}
    return {"name": "table", "path": str(csv), "target": target, "client": client, **kind}


def load(
    recipe: str | None,
    settings: Sequence[str] | None,
    seed: int | None,
    task: str | None,
    table: dict[str, Any] | None,
    *,
    trust_task: bool,
) -> Recipe:
    """Read the recipe, or the one for tables where there is a table and no recipe."""
    from gradalign.recipes import load_recipe

    if table is not None and task is not None:
        raise GradalignError("--task and --csv both say what to train; give one of them")
    if recipe is None and table is None:
        raise GradalignError("name a recipe, such as digits, or a table: --csv FILE --target COLUMN --client COLUMN")
    return load_recipe(recipe or "table", settings or (), seed, table or task, trust_task=trust_task)
