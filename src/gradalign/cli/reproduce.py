"""``gradalign reproduce``: the paper's experiments, and a verdict for each of its claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from gradalign.cli import common
from gradalign.cli.common import AsJson, DataDir, RecipeDevice
from gradalign.engines import under_torchrun
from gradalign.errors import FolderInUseError, GradalignError


def reproduce(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]…", help="Experiments of the list (default: all).")
    ] = None,
    scale: str = Option(
        "small", metavar="small|medium|paper", help="On two cores an evening, a day or two, some weeks."
    ),
    out: Path = Option(Path("reproduction"), help="Folder to write to; the same command goes on with what is there."),
    only: str | None = Option(None, help="Run only these entries of the experiments, e.g. fedga,fedavg."),
    seeds: int | None = Option(None, min=1, help="Run this many seeds of each experiment (default: as the list says)."),
    show_list: bool = Option(False, "--list", help="Show the list and what is left of it, and leave."),
    report_only: bool = Option(
        False, "--report", help="Run nothing: write the page and the verdicts of what has finished."
    ),
    retune: bool = Option(False, "--retune", help="Choose settings anew where the list or the folder has some."),
    plan: Path | None = Option(None, help="A list of your own, as TOML, instead of the paper's."),
    data_dir: DataDir = None,
    device: RecipeDevice = None,
    workers: int | None = Option(None, min=0, help="Worker processes (default: one per core; 0: none)."),
    checkpoint_seconds: float = Option(60.0, min=0, help="Keep a run's checkpoint at most this often."),
    as_json: AsJson = False,
) -> None:
    """Run the paper's experiments, seed by seed, and judge its claims.

    After any interruption the same command goes on, one with --retune without that word.
    """
    with common.plain_errors(f"the same command{' without --retune' * retune} goes on where this ended"):
        from gradalign.reproduce.conduct import Reproduction
        from gradalign.reproduce.outcome import verdict_table
        from gradalign.reproduce.plan import choose, read_plan, scale_of
        from gradalign.server.runner import RunOptions
        from gradalign.tasks.storage import using_data_folder

        if sum((show_list, report_only, retune)) > 1:
            raise GradalignError("--list, --report and --retune are three things to do; give one of them")
        if under_torchrun():
            raise GradalignError("reproduce runs in one process; start it without torchrun")
        every = read_plan(plan)
        chosen = choose(every, names or [])
        entries = [name.strip() for name in only.split(",")] if only is not None else []
        known = {entry for one in chosen for entry in one.entry_names()}
        if unknown := {*entries} - known:
            raise GradalignError(f'--only: "{min(unknown)}" is no entry; known are {", ".join(sorted(known))}')
        work = Reproduction(
            experiments=every,
            scale=scale_of(scale),
            folder=out,
            options=RunOptions(device=device or "cpu", workers=workers, checkpoint_seconds=checkpoint_seconds),
            say=common.say,
            seeds=seeds,
            device=device,
            retune=retune,
        )
        work.require_scale()
        if show_list:
            rows = [work.state(one, entries) for one in chosen if not entries or {*entries} & {*one.entry_names()}]
            common.print_result(as_json, rows, _print_list, rows)
            return
        with using_data_folder(data_dir):
            failed = []
            for one in chosen if not report_only else []:
                try:
                    work.run(one, entries)
                except FolderInUseError:
                    common.say(f"{one.name}: another process is at work on it; going on with the next")
                except (GradalignError, OSError) as error:
                    if len(chosen) == 1:
                        raise
                    failed.append(one.name)
                    common.say(f"{one.name}: {error}; going on with the next")
                work.results()
            results = work.results()
        for line in [*results["left_out"], *results["damaged"]]:
            common.say(line)
        if report_only and not results["experiments"]:
            raise GradalignError(f"{out} holds no finished run of the list; begin without --report")
        table = verdict_table([one for one in results["experiments"] if one["name"] in {own.name for own in chosen}])
        common.print_result(as_json, results, _print_verdicts, results["words"], table, results["report"])
        if failed:
            raise GradalignError(f"not carried out, for the reasons given above: {', '.join(failed)}")
        if damaged := len(results["damaged"]):
            raise GradalignError(f"damaged and not counted, named above: {damaged}; what is removed is made anew")


def _print_list(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        long = "" if row["core_hours"] is None else f"; in all about {row['core_hours']:g} hours of one core"
        choose = f"; settings to choose: {', '.join(row['settings_to_choose'])}" if row["settings_to_choose"] else ""
        _print_pair(console, row["name"], row["title"], f"{row['left']}{choose}{long}")
    runs, left, hours = (sum(row[key] or 0 for row in rows) for key in ("runs", "runs_left", "core_hours"))
    unknown = sum(row["core_hours"] is None for row in rows)
    without = f", not counting {unknown} of {len(rows)} experiments whose time is not known" if unknown else ""
    long = f"; the plan is about {hours:.3g} hours of one core{without}" if hours else ""
    console.print(f"in all: {left:,} of {runs:,} runs left{long}", soft_wrap=True)


def _print_verdicts(console: Console, words: str, table: list[list[str]], page: str | None) -> None:
    common.print_line(console, words)
    for name, text, at, numbers, verdict, why in table[1:]:
        _print_pair(console, name, text, f"{verdict}: {why}; {numbers}, at equal {at}")
    if page is not None:
        console.print(f"report: {common.plain(page)}", highlight=False, soft_wrap=True)


def _print_pair(console: Console, name: str, text: str, below: str) -> None:
    console.print(f"[bold]{common.plain(name)}[/]  {common.plain(text)}", highlight=False, soft_wrap=True)
    console.print(common.plain(f"    {below}"), highlight=False, soft_wrap=True)
