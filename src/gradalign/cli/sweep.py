"""``gradalign sweep``: tuning by the paper's protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradalign.cli.common import AsJson, DataDir, Device, Settings, TrustTask, UserTask, plain_errors, print_json


def register(app: typer.Typer) -> None:
    """Add the ``sweep`` command to the command line."""
    app.command()(sweep)


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe file or a shipped recipe's name.")],
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="What to tune, e.g. fedga or fedprox (default: the recipe's).")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=V,V,…",
            help="Values to try, for lr, batch, K, epochs, weight_decay, beta, beta_fine, mu, …; may be repeated.",
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="grid|tpe", help="Every combination, or Optuna's TPE between the ends.")
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="With tpe: trials in each large stage (default 40).")
    ] = None,
    holdout: Annotated[
        float | None, typer.Option("--holdout", help="Share of each client's examples held out to validate on (0.1).")
    ] = None,
    stop_after: Annotated[
        float | None, typer.Option("--stop-after", help="Share of the rounds after which poor trials end (0.2).")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--margin", help="Poor is below the best there by more than this share of it (0.2)."),
    ] = None,
    finalists: Annotated[
        int | None, typer.Option("--finalists", min=1, help="How many of the best are tried with more seeds (3).")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, max=10_000, help="With how many seeds (3).")] = None,
    test_beta: Annotated[
        bool,
        typer.Option(
            "--test-beta", help="In the end, score every β of the search on the test set: the paper's figure."
        ),
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", metavar="URL", help="An Optuna storage, for many machines (default: SQLite in --out)."
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", help="The sweep's name in the storage (default: recipe and algorithm).")
    ] = None,
    settings: Settings = None,
    task: UserTask = None,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The search's seed, and the first of more.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to; processes that share it share the work.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Without --out: go on with the newest sweep of this name.")
    ] = False,
    device: Device = "cpu",
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Worker processes of each trial (default: one per core).")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", min=0, help="Keep a trial's checkpoint at most this often.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Tune lr, batch, K, weight decay and beta as the paper does; the test set is for the finalists only.

    The same command goes on after any interruption, and beside other processes.
    """
    with plain_errors("continue with the same command and --resume"):
        from gradalign.engines.launch import under_torchrun
        from gradalign.errors import GradalignError

        if under_torchrun():
            raise GradalignError("sweep divides trials among processes by itself; start it without torchrun")
        from gradalign.api import RunOptions
        from gradalign.cli.sweep_tables import print_sweep
        from gradalign.recipes.recipe import load_recipe, output_folder
        from gradalign.sweep.grid import parse_grid
        from gradalign.sweep.plan import Choices, plan_sweep
        from gradalign.sweep.run import run_sweep
        from gradalign.tasks.folders import using_data_folder

        choices = Choices(
            sampler=sampler,
            trials=trials,
            holdout=holdout,
            stop_after=stop_after,
            margin=margin,
            finalists=finalists,
            seeds=seeds,
            test_beta=test_beta,
        )
        loaded = load_recipe(recipe, settings or (), seed, task, trust_task=trust_task)
        where = RunOptions(
            device=device, workers=workers, checkpoint_seconds=checkpoint_seconds, trackers=loaded.trackers()
        )
        with using_data_folder(data_dir):
            plan = plan_sweep(loaded, algorithm, parse_grid(grid or ()), choices)
            folder = output_folder(out, f"sweep-{plan.name}", resume=resume)
            show = sys.stderr.isatty()
            summary = run_sweep(plan, folder, where, storage=storage, study=study, show=show)
        if as_json:
            print_json(summary)
        else:
            print_sweep(Console(), summary, folder)
