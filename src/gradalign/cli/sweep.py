"""``gradalign sweep``: tuning by the paper's protocol, and the tables at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from gradalign.cli.common import AsJson, DataDir, Device, Settings, TrustTask, UserTask, plain, plain_errors, print_json
from gradalign.engines import under_torchrun
from gradalign.errors import GradalignError


def sweep(
    recipe: Annotated[str, Argument(help="A recipe file or a shipped recipe's name.")],
    algorithm: Annotated[
        str | None, Option(help="What to tune, e.g. fedga or fedprox (default: the recipe's).")
    ] = None,
    grid: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=V,V,…",
            help="Values to try, for lr, batch, K, epochs, weight_decay, beta, beta_fine, mu, …; may be repeated.",
        ),
    ] = None,
    sampler: Annotated[
        str, Option(metavar="grid|tpe", help="Every combination, or Optuna's TPE between the ends.")
    ] = "grid",
    trials: Annotated[int | None, Option(min=1, help="With tpe: trials in each large stage (default 40).")] = None,
    holdout: Annotated[
        float | None, Option(help="Share of each client's examples held out to validate on (0.1).")
    ] = None,
    stop_after: Annotated[float | None, Option(help="Share of the rounds after which poor trials end (0.2).")] = None,
    margin: Annotated[
        float | None, Option(help="Poor is below the best there by more than this share of it (0.2).")
    ] = None,
    finalists: Annotated[int | None, Option(min=1, help="How many of the best are tried with more seeds (3).")] = None,
    seeds: Annotated[int | None, Option(min=1, max=10_000, help="With how many seeds (3).")] = None,
    test_beta: Annotated[
        bool, Option("--test-beta", help="In the end, score every β of the search on the test set: the paper's figure.")
    ] = False,
    storage: Annotated[
        str | None, Option(metavar="URL", help="A database, for many machines (default: a journal in --out).")
    ] = None,
    study: Annotated[
        str | None, Option(help="The sweep's name in the storage (default: recipe and algorithm).")
    ] = None,
    settings: Settings = None,
    task: UserTask = None,
    trust_task: TrustTask = False,
    data_dir: DataDir = None,
    seed: Annotated[int | None, Option(min=0, help="The search's seed, and the first of more.")] = None,
    out: Annotated[Path | None, Option(help="Folder to write to; processes that share it share the work.")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Without --out: go on with the newest sweep of this name.")
    ] = False,
    device: Device = "cpu",
    workers: Annotated[
        int | None, Option(min=0, help="Worker processes of each trial (default: one per core).")
    ] = None,
    checkpoint_seconds: Annotated[float, Option(min=0, help="Keep a trial's checkpoint at most this often.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Tune lr, batch, K, weight decay and beta as the paper does; the test set is for the finalists only.

    The same command goes on after any interruption, and beside other processes.
    """
    with plain_errors("continue with the same command and --resume"):
        if under_torchrun():
            raise GradalignError("sweep divides trials among processes by itself; start it without torchrun")
        from gradalign.recipes import load_recipe
        from gradalign.runs import output_folder
        from gradalign.server.runner import RunOptions
        from gradalign.sweep.conduct import run_sweep
        from gradalign.sweep.grid import parse_grid
        from gradalign.sweep.plan import plan_sweep
        from gradalign.tasks.storage import using_data_folder

        loaded = load_recipe(recipe, settings or (), seed, task, trust_task=trust_task)
        options = RunOptions(
            device=device, workers=workers, checkpoint_seconds=checkpoint_seconds, trackers=loaded.trackers()
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
            show = sys.stderr.isatty()
            summary = run_sweep(plan, folder, options, storage=storage, study=study, show=show)
        if as_json:
            print_json(summary)
        else:
            print_sweep(Console(), summary, folder)


def print_sweep(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the stages, the finalists and where everything is."""
    from gradalign.runs import REPORT
    from gradalign.sweep.results import BEST, BETA, TABLE, VALUES

    accuracies = summary["score"] == "accuracy"
    console.print(_stages_table(summary, accuracies))
    console.print(_finalists_table(summary, accuracies))
    console.print(
        "chosen by validation on training data that was held out; tested after training on all training data; "
        "mean ± standard deviation over the seeds",
        soft_wrap=True,
    )
    if summary["scale"]:
        console.print(f"scale: {plain(summary['scale'])}", soft_wrap=True)
    places = {"best values": BEST, "all trials": TABLE, "accuracy over β": BETA, "accuracy over each value": VALUES}
    for what, file in (places | {"report": REPORT}).items():
        if (folder / file).exists():
            console.print(f"{what}: {plain(folder / file)}", soft_wrap=True)
    if not (folder / REPORT).exists():
        console.print("report: none here, because the finalists' runs lie in another process's folder", soft_wrap=True)


def _stages_table(summary: Mapping[str, Any], accuracies: bool) -> Table:
    from gradalign.sweep.grid import describe_point
    from gradalign.tracking.progress import score_words

    table = Table("stage", "algorithm", title=f"{plain(summary['name'])}: the stages")
    for name in ("trials", "ended early"):
        table.add_column(name, justify="right")
    table.add_column("best values", overflow="fold")
    table.add_column("score", justify="right")
    for stage in summary["stages"]:
        best, words = stage["best"], ("–", "–")
        if best is not None:
            varied = {name: best["values"][name] for name in stage["varied"]}
            words = (describe_point(varied or best["values"]), score_words(best["score"], accuracies=accuracies))
        early = str(stage["pruned"]) + (f" (+ {stage['diverged']} diverged)" if stage["diverged"] else "")
        table.add_row(*map(plain, (stage["name"], stage["algorithm"], stage["trials"], early, *words)))
    return table


def _finalists_table(summary: Mapping[str, Any], accuracies: bool) -> Table:
    from gradalign.cli.tables import seeds_words, spread_words
    from gradalign.sweep.grid import describe_point

    table = Table(title=f"the finalists, {seeds_words(summary)}")
    table.add_column("values", overflow="fold")
    what, unit, form, scale = ("accuracy", ", %", ".2f", 100.0) if accuracies else ("loss", "", ".4g", 1.0)
    for name in ("validation", "test"):
        table.add_column(f"{name} {what}{unit}", justify="right")
    for row in summary["finalists"]:
        values = plain(describe_point(row["values"]))
        validated, tested = (spread_words(row[f"{name}_{what}"], form, scale) for name in ("validation", "test"))
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        table.add_row(f"[bold]{values} (chosen)" if row["chosen"] else values, validated, tested + diverged)
    return table
