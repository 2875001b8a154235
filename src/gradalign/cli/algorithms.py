"""The command ``algorithms``: every algorithm and server rule, what it does and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument

from gradalign.cli.common import AsJson, plain, plain_errors, print_line, print_result

if TYPE_CHECKING:
    from gradalign.recipes.names import Kind

# Forms of one algorithm that cost something else than its usual one.
_FORMS: dict[str, list[dict[str, Any]]] = {
    "fedga": [{"mean": "fresh"}, {"mean": "kept"}],
    "scaffold": [{"control": "kept"}],
    "linearscaling": [{"aligned": False}],
}
# FedGA's docstring has the paper's formula, which is not the default form's.
_FORMULAS = {
    "running": "v_i = −β(s − g_i), s the running mean of earlier rounds",
    "fresh": "v_i = −β(ḡ − g_i), the paper's",
    "kept": "v_i = −β(s − k_i), k_i of the client's last visit",
}


def describe_algorithms(names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return what each algorithm and rule is: all that are known, or those of these names."""
    from gradalign.algorithms import known_algorithms
    from gradalign.algorithms.rules import known_rules
    from gradalign.recipes.names import kinds_of

    chosen = [kind for name in names for kind in kinds_of(name)]
    return [row for kind in chosen or (known_algorithms() | known_rules()).values() for row in _rows(kind)]


def _rows(kind: Kind) -> Iterator[dict[str, Any]]:
    from dataclasses import MISSING, fields

    from gradalign.algorithms.plan import Algorithm

    defaults = {field.name: field.default for field in fields(kind)}
    row: dict[str, Any] = {
        "name": kind.label,
        "class": kind.__name__,
        "description": " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split()),
        "settings": {name: None if default is MISSING else default for name, default in defaults.items()},
        "required": [name for name, default in defaults.items() if default is MISSING],
    }
    if not issubclass(kind, Algorithm):
        yield row | {"server_rule": True}
        return
    needed = dict.fromkeys(row["required"], 0.1)  # what an algorithm asks for is a strength
    for form in ({}, *_FORMS.get(kind.label, ())):
        try:
            one = kind(**needed, **form).over(10).at(9)  # what begins late has begun
        except Exception:  # somebody's own that asks for something else: what it costs is not known
            yield row
            return
        if not form:  # what a default of None stands for
            row["settings"] |= {name: value for name, value in one.values().items() if isinstance(value, str)}
        if kind.label == "fedga":
            row["description"] = f"{row['description'].partition(':')[0]}: {_FORMULAS[one.values()['mean']]}."
        phases = int(one.needs_gradients)
        yield row | {
            "form": form,
            "communications": 1 + phases,
            "extra_down": one.extra_down + phases,
            "extra_up": one.extra_up + phases,
            "kept_per_client": int(one.keeps),
        }


def algorithms(
    names: Annotated[
        list[str] | None, Argument(help="Only these; your own is package.module:Class. All when none is given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms and the server's rules: what they do, what they cost, their settings."""
    with plain_errors():
        found = describe_algorithms(names or ())
        print_result(as_json, {"algorithms": found}, _print, found)


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", style="bold", overflow="fold")
    table.add_column("what it does, and its settings with their defaults")
    for name in ("trips", "down", "up", "kept"):
        table.add_column(name, justify="right")
    for row in rows:
        form = " ".join(f"{key}={value}" for key, value in row.get("form", {}).items())
        costs = [row.get(key) for key in ("communications", "extra_down", "extra_up", "kept_per_client")]
        cells = ["" if cost is None else str(cost) for cost in costs]
        if form:
            formula = row["description"].partition(": ")[2] if row["name"] == "fedga" else ""
            table.add_row("", plain(f"with {form}: {formula}" if formula else f"with {form}"), *cells)
            continue
        settings = ", ".join(
            name if name in row["required"] else f"{name}={default!r}" for name, default in row["settings"].items()
        )
        made = f"[dim]{plain(row['class'])}({plain(settings)})[/dim]"
        table.add_row(plain(row["name"]), f"{plain(row['description'])}\n{made}", *cells)
    console.print(table)
    print_line(
        console,
        "trips: communications a round. down, up: vectors as long as the model that a client is sent beside x, and "
        "sends beside its update. kept: vectors remembered for each client. Server rules have no such numbers.",
    )
    print_line(console, 'Names join with "+". Your own: package.module:Class (docs/own-algorithm.md).')
