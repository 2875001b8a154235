"""What all commands share: options, recipes and tables, and how mistakes and interrupts are told."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typer import Option
from typer.core import TyperArgument

from gradalign import stopping
from gradalign.engines import rank, under_torchrun
from gradalign.errors import GradalignError, LostRankError, shown_text
from gradalign.runs import COMPARISON, SPEC, SWEEP

if TYPE_CHECKING:
    from gradalign.recipes import Recipe

P = ParamSpec("P")
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
TaskSettings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting of the task, e.g. partition=iid; may be repeated."),
]
UserTask = Annotated[
    str | None, Option(metavar="MODULE:FUNCTION", help="Train this task of your own instead of the recipe's.")
]
TrustTask = Annotated[
    bool, Option("--trust-task", help="Import the task that a recipe inside a run folder names: you know its code.")
]
DataDir = Annotated[Path | None, Option(help="Folder with the data sets (default: $GRADALIGN_DATA, or the cache).")]
RecipeDevice = Annotated[
    str | None,
    Option(metavar="cpu|cuda|cuda:N|mps", help="Where the model runs (default: the recipe's device, or cpu)."),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs.")]
_FILE = Option("--csv", "--parquet", metavar="FILE", help="Train on this table, CSV or Parquet; needs no recipe.")
_KIND = Option("--regression/--classes", help="With --csv: predict a number, or a class (default: by the values).")
_TABLE_OPTIONS: dict[str, Any] = {
    "csv": Annotated[Path | None, _FILE],
    "target": Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column to predict.")],
    "client": Annotated[str | None, Option(metavar="COLUMN", help="With --csv: the column that says who holds a row.")],
    "regression": Annotated[bool | None, _KIND],
}


class Shown:
    """How errors are shown: with --debug, by the whole traceback, too."""

    tracebacks = False


def _keep_help(made: TyperArgument, *, help: str | None = None, **given: Any) -> None:
    _make_argument(made, help=help, **given)
    made.help = help


# A click that knows of arguments' help itself takes it away again from those of a typer that does not pass it on.
_make_argument, TyperArgument.__init__ = TyperArgument.__init__, _keep_help  # type: ignore[method-assign,assignment]

_LONGEST_WORD = 24
_RESUME = "continue with the same command and --resume"
_EXTRAS = {"optuna": "sweep", "sqlalchemy": "sweep", "plotly": "report", "jinja2": "report", "scipy": "report"}
_EXTRAS |= {"matplotlib": "plots", "pydantic": "recipes", "tomli_w": "runs", "safetensors": "runs"}
_EXTRAS |= {"requests": "cli", "flwr": "flower"}


@contextmanager
def plain_errors(hint: str = "") -> Iterator[None]:
    """Turn the user's mistakes into one line and exit code 2, and interrupts into a word on how to go on."""
    stopping.advise(lambda: hint)
    try:
        yield
    except GradalignError as error:
        _show_traceback(error)
        go_on = f"; {_RESUME}" if isinstance(error, LostRankError) else ""
        # All ranks of a job meet the same mistakes: one of them speaks. Of rank 0's own end, rank 1 tells.
        if rank() == 0 or (rank() == 1 and isinstance(error, LostRankError)):
            say(f"error: {error}{go_on}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        _show_traceback(error)
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        install = f"pip install 'gradalign[{_EXTRAS[package]}]'"
        say(f"error: this command needs the package {package}; install it with: {install}")
        raise typer.Exit(2) from None
    except SystemExit as stop:
        say(f"error: the task's own code called sys.exit({'' if stop.code is None else repr(stop.code)})")
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stop:
        stopping.answer()
        terminated = isinstance(stop, stopping.Terminated)
        why = stopping.BY_TORCHRUN if under_torchrun() and terminated else ""
        if rank() == 0 or (rank() == 1 and why):  # it may be rank 0 that has ended
            say(stopping.last_words(why))
        raise typer.Exit(stopping.exit_code(stop)) from None
    except OSError as error:
        _show_traceback(error)
        say(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        raise typer.Exit(2) from None


def _show_traceback(error: Exception) -> None:
    if Shown.tracebacks:
        for line in "".join(traceback.format_exception(error)).splitlines():
            print(shown_text(line), file=sys.stderr)


def advise_resume(folder: Path, *, resume: bool) -> None:
    """Let interrupts advise --resume, but only once there is something of this command's in the folder to go on with.

    Before that, --resume would take up whatever lies there, or without --out the run before this one.
    """
    files = [folder / name for name in (SPEC, COMPARISON, SWEEP)]
    strange = not resume and any(map(os.path.lexists, files))
    stopping.advise(lambda: _RESUME if not strange and any(map(os.path.lexists, files)) else "")


@dataclass(frozen=True)
class TableOptions:
    """What was given of ``--csv``, ``--target`` and ``--client``: the user's own table in place of a recipe's task."""

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
        for name, hint in _TABLE_OPTIONS.items()
    ]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        command(table=TableOptions(**{name: given.pop(name) for name in _TABLE_OPTIONS}), **given)

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
        raise GradalignError("name a recipe, such as digits, or a table: --csv FILE --target COLUMN --client COLUMN")
    return load_recipe(name, settings or (), seed, own or task, trust_task=trust_task)


def say(text: str) -> None:
    """Print one line to standard error; names in it cannot command the terminal."""
    print(shown_text(" ".join(text.split())), file=sys.stderr, flush=True)


def plain(text: object) -> str:
    """Return text that rich prints as it stands, and that no terminal obeys: names may come from anybody's files."""
    return escape(shown_text(text))


def print_line(console: Console, text: object) -> None:
    """Print text that breaks between words only; a path stays whole however long it is."""
    for line in textwrap.wrap(shown_text(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(escape(line), soft_wrap=True, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table in which no word is broken, but for very long ones such as paths, as long as there is any room."""
    least: dict[int, int] = {}
    for number, column in enumerate(table.columns):
        sizes = [console.measure(Text.from_markup(str(text))) for text in (column.header, *column.cells)]
        column.max_width = max(size.maximum for size in sizes)
        longest = max(size.minimum for size in sizes)
        least[number] = column.max_width if column.no_wrap else min(longest, _LONGEST_WORD)
    endless = console.options.update(max_width=10_000)

    def slack(number: int) -> int:
        return (table.columns[number].max_width or 0) - least[number]

    # rich would narrow the widest column first, also below its longest word.
    while Measurement.get(console, endless, table).maximum > console.width and slack(max(least, key=slack)) > 0:
        widest = table.columns[max(least, key=slack)]
        widest.max_width = (widest.max_width or 0) - 1
    console.print(table)


def print_json(data: Any) -> None:
    """Print for programs; what a terminal could obey is written as JSON's escapes, and what is not finite as null."""
    text = json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str, allow_nan=False)
    print("".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text))


def print_result(
    as_json: bool, data: Any, show: Callable[Concatenate[Console, P], None], *shown: P.args, **options: P.kwargs
) -> None:
    """Print data for programs, or show people what ``show`` makes of the rest."""
    if as_json:
        print_json(data)
    else:
        show(Console(), *shown, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
