"""The command line: parses, calls, prints. torch is imported by the commands, not by ``--help``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradalign._version import __version__
from gradalign.cli import data as data_cli
from gradalign.cli import report as report_cli
from gradalign.cli import sweep as sweep_cli
from gradalign.cli import theory as theory_cli
from gradalign.cli import watch as watch_cli
from gradalign.cli.common import AsJson, DataDir, Device, Settings, TrustTask, UserTask, plain_errors, print_json
from gradalign.cli.entry import main
from gradalign.engines.launch import under_torchrun
from gradalign.errors import GradalignError

app = typer.Typer(
    help="Train PyTorch models so that the gradients of mini-batches, GPUs and federated clients agree.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The seed of everything random.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to (default: a new one under runs/).")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what the folder holds, if it holds anything.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Worker processes (default: one per core; 0: none). Never changes results."),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="local|flower|distributed",
        help="Who does the clients' work (default: distributed under torchrun, else local). Results agree to rounding.",
    ),
]
Checkpoint = Annotated[
    float,
    typer.Option("--checkpoint-seconds", min=0, help="Keep a checkpoint at most this often; 0 after every round."),
]


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"gradalign {__version__}")
        raise typer.Exit


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped recipe such as digits.")],
    settings: Settings = None,
    task: UserTask = None,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    engine: EngineName = None,
    device: Device = "cpu",
    workers: Workers = None,
    checkpoint_seconds: Checkpoint = 10.0,
    as_json: AsJson = False,
) -> None:
    """Run one experiment."""
    with plain_errors("continue with the same command and --resume"):
        from gradalign.api import RunOptions, default_engine, run_spec
        from gradalign.cli.tables import print_summary
        from gradalign.recipes.recipe import load_recipe, output_folder
        from gradalign.tasks.folders import using_data_folder

        loaded = load_recipe(recipe, settings or (), seed, task, trust_task=trust_task)
        spec = loaded.spec()
        name = f"{spec.name}-{spec.algorithm.name}-seed{spec.seed}"
        folder = output_folder(out, name, resume=resume)
        where = RunOptions(
            engine=engine or default_engine(),
            device=device,
            workers=workers,
            out=folder,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            trackers=loaded.trackers(),
        )
        with using_data_folder(data_dir):
            result = run_spec(spec, where)
        if result.folder is None:  # one of the ranks that worked for rank 0
            return
        if as_json:
            print_json(result.summary | {"folder": str(folder)})
        else:
            print_summary(Console(), result.summary, folder)


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe file or a shipped recipe's name.")] = "digits",
    algorithms: Annotated[
        str | None, typer.Option("--algorithms", help="Comma-separated, e.g. fedga,scaffold,fedga+fedprox.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="How many seeds each algorithm runs with.")
    ] = None,
    settings: Settings = None,
    task: UserTask = None,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The first seed.")] = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "cpu",
    workers: Workers = None,
    checkpoint_seconds: Checkpoint = 10.0,
    as_json: AsJson = False,
) -> None:
    """Compare algorithms over several seeds: a table, summary.json and the curves as a picture."""
    with plain_errors("continue with the same command and --resume"):
        if under_torchrun():
            raise GradalignError("compare runs in one process; under torchrun, run each algorithm with gradalign run")
        from gradalign.api import RunOptions
        from gradalign.cli.tables import print_comparison
        from gradalign.compare import claimed_folder, plan_comparison, run_comparison, write_comparison
        from gradalign.recipes.recipe import load_recipe, output_folder
        from gradalign.report import write_report
        from gradalign.runs import REPORT
        from gradalign.tasks.folders import using_data_folder
        from gradalign.tracking.progress import comparison_bar

        loaded = load_recipe(recipe, settings or (), seed, task, trust_task=trust_task)
        entries = loaded.compare.algorithms
        if algorithms is not None:
            entries = [name.strip() for name in algorithms.split(",")]
            if "" in entries:
                raise GradalignError(f'--algorithms takes names joined by commas, and one is empty in "{algorithms}"')
        name = f"compare-{loaded.changes.get('name', loaded.data['name'])}"
        folder = output_folder(out, name, resume=resume)
        where = RunOptions(
            device=device,
            workers=workers,
            resume=resume,
            checkpoint_seconds=checkpoint_seconds,
            trackers=loaded.trackers(),
        )
        with using_data_folder(data_dir):
            planned = plan_comparison(loaded, entries, seeds or loaded.compare.seeds, folder)
            with claimed_folder(folder, planned, resume=resume):
                with comparison_bar(planned, show=sys.stderr.isatty()) as on_row:
                    finished = run_comparison(planned, where, on_row=on_row)
                summary = write_comparison(folder, finished, loaded.compare.curves)
                page = write_report([folder], folder / REPORT)
        if as_json:
            print_json(summary | {"folder": str(folder), "report": str(page)})
        else:
            print_comparison(Console(), summary, folder)
        failures = [f"{run.planned.entry}, seed {run.planned.seed}: {run.failure}" for run in finished if run.failure]
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            raise GradalignError(failures[0] + more)


@app.command()
def tasks(as_json: AsJson = False) -> None:
    """List what can be trained."""
    with plain_errors():
        from gradalign.cli.tables import describe_tasks, print_tasks
        from gradalign.recipes.recipe import shipped_recipes

        found = describe_tasks()
        if as_json:
            print_json({"tasks": found, "recipes": list(shipped_recipes())})
        else:
            print_tasks(Console(), found, list(shipped_recipes()))


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a comparison's, or a sweep's.")],
    as_json: AsJson = False,
) -> None:
    """Show a run's spec and summary, or a comparison's or a sweep's tables."""
    with plain_errors():
        from gradalign.cli.tables import load_shown, print_shown

        shown = load_shown(folder)
        if as_json:
            print_json(shown)
        elif shown["kind"] == "sweep":
            from gradalign.cli.sweep_tables import print_shown_sweep

            print_shown_sweep(Console(), shown, folder)
        else:
            print_shown(Console(), shown, folder)


sweep_cli.register(app)
theory_cli.register(app)
data_cli.register(app)
report_cli.register(app)
watch_cli.register(app)


if __name__ == "__main__":
    main()
