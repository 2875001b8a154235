"""The commands ``verify`` and ``diagnose``: they parse, call the library and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from gradalign.cli import common
from gradalign.cli.common import (
    AsJson,
    RecipeDevice,
    TableOptions,
    TaskSettings,
    TrustTask,
    plain,
    print_line,
    print_table,
)
from gradalign.errors import GradalignError

if TYPE_CHECKING:
    from gradalign.tasks.task import Task
    from gradalign.theory import Check
    from gradalign.theory.diagnose import Diagnosis

Seed = Annotated[int, Option(min=0, help="The seed of everything random.")]


def _task(name: str, seed: int, settings: Sequence[str] = ()) -> Task:
    from gradalign.recipes import parse_settings
    from gradalign.recipes.build import build_task

    return build_task(name, seed=seed, options=parse_settings(settings))


def _mark(check: Check, text: str) -> str:
    return f"[green]{text} pass[/green]" if check.passed else f"[bold red]{text} FAIL[/bold red]"


def _orders_table(checks: Sequence[Check]) -> Table:
    found = {(check.number, check.problem): check for check in checks if check.predicted is not None}
    problems = list(dict.fromkeys(problem for _, problem in found))
    table = Table(title="Slope of the remainder's norm, log-log", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "remainder", "in", "order"):
        table.add_column(name, overflow="fold")
    for problem in problems:
        table.add_column(plain(problem), justify="right", min_width=10)
    for number in dict.fromkeys(number for number, _ in found):
        row = [found.get((number, problem)) for problem in problems]
        first = next(check for check in row if check is not None)
        cells = ["–" if check is None else _mark(check, f"{check.measured:.3f}") for check in row]
        table.add_row(number, plain(first.claim), first.symbol, f"{first.predicted:g}", *cells)
    return table


def _limits_table(checks: Sequence[Check]) -> Table:
    table = Table(title="Claims with a bound", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "claim", "problem", "what"):
        table.add_column(name, overflow="fold")
    for name in ("at most", "measured"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in (check for check in checks if check.bound is not None):
        words = (plain(check.claim), plain(check.problem), plain(check.symbol))
        table.add_row(check.number, *words, f"{check.bound:.2g}", _mark(check, f"{check.measured:.2g}"))
    return table


def _print_checks(console: Console, checks: Sequence[Check]) -> None:
    print_table(console, _orders_table(checks))
    print_table(console, _limits_table(checks))
    noted = [check for check in checks if check.note]
    for note in dict.fromkeys(f"{'Finding, ' if c.finding else ''}{c.number}: {c.note}" for c in noted):
        print_line(console, note)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed" + (f", {failed} failed" if failed else ""))


def verify(
    as_json: AsJson = False,
    plot: Path | None = Option(None, help="Draw the slopes to this file (.png, .svg, .pdf)."),
    task: str | None = Option(None, help="Check on this task's first clients: a name, or package.module:function."),
    seed: Seed = 0,
) -> None:
    """Measure the paper's claims on this library's own code; exit code 1 when one of them fails."""
    with common.plain_errors():
        from gradalign.theory import verify as run_checks
        from gradalign.theory.check import plot_checks, require_plottable

        if plot is not None:
            require_plottable(plot)
        with Console(stderr=True).status("measuring, about half a minute"):
            checks = run_checks(task=None if task is None else _task(task, seed), seed=seed)
        if plot is not None:
            plot_checks(checks, plot)
        passed = all(check.passed for check in checks)
        told = {"passed": passed, "checks": [asdict(check) for check in checks]}
        common.print_result(as_json, told, _print_checks, checks)
    if not passed:
        raise typer.Exit(1)


def _print_diagnosis(console: Console, found: Diagnosis) -> None:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    def span(low: float | None, high: float | None) -> str:
        return f"from {number(low)} to {number(high)}"

    random = f"{found.splits} random splits of the same examples: mean {number(found.r_random)}, "
    random += span(found.r_random_low, found.r_random_high)
    least = " at most" if found.p_value is not None and found.p_value * (found.splits + 1) < 1.5 else ""
    search = f"{number(found.beta_low)} to {number(found.beta_high)}: ¼ to 1 times αK‖ḡ‖ / rms‖ḡ − g_i‖, "
    search += f"α = {found.lr:g}, K = {found.steps}"
    if found.beta_low is None:
        search = "none: the gradients, or their differences, are 0 up to rounding"
    relative = f"median {number(found.relative_median)}, {span(found.relative_min, found.relative_max)}"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in {
        "measured": f"{found.clients} clients, {found.examples:,} examples, at the model's first point",
        "‖ḡ − g_i‖ / ‖ḡ‖": f"{relative}; ‖ḡ‖ = {number(found.mean_norm)}",
        "r(x)": f"{number(found.r)}; {random if found.splits else 'no random split can be made'}",
        "p": f"{number(found.p_value)}{least}, the chance that random clients disagree as much",
        "cosine between clients": f"{number(found.between)}; after a random split {number(found.between_random)}",
        "cosine within clients": f"{number(found.within)}, between two halves of one client",
        "sampling noise": f"{number(found.chance)} of the disagreement, estimated from the halves",
        "β to search": search,
        "SCAFFOLD's β": f"{number(found.beta_scaffold)} = α(K−1)/2",
    }.items():
        table.add_row(name, text)
    console.print(f"[bold]{plain(found.task)}[/bold]")
    print_table(console, table)
    console.print()
    print_line(console, found.sentence)
    print_line(console, found.form)


def _subject(
    name: str | None, settings: Sequence[str], seed: int | None, table: TableOptions, *, trust_task: bool
) -> tuple[Task, dict[str, Any]]:
    """Return what is diagnosed, and what is known of how: its recipe's training, weights, device, and the seed.

    A setting without a section is one of the task's, of a recipe too.
    """
    from gradalign.algorithms.schedule import spanning, value_at
    from gradalign.recipes import shipped_recipes
    from gradalign.recipes.build import build_algorithm, build_local, task_of
    from gradalign.recipes.spec import Section, Spec

    if name is not None and name not in shipped_recipes() and Path(name).suffix != ".toml" and not Path(name).is_file():
        if table.task() is not None:
            raise GradalignError("a task and --csv both say what to diagnose; give one of them")
        return _task(name, seed or 0, settings), {"seed": seed or 0, "local": None, "device": "cpu"}
    words = [word.partition("=")[0].strip() for word in settings]
    tables = {name for name, field in Spec.model_fields.items() if isinstance(field.default, Section)}
    of_the_run = {"scale", *Spec.model_fields} - tables  # rounds=3; but clients=3 is about the task
    own = ["." not in word and word not in of_the_run for word in words]
    sections = [f"task.{setting}" if bare else setting for setting, bare in zip(settings, own, strict=True)]
    recipe = common.load(name, sections, seed, None, table, trust_task=trust_task)
    spec = recipe.spec()
    local = build_local(spec.local, build_algorithm(spec.algorithm, spec.server))
    lr = spanning(local.lr, spec.rounds)
    largest = max(value_at(lr, index) for index in range(spec.rounds))  # a schedule may begin with 0
    how = {"seed": spec.seed, "local": replace(local, lr=largest), "device": recipe.device}
    return task_of(spec), how | {"weights": spec.clients.weights}


@common.takes_table
def diagnose(
    subject: Annotated[
        str | None,
        Argument(metavar="[RECIPE]", help="A recipe file, a shipped recipe's or a task's name, or module:function."),
    ] = None,
    settings: TaskSettings = None,
    table: TableOptions = common.NO_TABLE,
    trust_task: TrustTask = False,
    as_json: AsJson = False,
    seed: int | None = Option(None, min=0, help="The seed of everything random (default: the recipe's, or 0)."),
    clients: int = Option(20, help="Measure at most this many clients."),
    examples: int | None = Option(None, help="Use at most this many examples of each client."),
    splits: int = Option(19, help="Random splits to compare with; each costs a pass over the examples."),
    lr: float | None = Option(None, help="α, the local learning rate (default: the recipe's, or 0.1)."),
    steps: int | None = Option(None, help="K, the local steps of a round (default: the recipe's, or 10)."),
    device: RecipeDevice = None,
) -> None:
    """Say before training whether the clients' gradients disagree more than by chance, and what to do about it.

    It says what aligning them costs, how to try it, and where to search β for who does not let it set itself.
    """
    with common.plain_errors():
        from gradalign.algorithms.schedule import value_at
        from gradalign.client.trainer import check_device
        from gradalign.theory.diagnose import diagnose as measure

        if device is not None:
            check_device(device)
        made, how = _subject(subject, settings or (), seed, table, trust_task=trust_task)
        how["device"] = check_device(device or how["device"])
        if how["local"] is not None:
            local = how["local"] if steps is None else replace(how["local"], steps=steps, epochs=None)
            steps, how["local"] = local.steps_for(len(made.client(0, how["seed"]))), local
            lr = value_at(local.lr, 0) if lr is None else lr
        found = measure(
            made,
            lr=0.1 if lr is None else lr,
            steps=10 if steps is None else steps,
            clients=clients,
            examples=examples,
            splits=splits,
            **how,
        )
        common.print_result(as_json, asdict(found), _print_diagnosis, found)
