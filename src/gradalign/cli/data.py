"""``gradalign data``: what is there, getting it, and a picture of who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradalign.cli.common import AsJson, DataDir, plain_errors, print_json
from gradalign.errors import GradalignError

data_app = typer.Typer(help="List, get and look at data sets.", invoke_without_command=True, no_args_is_help=False)


def register(app: typer.Typer) -> None:
    """Add the ``data`` commands to the command line."""
    app.add_typer(data_app, name="data")


@contextmanager
def _in_folder(folder: Path | None) -> Iterator[None]:
    with plain_errors():
        from gradalign.tasks.folders import using_data_folder

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
        from gradalign.cli.data_tables import print_data
        from gradalign.tasks.datasets import DATA_SETS, describe_data
        from gradalign.tasks.folders import data_folder

        folder = data_folder()
        found = [describe_data(name) for name in DATA_SETS]
        if as_json:
            print_json({"folder": str(folder), "data": found})
        else:
            print_data(Console(), found, folder)


@data_app.command("get")
def get_data(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="emnist, cifar10 or cifar100.")],
    data_dir: DataDir = None,
) -> None:
    """Download a data set's original archive, check its published hash, and put its files into the data folder."""
    with _in_folder(data_dir or context.obj):
        from gradalign.cli.data_tables import print_data
        from gradalign.tasks.datasets import DATA_SETS, describe_data
        from gradalign.tasks.download import ARCHIVES, NO_ARCHIVE, fetch
        from gradalign.tasks.folders import data_folder
        from gradalign.tracking.progress import download_bar

        if name == "shakespeare":
            raise GradalignError(NO_ARCHIVE)
        if name not in ARCHIVES:
            raise GradalignError(f'there is no data set "{name}" to get; known are {", ".join(ARCHIVES)}')
        folder = data_folder()
        found = describe_data(name)
        if not found["here"]:
            with download_bar(name) as progress:
                fetch(ARCHIVES[name], folder, progress)
            DATA_SETS[name]()  # decode it now: a file that cannot be read says so here
            found = describe_data(name)
        print_data(Console(), [found], folder)


@data_app.command("show")
def show_data(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A task that divides labelled examples, such as emnist or digits.")],
    partition: Annotated[str | None, typer.Option("--partition", help="iid, one-class, separate, dirichlet, …")] = None,
    clients: Annotated[int | None, typer.Option("--clients", help="The number of clients.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the task; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed of the partition.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="The picture (default: NAME-PARTITION.png).")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show who holds what: a table, and a picture as PNG."""
    with _in_folder(data_dir or context.obj):
        from gradalign.cli.data_tables import print_class_counts
        from gradalign.recipes.build import TASKS, build_task
        from gradalign.recipes.spec import parse_settings
        from gradalign.report.class_pictures import draw_class_counts
        from gradalign.tasks.class_counts import class_counts_of

        options: dict[str, Any] = parse_settings(settings or ())
        options |= {key: value for key, value in (("partition", partition), ("clients", clients)) if value is not None}
        task = build_task(name, seed=seed, options=options)
        held = class_counts_of(task)
        words = partition or options.get("partition") or _default(TASKS.get(name), "partition")
        picture = out or Path(f"{name.replace(':', '-')}-{words}.png")
        draw_class_counts(picture, task, held)
        if as_json:
            print_json({"task": task.describe(), "counts": held.counts.tolist(), "picture": str(picture)})
        else:
            print_class_counts(Console(), task, held, picture)


def _default(make: Any, setting: str) -> str:
    import inspect

    parameter = inspect.signature(make).parameters.get(setting) if make else None
    return str(parameter.default) if parameter else "partition"
