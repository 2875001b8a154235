"""What a sweep shows while it runs, on standard error: a line for each stage, in a terminal a bar and the time left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradalign.tracking.progress import accuracy_note

_SPEED_SECONDS = 1800.0


class SweepBar:
    """Counts rounds over all stages. Trials that end early, or that others do, count whole: they need no more time."""

    def __init__(self, console: Console, progress: Progress | None, units: Mapping[str, int]) -> None:
        self._console, self._progress = console, progress
        self._units = dict(units)
        self._done: dict[str, int] = {}
        self._rounds, self._stage, self._trials = 1, "", 0
        self._settled, self._waiting = 0, 0
        self._bar: TaskID | None = None
        if progress is not None:
            self._bar = progress.add_task("sweep", total=sum(units.values()), note="")

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(escape(text), soft_wrap=True, highlight=False)

    def begin(self, stage: str, trials: int, rounds: int) -> None:
        """Start on a stage whose size is known now."""
        self._stage, self._rounds, self._trials = stage, rounds, trials
        self._units[stage] = trials * rounds

    def settled(self, trials: int, waiting: int) -> None:
        """Note how many of the stage's trials are done, by anyone, and how many run elsewhere."""
        self._settled, self._waiting = trials, waiting
        self._done[self._stage] = trials * self._rounds
        self._show(f"{waiting} at work elsewhere" if waiting else "")

    def row(self, row: Mapping[str, Any]) -> None:
        """Note a round of the trial at work."""
        self._show(accuracy_note(row), row["round"])

    def _show(self, note: str, rounds: int = 0) -> None:
        if self._progress is None or self._bar is None:
            return
        self._progress.update(
            self._bar,
            description=f"{self._stage} {self._settled}/{self._trials}",
            total=sum(self._units.values()),
            completed=sum(self._done.values()) + rounds,
            note=note,
        )


@contextmanager
def sweep_bar(sizes: Sequence[tuple[str, int, int]], *, show: bool) -> Iterator[SweepBar]:
    """Show a sweep's progress inside the block, given (stage, trials, rounds) as far as they are known."""
    units = {stage: trials * rounds for stage, trials, rounds in sizes}
    if not show:
        yield SweepBar(Console(stderr=True), None, units)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),  # with the time left, all of it fits in 80 columns
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    console = Console(stderr=True)
    # Trials that end early make the bar jump: the time left follows the speed of a long while.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=_SPEED_SECONDS) as progress:
        yield SweepBar(progress.console, progress, units)


def score_words(score: float, *, accuracies: bool) -> str:
    """Return a score in words: an accuracy, or the loss that it is minus of."""
    return f"accuracy {100 * score:.2f} %" if accuracies else f"loss {-score:.4g}"
