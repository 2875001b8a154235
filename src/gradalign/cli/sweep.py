"""``gradalign sweep``: tuning by the paper's protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gradalign.cli import common
from gradalign.cli.common import NO_TABLE, AsJson, DataDir, RecipeDevice, Settings, TableOptions, TrustTask, UserTask
from gradalign.engines import under_torchrun
from gradalign.errors import GradalignError


@common.takes_table
def sweep(
    recipe: Annotated[str | None, Argument(help="A recipe file or a shipped recipe's name.")] = None,
    algorithm: str | None = Option(None, help="What to tune, e.g. fedga or fedprox (default: the recipe's)."),
    grid: list[str] | None = Option(
        None,
        metavar="NAME=V,V,…",
        help="Values to try of lr, batch, K, epochs, weight_decay, beta, beta_fine, beta_schedule, …; may be repeated.",
    ),
    sampler: str = Option("grid", metavar="grid|tpe", help="Every combination, or Optuna's TPE between the ends."),
    trials: int | None = Option(None, min=1, help="With tpe: trials in each large stage (default 40)."),
    holdout: float | None = Option(None, help="Share of each client's examples held out to validate on (0.1)."),
    stop_after: float | None = Option(None, help="Share of the rounds after which poor trials end (0.2)."),
    margin: float | None = Option(None, help="Poor is below the best there by more than this share of it (0.2)."),
    finalists: int | None = Option(None, min=1, help="How many of the best are tried with more seeds (3)."),
    seeds: int | None = Option(None, min=1, max=10_000, help="With how many seeds (3)."),
    test_beta: bool = Option(
        False, "--test-beta", help="In the end, score every β of the search on the test set: the paper's figure."
    ),
    storage: str | None = Option(
        None, metavar="URL", help="A database, for many machines (default: a journal in --out)."
    ),
    study: str | None = Option(None, help="The sweep's name in the storage (default: recipe and algorithm)."),
    settings: Settings = None,
    task: UserTask = None,
    table: TableOptions = NO_TABLE,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: int | None = Option(None, min=0, help="The search's seed, and the first of more."),
    out: Path | None = Option(None, help="Folder to write to; processes that share it share the work."),
    resume: bool = Option(False, "--resume", help="Without --out: go on with the newest sweep of this name."),
    device: RecipeDevice = None,
    workers: int | None = Option(None, min=0, help="Worker processes of each trial (default: one per core)."),
    checkpoint_seconds: float = Option(10.0, min=0, help="Keep a trial's checkpoint at most this often."),
    as_json: AsJson = False,
) -> None:
    """Tune lr, batch, K, weight decay and beta as the paper does; the test set is for the finalists only.

    The same command goes on after any interruption, and beside other processes.
    """
    with common.plain_errors():
        if under_torchrun():
            raise GradalignError("sweep divides trials among processes by itself; start it without torchrun")
        from gradalign.cli.sweep_tables import print_sweep
        from gradalign.runs import output_folder
        from gradalign.server.runner import RunOptions
        from gradalign.sweep.conduct import run_sweep
        from gradalign.sweep.grid import parse_grid
        from gradalign.sweep.plan import plan_sweep
        from gradalign.tasks.storage import using_data_folder

        loaded = common.load(recipe, settings, seed, task, table, trust_task=trust_task)
        options = RunOptions(
            device=device or loaded.device,
            workers=workers,
            checkpoint_seconds=checkpoint_seconds,
            trackers=loaded.trackers(),
        )
        with using_data_folder(data_dir):
            plan = plan_sweep(
                loaded,
                algorithm,
                parse_grid(grid or ()),
                sampler=sampler,
                trials=trials,
                test_beta=test_beta,
                holdout=holdout,
                stop_after=stop_after,
                margin=margin,
                finalists=finalists,
                seeds=seeds,
            )
            folder = output_folder(out, f"sweep-{plan.name}", resume=resume)
            common.advise_resume(folder, resume=True)  # as the same command does, unasked
            summary = run_sweep(plan, folder, options, storage=storage, study=study)
        common.print_result(as_json, summary, print_sweep, summary, folder)
