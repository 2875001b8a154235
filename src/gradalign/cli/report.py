"""``gradalign report``: a page about runs, to look at and to send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gradalign.cli.common import AsJson, plain_errors, print_json, say

Folders = Annotated[list[Path], typer.Argument(help="Run folders, comparisons, sweeps, or folders above them.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The page to write; an old one is replaced.")]
Figures = Annotated[
    Path | None, typer.Option("--figures", help="Also write the figures to this folder, as PDF and PNG for a paper.")
]


def register(app: typer.Typer) -> None:
    """Add ``report`` to the command line."""
    app.command()(report)


def report(
    folders: Folders,
    output: Output = Path("report.html"),
    figures: Figures = None,
    title: Annotated[str | None, typer.Option("--title", help="The page's title.")] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Show runs that have not finished, too; they are in no mean.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page about runs: table, curves, settings, how to repeat them."""
    with plain_errors():
        from gradalign.report import report_gathered
        from gradalign.runs.read import gather

        gathered = gather(folders, unfinished=unfinished)
        for one in (told := list(gathered.skipped)):
            say(str(one))
        console = Console(stderr=True)
        with console.status("writing the report") as status:  # silent where standard error is no terminal

            def tell(file: Path) -> None:
                status.update(escape(f"writing {file.name}"))

            page = report_gathered(gathered, output, title=title, figures=figures, on_figure=tell)
        for one in gathered.skipped[len(told) :]:  # what only drawing brought to light
            say(str(one))
        if as_json:
            skipped = [{"folder": one.folder, "reason": one.reason} for one in gathered.skipped]
            found = {"report": str(page), "runs": len(gathered.runs), "skipped": skipped}
            print_json(found | ({"figures": str(figures)} if figures else {}))
        else:
            print(f"report: {page}")
            if figures is not None:
                print(f"figures: {figures}")
