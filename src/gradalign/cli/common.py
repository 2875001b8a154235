"""What all commands share: options, and how the user's mistakes and interrupts are told."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Option

from gradalign import stopping
from gradalign.engines import rank, under_torchrun
from gradalign.errors import GradalignError, LostRankError, shown_text
from gradalign.runs import COMPARISON, SPEC, SWEEP

Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
TaskSettings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="A setting of the task, e.g. partition=iid; may be repeated."),
]
UserTask = Annotated[
    str | None, Option(metavar="PACKAGE.MODULE:FUNCTION", help="Train this task instead of the recipe's own.")
]
TrustTask = Annotated[
    bool, Option("--trust-task", help="Import the task that a recipe inside a run folder names: you know its code.")
]
DataDir = Annotated[Path | None, Option(help="Folder with the data sets (default: $GRADALIGN_DATA, or the cache).")]
Device = Annotated[str, Option(metavar="cpu|cuda|cuda:N|mps", help="Where the model runs; no part of the spec.")]
RecipeDevice = Annotated[
    str | None,
    Option(metavar="cpu|cuda|cuda:N|mps", help="Where the model runs (default: the recipe's device, or cpu)."),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for programs.")]

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
        go_on = f"; {_RESUME}" if isinstance(error, LostRankError) else ""
        # All ranks of a job meet the same mistakes: one of them speaks. Of rank 0's own end, rank 1 tells.
        if rank() == 0 or (rank() == 1 and isinstance(error, LostRankError)):
            say(f"error: {error}{go_on}")
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
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
        why = " by torchrun, as when another rank has ended" if under_torchrun() and terminated else ""
        if rank() == 0:
            say(stopping.last_words(why))
        raise typer.Exit(stopping.exit_code(stop)) from None
    except OSError as error:
        say(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        raise typer.Exit(2) from None


def advise_resume(folder: Path) -> None:
    """Let interrupts advise --resume, but only once there is something in the folder to go on with.

    Before that, --resume without --out would take up the run before this one.
    """
    files = [folder / name for name in (SPEC, COMPARISON, SWEEP)]
    stopping.advise(lambda: _RESUME if any(map(os.path.lexists, files)) else "")


def say(text: str) -> None:
    """Print one line to standard error; names in it cannot command the terminal."""
    print(shown_text(" ".join(text.split())), file=sys.stderr, flush=True)


def plain(text: object) -> str:
    """Return text that rich prints as it stands, and that no terminal obeys: names may come from anybody's files."""
    return escape(shown_text(text))


def print_json(data: Any) -> None:
    """Print for programs; what a terminal could obey is written as JSON's escapes, and what is not finite as null."""
    text = json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str, allow_nan=False)
    print("".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
