"""``gradalign watch``: a run's curves in the terminal, from another shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradalign.cli.common import plain_errors


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("watch")(watch_folder)


def watch_folder(
    folder: Annotated[Path, typer.Argument(help="A run's folder, a comparison's, a sweep's, or one with runs below.")],
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave, as without a terminal.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="Leave after so many seconds in which nobody wrote there."),
    ] = None,
) -> None:
    """Show the curves of a run, or of a comparison's runs, while they grow; only ever reads."""
    from gradalign.watch.frame import watch, watch_once

    with plain_errors("only the watching has ended"):
        console = Console()
        if once or not console.is_terminal or console.is_dumb_terminal:
            watch_once(folder, console)
        else:
            watch(folder, console, interval=interval, timeout=timeout)
