"""A whole sweep: folder, storage, stages, results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage

from gradalign.api import RunOptions
from gradalign.errors import GradalignError
from gradalign.report import write_report
from gradalign.runs import METRICS, REPORT
from gradalign.sweep.conduct import FINALISTS, TEST, TEST_BETA, Found, SweepRunner
from gradalign.sweep.plan import DATABASE, SweepPlan, locked_in_turn, open_folder
from gradalign.sweep.results import TrialsFile, write_results
from gradalign.sweep.storage import check_sweep, open_storage, register_sweep, without_password
from gradalign.sweep.workers import working_in
from gradalign.tracking.sweep_progress import sweep_bar


def run_sweep(
    plan: SweepPlan, folder: Path, where: RunOptions, *, storage: str | None, study: str | None, show: bool
) -> dict[str, Any]:
    """Carry a sweep out, or what is left of it, and return its summary.

    Args:
        plan: What is swept.
        folder: Where everything goes; processes on one machine may share it.
        where: How trials are run.
        storage: An Optuna storage's URL; None keeps an SQLite file in the folder.
        study: The name under which the storage holds the sweep; None takes the plan's.
        show: Whether to show a progress bar.
    """
    study = study or plan.name
    opened = None
    if storage is not None:  # before the folder is made: a mistake leaves nothing behind
        opened = open_storage(storage)
        check_sweep(opened, study, plan.describe())
    open_folder(folder, plan, DATABASE if storage is None else without_password(storage), study)
    opened = opened or _own_database(folder)
    register_sweep(opened, study, plan.describe())
    trials = TrialsFile(folder, plan)
    try:
        with working_in(folder) as worker, sweep_bar(_sizes(plan), show=show) as bar:
            found = SweepRunner(plan, folder, opened, study, worker, where, bar, trials.write).run()
    except StorageInternalError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise GradalignError(f"the storage failed: {reason}; the same command goes on where this ended") from None
    summary = write_results(folder, plan, found)
    return summary | {"folder": str(folder), "report": _write_report(folder, found)}


def _own_database(folder: Path) -> RDBStorage:
    """Open the folder's SQLite file; one process at a time, as the first one makes its tables."""
    with locked_in_turn(folder / ".opening", 60.0):
        return open_storage(f"sqlite:///{(folder / DATABASE).resolve()}")


def _sizes(plan: SweepPlan) -> list[tuple[str, int, int]]:
    """Return (stage, trials, rounds) as far as they are known before the first trial."""
    sizes = [(name, trials, plan.spec(entry, {}).rounds) for name, entry, trials in plan.search.sizes()]
    rounds = plan.spec(plan.search.entry, {}).rounds
    finalists = min(plan.finalists, sum(trials for name, trials, _ in sizes if name != "baseline"))
    later = [(FINALISTS, finalists * (plan.seeds - 1), rounds)] if plan.seeds > 1 else []
    betas = sum(trials for name, trials, _ in sizes if name.startswith("beta-"))
    figure = [(TEST_BETA, betas, rounds)] if plan.test_beta else []
    return [*sizes, *later, (TEST, finalists * plan.seeds, rounds), *figure]


def _write_report(folder: Path, found: Found) -> str | None:
    """Write the report page of the finalists' test runs that lie in this folder; return where it is."""
    runs = [folder / one.facts["folder"] for one in found.tested if "folder" in one.facts]
    runs = [run for run in runs if (run / METRICS).exists()]
    if not runs:
        return None
    return str(write_report(runs, folder / REPORT))
