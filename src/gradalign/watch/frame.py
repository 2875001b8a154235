"""``gradalign watch``: what run folders tell, as one frame of a terminal, again and again."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from gradalign.errors import GradalignError, shown_text
from gradalign.stopping import at_stake
from gradalign.watch import Followed, Watched
from gradalign.watch.textplot import Curve, plot

# Blue, orange, green, magenta, amber, teal and grey of the 256: of a brightness that both dark and light screens show.
COLOURS = tuple(f"color({number})" for number in (33, 166, 35, 170, 172, 37, 244))
_PANELS = (
    ("test_accuracy", "test accuracy"),
    ("test_loss", "test loss"),
    ("validation_accuracy", "validation accuracy"),
    ("validation_loss", "validation loss"),
    ("r", "r(x), variance of the gradients"),
    ("drift", "drift of the first client"),
    ("train_loss", "training loss"),
)
_STATES = {"running": "green", "complete": "bold green", "failed": "bold red", "stopped": "bold red"}
_RECENT = 20  # rounds from which the pace is told
_LOWEST = 7  # rows that a plot needs to be of use


def seconds_per_round(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return how long a round takes, from the latest ones."""
    recent = [row for row in rows[-_RECENT - 1 :] if row.get("seconds") is not None]
    if len(recent) < 2 or recent[-1]["seconds"] <= recent[0]["seconds"]:
        return None
    return float((recent[-1]["seconds"] - recent[0]["seconds"]) / (recent[-1]["round"] - recent[0]["round"]))


def seconds_left(runs: Sequence[Followed]) -> float | None:
    """Return how long the rest takes when runs go one after the other, each round as long as its algorithm's so far."""
    known = {run.entry: pace for run in runs if (pace := seconds_per_round(run.rows)) is not None}
    if not known:
        return None
    usual = sum(known.values()) / len(known)
    rounds = max(run.rounds for run in runs)
    going = [run for run in runs if run.state in ("starting", "running", "stopped", "planned")]
    return sum(known.get(run.entry, usual) * ((run.rounds or rounds) - run.round) for run in going)


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def _points(run: Followed, column: str) -> list[tuple[float, float]]:
    return [(row["round"], row[column]) for row in run.rows if row.get(column) is not None]


def _values(run: Followed, column: str) -> list[float]:
    return [value for _, value in _points(run, column)]


def _middle_cut(name: str, most: int) -> str:
    """Return a name in at most so many characters; its ends tell more than its middle."""
    return name if len(name) <= most else f"{name[: most // 3]}…{name[-(most - most // 3 - 1) :]}"


def _best(run: Followed) -> float:
    """Return the best accuracy of a run, on whatever it was measured; below all others when it was not."""
    return max([*_values(run, "test_accuracy"), *_values(run, "validation_accuracy")], default=-1.0)


def _numbers(run: Followed) -> str:
    words = []
    for kind, before in (("test", ""), ("validation", "validation ")):
        accuracies, losses = _values(run, f"{kind}_accuracy"), _values(run, f"{kind}_loss")
        if accuracies:
            words.append(f"{before}accuracy {accuracies[-1]:.2%} (best {max(accuracies):.2%})")
        if losses:
            words.append(f"{before}loss {losses[-1]:.4g}")
    words += [f"{name} {values[-1]:.3g}" for name in ("r", "drift") if (values := _values(run, name))]
    return ", ".join(words)


def _progress(run: Followed) -> str:
    if not run.rounds:
        return ""
    words = f"round {run.round} of {run.rounds}"
    pace = seconds_per_round(run.rows)
    if pace is not None and run.state in ("running", "starting"):
        words += f", {1 / pace:.3g} rounds/s" if pace < 1 else f", {pace:.3g} s a round"
    return words


@dataclass
class Frame:
    """One picture of what is watched, as large as the terminal."""

    watched: Watched
    full_height: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        height = (options.height or console.height - 1) if self.full_height else 30
        for line in self.lines(width, height, braille=not options.ascii_only)[:height]:
            if self.full_height:
                line.truncate(width)
            yield line

    def lines(self, width: int, height: int, *, braille: bool = True) -> list[Text]:
        """Return the frame's lines: a header, the plots, the legend with each run's numbers."""
        if not self.watched.runs:
            return [Text(shown_text(f"waiting for a run in {self.watched.folder} …"))]
        header = self._header(width)[: max(2, height // 3)]
        groups = dict.fromkeys(run.group for run in self.watched.runs)
        styles = dict(zip(groups, cycle(COLOURS), strict=False))
        room = max(2, 2 * (height - len(header)) // 5)  # the pictures are what one comes for
        legend = self._legend(styles, room, width, braille=braille)
        return header + self._plots(styles, width, height - len(header) - len(legend), braille) + legend

    def _header(self, width: int) -> list[Text]:
        watched, runs = self.watched, self.watched.runs
        title = Text(shown_text(str(watched.folder)), style="bold")
        words = []
        if watched.kind != "run":
            words.append(f"{sum(run.state == 'complete' for run in runs)} of {len(runs)} runs complete")
        # How many trials a sweep will have is not to be seen from here.
        known = runs if watched.kind != "sweep" else [run for run in runs if run.state == "running"]
        left = seconds_left(known) if watched.at_work else None
        if left is not None:
            words.append(f"about {duration(left)} left" + (" of the trials at work" if known is not runs else ""))
        title.append("".join(f"  {word}" for word in words), style="not bold")
        advice = watched.advice()
        notes = [f"nobody is writing here; {advice}"] if advice else []
        notes += [f"{run.label}: {run.reason}" for run in runs if run.reason][:3]
        notes = [shown_text(note) for note in notes]
        if self.full_height:  # elsewhere lines may be long, and a command is best copied whole
            notes = [line for note in notes for line in textwrap.wrap(note, width, break_on_hyphens=False)]
        return [title, *(Text(note, style="red") for note in notes)]

    def _legend(self, styles: dict[str, str], room: int, width: int, *, braille: bool) -> list[Text]:
        """Return a line for each run; when not all fit, those at work, then those in trouble, then the best."""
        runs = shown = self.watched.runs
        if len(runs) > room:
            first = ("running", "starting") + (() if self.watched.kind == "sweep" else ("failed", "stopped"))
            shown = sorted(runs, key=lambda run: (first.index(run.state) if run.state in first else 9, -_best(run)))
            shown = shown[: room - 1]
        names = [_middle_cut(run.label, max(12, 2 * width // 5)) for run in shown]
        name_width = max(len(name) for name in names)
        lines, alone = [], self.watched.kind == "run"
        ends_trials = self.watched.kind == "sweep" and (self.watched.at_work or self.watched.ended)
        for run, name in zip(shown, names, strict=True):
            line = Text("━━ " if braille else "-- ", style=styles[run.group])
            line.append(f"{name:<{name_width}}  ", style="default")
            early = run.state == "stopped" and ends_trials
            style = "dim" if early else _STATES.get(run.state, "dim")
            line.append("ended early" if early else run.state, style=style)
            words = [_progress(run)] if alone else [_progress(run), _numbers(run)]
            line.append("".join(f", {word}" for word in words if word), style="default")
            lines.append(line)
        if alone:  # there is room for a second line
            lines.append(Text(f"   {_numbers(runs[0])}"))
        if len(shown) < len(runs):
            lines.append(Text(f"… and {len(runs) - len(shown)} more", style="dim"))
        return lines

    def _plots(self, styles: dict[str, str], width: int, height: int, braille: bool) -> list[Text]:
        panels = [panel for panel in _PANELS if any(_values(run, panel[0]) for run in self.watched.runs)]
        panels = panels or [_PANELS[0]]
        columns = 2 if width >= 100 and len(panels) > 1 else 1
        panels = panels[: max(1, height // _LOWEST) * columns][: 4 if columns == 2 else 3]
        rows = -(-len(panels) // columns)
        across = width // columns - (columns - 1)
        drawn = [
            plot(
                f"{title}, by round",
                [Curve(_points(run, column), styles[run.group]) for run in self.watched.runs],
                width=across,
                height=max(height // rows, 4),
                x_end=max(run.rounds for run in self.watched.runs),
                log=not column.endswith("accuracy"),
                percent=column.endswith("accuracy"),
                braille=braille,
            )
            for column, title in panels
        ]
        beside = [zip(*drawn[start : start + columns], strict=True) for start in range(0, len(drawn), columns)]
        return [_beside(parts, across) for row in beside for parts in row]


def _beside(parts: Sequence[Text], width: int) -> Text:
    line = parts[0].copy()
    for part in parts[1:]:
        line.append(" " * max(0, width - line.cell_len) + "  ")
        line += part
    return line


def watch_once(folder: Path, console: Console) -> None:
    watched = Watched(folder)
    watched.poll()
    if not watched.runs:
        raise GradalignError(f"there is no run in {folder}")
    console.print(Frame(watched, full_height=console.is_terminal), soft_wrap=not console.is_terminal)


def watch(
    folder: Path, console: Console, *, interval: float, timeout: float | None, output_is_lost: Callable[[], bool]
) -> None:
    """Show frames until every run has ended or nobody reads them; raise at the end when one of the runs failed.

    Raise, too, when nobody has written to the folder for ``timeout`` seconds.
    """
    watched, since = Watched(folder), time.monotonic()
    watched.poll()
    try:
        with at_stake(), Live(Frame(watched), console=console, screen=True, auto_refresh=False) as live:
            while not watched.ended and not output_is_lost():
                live.refresh()
                if watched.at_work:
                    since = time.monotonic()
                elif timeout is not None and time.monotonic() - since >= timeout:
                    what = watched.advice() or f"there is no run in {folder}"
                    raise GradalignError(f"nobody has written to {folder} for {duration(timeout)}; {what}")
                time.sleep(interval)
                watched.poll()
    finally:
        console.print(Frame(watched))  # the screen of the live view is gone with it, the last picture stays
    if watched.failed:
        raise GradalignError(f"{watched.failed[0].label}: {watched.failed[0].reason}")
