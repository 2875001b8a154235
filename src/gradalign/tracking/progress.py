"""Progress of long work, for people, on standard error: bars in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradalign.errors import shown_text
from gradalign.tracking import accuracy_note

_SPEED_SECONDS = 1800.0
_LINE_SECONDS, _LINE_SHARE = 30.0, 0.05
_NAME, _NOTE = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")


def _plain(label: str) -> str:
    return escape(shown_text(label))


def score_words(name: str, shown: float) -> str:
    """Return a score in words: an accuracy in percent, or another metric."""
    return f"accuracy {shown:.2f} %" if name == "accuracy" else f"{name} {shown:.4g}"


class _Bar:
    """Rounds as a bar; for a pipe or a log, a line at every tenth of them, and after some time without one.

    That time is half a minute, and later a twentieth of what has passed: a log of hours stays one that is read.
    """

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress, self._task = progress, progress.add_task(_plain(name), total=total, note="")
        self._began = self._last = time.monotonic()
        self._tenths = 0

    def show(self, name: str, completed: int, total: int, note: str) -> None:
        if not self._progress.disable:
            self._progress.update(self._task, description=_plain(name), completed=completed, total=total, note=note)
            return
        now, tenths = time.monotonic(), 10 * completed // max(total, 1)
        silence = max(_LINE_SECONDS, _LINE_SHARE * (now - self._began))
        if completed and (tenths > self._tenths or now - self._last >= silence):
            self._last, self._tenths = now, max(tenths, self._tenths)
            words = f"{100 * completed // total} % ({completed:,} of {total:,} rounds) after {now - self._began:.0f} s"
            print(shown_text(": ".join(filter(None, (words, name, note)))), file=sys.stderr, flush=True)


@contextmanager
def rounds_bar(rounds: int, label: str = "") -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """Show the rounds of all runs in one bar; yields a function to call with a run's label and each of its rows."""
    columns = (_NAME, BarColumn(), MofNCompleteColumn(), _NOTE, TimeElapsedColumn(), TimeRemainingColumn())
    console, note = Console(stderr=True), ""
    done: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = _Bar(progress, label, rounds)

        def tick(label: str, row: Mapping[str, Any]) -> None:
            nonlocal note
            note = accuracy_note(row, note)
            done[label] = row["round"]
            bar.show(label, sum(done.values()), rounds, note)

        yield tick


class SweepBar:
    """Counts rounds over all stages. Trials that end early, or that others do, count whole: they need no more time."""

    def __init__(self, progress: Progress, units: Mapping[str, int]) -> None:
        self._console, self._bar = progress.console, _Bar(progress, "sweep", sum(units.values()))
        self._units = dict(units)
        self._done: dict[str, int] = {}
        self._stage, self._trials, self._rounds, self._settled = "", 0, 1, 0

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True, highlight=False)

    def begin(self, stage: str, trials: int, rounds: int) -> None:
        """Start on a stage whose size is known now."""
        self._stage, self._rounds, self._trials = stage, rounds, trials
        self._units[stage] = trials * rounds

    def settled(self, trials: int, waiting: int) -> None:
        """Note how many of the stage's trials are done, by anyone, and how many run elsewhere."""
        self._settled = trials
        self._done[self._stage] = trials * self._rounds
        self._show(f"{waiting} at work elsewhere" if waiting else "")

    def row(self, row: Mapping[str, Any]) -> None:
        self._show(accuracy_note(row), row["round"])

    def _show(self, note: str, rounds: int = 0) -> None:
        completed = sum(self._done.values()) + rounds
        self._bar.show(f"{self._stage} {self._settled}/{self._trials}", completed, sum(self._units.values()), note)


@contextmanager
def sweep_bar(sizes: Sequence[tuple[str, int, int]]) -> Iterator[SweepBar]:
    """Show a sweep's progress inside the block, given (stage, trials, rounds) as far as they are known."""
    narrow = BarColumn(bar_width=16)  # with the time left, all of it fits in 80 columns
    left = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"))
    columns = (_NAME, narrow, bars.TaskProgressColumn(), _NOTE, *left)
    console = Console(stderr=True)
    # Trials that end early make the bar jump: the time left follows the speed of a long while.
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=_SPEED_SECONDS,
    ) as progress:
        yield SweepBar(progress, {stage: trials * rounds for stage, trials, rounds in sizes})


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a download's progress in a terminal; yields what to call with the bytes received and all, elsewhere None."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(_NAME, BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn(), console=console) as progress:
        bar = progress.add_task(_plain(name), total=None)
        yield lambda received, total: progress.update(bar, completed=received, total=total or None)
