"""Progress of long work, for people: bars on standard error, nothing when it is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gradalign.errors import shown_text

if TYPE_CHECKING:
    from gradalign.compare import Planned

Tick = Callable[[Mapping[str, Any]], None]


def make_progress() -> Progress:
    """Return the one look that all bars have."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _plain(label: str) -> str:
    return escape(shown_text(label))


def accuracy_note(row: Mapping[str, Any], before: str = "") -> str:
    """Return the newest measured number worth showing."""
    for scored_on in ("test", "validation"):
        if row.get(f"{scored_on}_accuracy") is not None:
            return f"{scored_on} accuracy {row[f'{scored_on}_accuracy']:.1%}"
        if row.get(f"{scored_on}_loss") is not None:
            return f"{scored_on} loss {row[f'{scored_on}_loss']:.4g}"
    return before


@contextmanager
def round_bar(label: str, rounds: int, *, show: bool) -> Iterator[Tick]:
    """Show one run's rounds; yields a function to call with each row."""
    if not show:
        yield lambda row: None
        return
    with make_progress() as progress:
        bar = progress.add_task(_plain(label), total=rounds, note="")
        note = ""

        def tick(row: Mapping[str, Any]) -> None:
            nonlocal note
            note = accuracy_note(row, note)
            progress.update(bar, completed=row["round"], note=note)

        yield tick


@contextmanager
def comparison_bar(planned: Sequence[Planned], *, show: bool) -> Iterator[Callable[[Planned, Mapping[str, Any]], None]]:
    """Show a comparison's rounds in one bar, naming the run at work; yields a function to call with each row."""
    if not show:
        yield lambda one, row: None
        return
    with make_progress() as progress:
        bar = progress.add_task("", total=sum(one.spec.rounds for one in planned), note="")
        done: dict[tuple[str, int], int] = {}
        note = ""

        def tick(one: Planned, row: Mapping[str, Any]) -> None:
            nonlocal note
            note = accuracy_note(row, note)
            done[one.entry, one.seed] = row["round"]
            label = _plain(f"{one.entry}, seed {one.seed}")
            progress.update(bar, completed=sum(done.values()), description=label, note=note)

        yield tick


class _DownloadBar:
    """What pooch reports a download to; drawn on the bar of ``make_progress``."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress, self._bar = progress, bar
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, size: int) -> None:
        self._total = size
        self._progress.update(self._bar, total=size or None)

    def update(self, count: int) -> None:
        self._progress.update(self._bar, advance=count)

    def reset(self) -> None:
        self._progress.update(self._bar, completed=0)

    def close(self) -> None:
        """The bar is closed with its context."""


@contextmanager
def download_bar(name: str) -> Iterator[_DownloadBar | bool]:
    """Show a download's progress in a terminal; elsewhere False, which tells pooch to show none."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        yield _DownloadBar(progress, progress.add_task(_plain(name), total=None))
