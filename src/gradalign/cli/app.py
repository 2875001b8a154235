"""The command line: parses, calls, prints. torch is imported by the commands, not by ``--help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from gradalign import __version__
from gradalign.cli import common, output_is_lost, theory
from gradalign.cli.algorithms import algorithms as list_algorithms
from gradalign.cli.common import NO_TABLE, AsJson, DataDir, RecipeDevice, Settings, TableOptions, TrustTask, UserTask
from gradalign.cli.data import data_app
from gradalign.cli.reproduce import reproduce
from gradalign.cli.sweep import sweep
from gradalign.engines import under_torchrun
from gradalign.errors import GradalignError

app = typer.Typer(
    help="Train PyTorch models so that the gradients of mini-batches, GPUs and federated clients agree.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Out = Annotated[Path | None, Option(help="Folder to write to (default: a new one under runs/).")]
Resume = Annotated[bool, Option("--resume", help="Continue what the folder holds, if anything; also to more rounds.")]
Workers = Annotated[
    int | None, Option(min=0, help="Worker processes (default: one per core; 0: none). Never changes results.")
]
Checkpoint = Annotated[float, Option(min=0, help="Keep a checkpoint at most this often; 0 after every round.")]


@app.callback(invoke_without_command=True)
def _before_all(
    version: bool = Option(False, "--version", help="Print the version and leave.", is_eager=True),
    debug: bool = Option(False, "--debug", help="Show the traceback of an error, too; may stand anywhere."),
) -> None:
    common.Shown.tracebacks = debug
    if version:
        print(f"gradalign {__version__}")
        raise typer.Exit


@app.command()
@common.takes_table
def run(
    recipe: Annotated[str | None, Argument(help="A recipe file, or the name of a shipped recipe: digits, …")] = None,
    settings: Settings = None,
    task: UserTask = None,
    table: TableOptions = NO_TABLE,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: int | None = Option(None, min=0, help="The seed of everything random."),
    out: Out = None,
    resume: Resume = False,
    engine: str | None = Option(
        None,
        metavar="ENGINE",
        help="Who does the clients' work: local, flower or distributed (the default under torchrun, else local). "
        "Results agree to rounding.",
    ),
    device: RecipeDevice = None,
    workers: Workers = None,
    checkpoint_seconds: Checkpoint = 10.0,
    as_json: AsJson = False,
) -> None:
    """Run one experiment."""
    with common.plain_errors():
        from gradalign.api import default_engine, run_spec
        from gradalign.cli.tables import print_summary
        from gradalign.runs import output_folder
        from gradalign.server.runner import RunOptions
        from gradalign.tasks.storage import using_data_folder

        loaded = common.load(recipe, settings, seed, task, table, trust_task=trust_task)
        spec = loaded.spec()
        folder = output_folder(out, f"{spec.name}-{spec.algorithm.name}-seed{spec.seed}", resume=resume)
        common.advise_resume(folder, resume=resume)
        options = RunOptions(
            engine=engine or default_engine(),
            device=device or loaded.device,
            workers=workers,
            out=folder,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            progress=True,
            trackers=loaded.trackers(),
        )
        with using_data_folder(data_dir):
            result = run_spec(spec, options)
        if result.folder is None:  # one of the ranks that worked for rank 0
            return
        told = result.summary | {"folder": str(folder)}
        common.print_result(as_json, told, print_summary, result.summary, folder)


@app.command()
@common.takes_table
def compare(
    recipe: str | None = Argument(None, help="A recipe file or a shipped recipe's name (default: digits)."),
    algorithms: str | None = Option(None, help="Comma-separated, e.g. fedga,fedavg."),
    seeds: int | None = Option(None, min=1, help="How many seeds each algorithm runs with."),
    settings: Settings = None,
    task: UserTask = None,
    table: TableOptions = NO_TABLE,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: int | None = Option(None, min=0, help="The first seed."),
    out: Out = None,
    resume: Resume = False,
    device: RecipeDevice = None,
    workers: Workers = None,
    checkpoint_seconds: Checkpoint = 10.0,
    as_json: AsJson = False,
) -> None:
    """Compare algorithms over several seeds: a table, summary.json and the curves as a picture."""
    with common.plain_errors():
        if under_torchrun():
            raise GradalignError("compare runs in one process; under torchrun, run each algorithm with gradalign run")
        from gradalign.cli.tables import print_comparison
        from gradalign.comparison import claimed_folder, plan_comparison, run_comparison, write_comparison
        from gradalign.report import report_gathered
        from gradalign.runs import REPORT, output_folder
        from gradalign.runs.read import gather
        from gradalign.server.runner import RunOptions
        from gradalign.tasks.storage import using_data_folder
        from gradalign.tracking.progress import rounds_bar

        loaded = common.load(recipe, settings, seed, task, table, trust_task=trust_task, default="digits")
        entries = loaded.compare.algorithms
        if algorithms is not None:
            entries = [name.strip() for name in algorithms.split(",")]
            if "" in entries:
                raise GradalignError(f'--algorithms takes names joined by commas, and one is empty in "{algorithms}"')
        folder = output_folder(out, f"compare-{loaded.changes.get('name', loaded.data['name'])}", resume=resume)
        common.advise_resume(folder, resume=resume)
        trackers = loaded.trackers()
        options = RunOptions(
            device=device or loaded.device,
            workers=workers,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            trackers=trackers,
        )
        with using_data_folder(data_dir):
            planned = plan_comparison(loaded, entries, seeds or loaded.compare.seeds, folder)
            rounds = sum(one.spec.rounds for one in planned)
            with claimed_folder(folder, planned, resume=resume):
                with rounds_bar(rounds) as tick:
                    run_comparison(planned, options, on_row=lambda one, row: tick(f"{one.entry}, seed {one.seed}", row))
                gathered = gather(one.folder for one in planned)
                summary = write_comparison(folder, planned, gathered, loaded.compare.curves)
                page = report_gathered(gathered, folder / REPORT)
        told = summary | {"folder": str(folder), "report": str(page)}
        common.print_result(as_json, told, print_comparison, summary, folder)
        failures = [f"{run.entry}, seed {run.seed}: {run.failure}" for run in gathered.runs if run.failure]
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise GradalignError(failures[0] + more)


@app.command()
def tasks(as_json: AsJson = False) -> None:
    """List what can be trained."""
    with common.plain_errors():
        from gradalign.cli.tables import describe_tasks, print_tasks
        from gradalign.recipes import shipped_recipes

        found, recipes = describe_tasks(), list(shipped_recipes())
        common.print_result(as_json, {"tasks": found, "recipes": recipes}, print_tasks, found, recipes)


@app.command()
def show(
    folder: Annotated[Path, Argument(help="A run folder, or a comparison's, or a sweep's.")], as_json: AsJson = False
) -> None:
    """Show a run's spec and summary, or a comparison's or a sweep's tables."""
    with common.plain_errors():
        from gradalign.cli.tables import load_shown, print_shown

        shown = load_shown(folder)
        common.print_result(as_json, shown, print_shown, shown, folder)


for command in (list_algorithms, reproduce, sweep, theory.verify, theory.diagnose):
    app.command()(command)
app.add_typer(data_app, name="data")


@app.command()
def report(
    folders: Annotated[list[Path], Argument(help="Run folders, comparisons, sweeps, or folders above them.")],
    output: Path = Option(Path("report.html"), "--output", "-o", help="The page to write; an old one is replaced."),
    figures: Path | None = Option(None, help="Also write the figures to this folder, as PDF and PNG for a paper."),
    title: str | None = Option(None, help="The page's title."),
    unfinished: bool = Option(False, "--unfinished", help="Show unfinished runs, too; they are in no mean."),
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page about runs: table, curves, settings, how to repeat them."""
    with common.plain_errors():
        from gradalign.report import report_gathered
        from gradalign.runs.read import gather

        gathered = gather(folders, unfinished=unfinished)
        for one in (told := list(gathered.skipped)):
            common.say(str(one))
        with Console(stderr=True).status("writing the report") as status:  # silent where it is no terminal

            def tell(file: Path) -> None:
                status.update(escape(f"writing {file.name}"))

            page = report_gathered(gathered, output, title=title, figures=figures, on_figure=tell)
        for one in gathered.skipped[len(told) :]:  # what only drawing brought to light
            common.say(str(one))
        if as_json:
            skipped = [{"folder": one.folder, "reason": one.reason} for one in gathered.skipped]
            found = {"report": str(page), "runs": len(gathered.runs), "skipped": skipped}
            common.print_json(found | ({"figures": str(figures)} if figures else {}))
        else:
            print(f"report: {page}")
            if figures is not None:
                print(f"figures: {figures}")


@app.command()
def watch(
    folder: Annotated[Path, Argument(help="A run's folder, a comparison's, a sweep's, or one with runs below.")],
    interval: float = Option(1.0, min=0.1, help="Seconds between looks."),
    once: bool = Option(False, "--once", help="Print one frame and leave, as without a terminal."),
    timeout: float | None = Option(None, min=0, help="Leave after so many seconds in which nobody wrote there."),
) -> None:
    """Show the curves of a run, or of a comparison's runs, while they grow; only ever reads."""
    with common.plain_errors("only the watching has ended"):
        from gradalign.watch import frame

        console = Console()
        if once or not console.is_terminal or console.is_dumb_terminal:
            frame.watch_once(folder, console)
        else:
            frame.watch(folder, console, interval=interval, timeout=timeout, output_is_lost=output_is_lost)
