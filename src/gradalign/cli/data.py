"""``gradalign data``: what is there, getting it, and a table and a picture of the classes each client has."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from gradalign.cli import common
from gradalign.cli.common import AsJson, DataDir, TaskSettings, plain, print_line, print_table
from gradalign.errors import GradalignError

if TYPE_CHECKING:
    from gradalign.tasks.divide import ClassCounts
    from gradalign.tasks.task import Task

data_app = typer.Typer(help="List, get and look at data sets.", invoke_without_command=True, no_args_is_help=False)
_SHOWN_CLIENTS, _SHOWN_CLASSES = 12, 6


@contextmanager
def _in_folder(folder: Path | None) -> Iterator[None]:
    with common.plain_errors():
        from gradalign.tasks.storage import using_data_folder

        with using_data_folder(folder):
            yield


@data_app.callback()
def list_data(context: typer.Context, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the data sets: what is there, how much of it, and where."""
    if context.invoked_subcommand is not None:
        if data_dir is not None:
            context.obj = data_dir
        return
    with _in_folder(data_dir):
        from gradalign.tasks.datasets import DATA_SETS, describe_data
        from gradalign.tasks.storage import data_folder

        found = [describe_data(name) for name in DATA_SETS]
        common.print_result(as_json, {"folder": str(data_folder()), "data": found}, _print_data, found, data_folder())


@data_app.command("get")
def get_data(
    context: typer.Context,
    name: Annotated[str, Argument(help="emnist, cifar10 or cifar100.")],
    data_dir: DataDir = None,
) -> None:
    """Download a data set's original archive, check its published hash, and put its files into the data folder."""
    with _in_folder(data_dir or context.obj):
        from gradalign.tasks.datasets import DATA_SETS, describe_data
        from gradalign.tasks.storage import ARCHIVES, NO_ARCHIVE, data_folder, fetch
        from gradalign.tracking.progress import download_bar

        if name == "shakespeare":
            raise GradalignError(NO_ARCHIVE)
        if name not in ARCHIVES:
            raise GradalignError(f'there is no data set "{name}" to get; known are {", ".join(ARCHIVES)}')
        found = describe_data(name)
        if not found["here"]:
            with download_bar(name) as progress:
                fetch(ARCHIVES[name], data_folder(to_make=True), progress)
            DATA_SETS[name]()  # decode it now: a file that cannot be read says so here
            found = describe_data(name)
        _print_data(Console(), [found], data_folder())


@data_app.command("show")
def show_data(
    context: typer.Context,
    name: Annotated[str, Argument(help="A task that divides labelled examples, such as emnist or digits.")],
    partition: str | None = Option(None, help="iid, one-class, separate, dirichlet, …"),
    clients: int | None = Option(None, help="The number of clients."),
    settings: TaskSettings = None,
    seed: int = Option(0, min=0, help="The seed of the partition."),
    out: Path | None = Option(None, help="The picture (default: NAME-PARTITION.png)."),
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the classes each client has: a table, and a picture as PNG."""
    with _in_folder(data_dir or context.obj):
        from gradalign.recipes import parse_settings
        from gradalign.recipes.build import TASKS, build_task
        from gradalign.report.figures import draw_class_counts
        from gradalign.tasks.divide import class_counts_of

        options: dict[str, Any] = parse_settings(settings or ())
        options |= {key: value for key, value in (("partition", partition), ("clients", clients)) if value is not None}
        task = build_task(name, seed=seed, options=options)
        counted = class_counts_of(task)
        words = options.get("partition") or _default(TASKS.get(name), "partition")
        picture = out or Path(f"{name.replace(':', '-')}-{words}.png")
        draw_class_counts(picture, task, counted)
        told = {"task": task.describe(), "counts": counted.counts.tolist(), "picture": str(picture)}
        common.print_result(as_json, told, _print_class_counts, task, counted, picture)


def _default(make: Any, setting: str) -> str:
    parameter = inspect.signature(make).parameters.get(setting) if make else None
    return str(parameter.default) if parameter else setting


def _print_data(console: Console, found: Sequence[Mapping[str, Any]], folder: Path) -> None:
    table = Table("data set", "training", "test", "classes", title=plain(f"data folder: {folder}"), title_style="")
    table.add_column("where", overflow="fold")  # a path cut off with dots helps nobody
    for data in found:
        cells = ("–", "–", "–", "not here")
        if data["here"]:
            train, test = data["full"] or (None, None)
            users = f", {data['users']} clients" if data["users"] else ""
            cells = (
                _count(data["train_examples"], train),
                _count(data["test_examples"], test),
                f"{data['classes']}{users}",
                plain(str(data["where"]).removeprefix(f"{folder}{os.sep}")),
            )
        table.add_row(f"[bold]{data['name']}[/bold]", *cells)
    print_table(console, table)
    for why in (data["why"] for data in found if not data["here"]):
        print_line(console, why)


def _count(found: int, full: int | None) -> str:
    return f"{found:,}" if full is None or found == full else f"{found:,} of {full:,}"


def _print_class_counts(console: Console, task: Task, counted: ClassCounts, picture: Path) -> None:
    import numpy as np

    sizes, classes = counted.counts.sum(axis=1), (counted.counts > 0).sum(axis=1)
    table = Table("client", "examples", "classes", "holds most of")
    for client in range(min(len(sizes), _SHOWN_CLIENTS)):
        row = counted.counts[client]
        most = [label for label in np.argsort(-row, kind="stable")[:_SHOWN_CLASSES] if row[label]]
        words = ", ".join(f"{counted.names[label]}: {row[label]:,}" for label in most)
        more = ", …" if classes[client] > len(most) else ""
        table.add_row(str(client), f"{sizes[client]:,}", str(classes[client]), plain(words + more))
    if len(sizes) > _SHOWN_CLIENTS:
        table.add_row("…", "", "", f"and {len(sizes) - _SHOWN_CLIENTS:,} clients more")
    print_table(console, table)
    facts = ", ".join(str(fact) for fact in task.facts.values())
    print_line(console, f"{task.name}: {len(sizes):,} clients, {sizes.sum():,} training examples; {facts}")
    for what, values in (("examples", sizes), ("classes", classes)):
        spread = f"lowest {values.min():,}, median {int(np.median(values)):,}, highest {values.max():,}"
        print_line(console, f"{what} per client: {spread}")
    print_line(console, f"picture: {picture}")
