"""What the command line prints of a sweep: its stages, its finalists, and whether alignment helps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradalign.cli.common import plain, print_line, print_table
from gradalign.cli.tables import seeds_words
from gradalign.report.statistics import spread_words
from gradalign.runs import REPORT
from gradalign.sweep.grid import describe_point
from gradalign.sweep.protocol import Scoring
from gradalign.tracking.progress import score_words


def print_sweep(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the stages, the finalists and where everything is."""
    from gradalign.sweep.results import BEST, BETA, TABLE, VALUES

    print_table(console, _stages_table(summary))
    print_table(console, _finalists_table(summary))
    print_line(
        console,
        "chosen by validation on training data that was held out; tested after training on all training data; "
        "mean ± standard deviation over the seeds",
    )
    for entry, words in summary.get("at_ends", {}).items():
        print_line(console, f"{entry}: {', '.join(words)}; a better value may lie beyond")
    if summary.get("does_it_help"):
        print_table(console, _help_table(summary["does_it_help"]))
        print_line(console, summary["does_it_help"]["sentence"])
    if summary["scale"]:
        print_line(console, f"scale: {summary['scale']}")
    what = summary["score"]
    places = {"best values": BEST, "all trials": TABLE, f"{what} over β": BETA, f"{what} over each value": VALUES}
    for name, file in (places | {"report": REPORT}).items():
        if (folder / file).exists():
            print_line(console, f"{name}: {folder / file}")
    if not (folder / REPORT).exists():
        print_line(console, "report: none here, because the finalists' runs lie in another process's folder")


def _stages_table(summary: Mapping[str, Any]) -> Table:
    table = Table("stage", "algorithm", title=f"{plain(summary['name'])}: the stages")
    for name in ("trials", "ended early"):
        table.add_column(name, justify="right")
    table.add_column("best values", overflow="fold")
    table.add_column("score", justify="right")
    for stage in summary["stages"]:
        best, words = stage["best"], ("–", "–")
        if best is not None:
            varied = {name: best["values"][name] for name in stage["varied"]}
            shown = Scoring(summary["score"], summary.get("larger_is_better", summary["score"] == "accuracy"))
            score = score_words(shown.name, shown.shown(best["score"]))
            words = (describe_point(varied or best["values"]), score)
        early = str(stage["pruned"]) + (f" (+ {stage['diverged']} diverged)" if stage["diverged"] else "")
        table.add_row(*map(plain, (stage["name"], stage["algorithm"], stage["trials"], early, *words)))
    return table


def _finalists_table(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"the finalists, {seeds_words(summary)}")
    table.add_column("values", overflow="fold")
    what, unit, form, scale = summary["score"], "", ".4g", 1.0
    if summary["score"] == "accuracy":
        what, unit, form, scale = "accuracy", ", %", ".2f", 100.0
    for name in ("validation", "test"):
        table.add_column(f"{name} {what}{unit}", justify="right")
    for row in summary["finalists"]:
        values = plain(describe_point(row["values"]))
        validated, tested = (spread_words(row[f"{name}_{what}"], form, scale) for name in ("validation", "test"))
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        table.add_row(f"[bold]{values} (chosen)" if row["chosen"] else values, validated, tested + diverged)
    return table


def _help_table(found: Mapping[str, Any]) -> Table:
    what, form = f"test {found['what']}", ".2f" if found["what"] == "accuracy" else ".4g"
    table = Table(
        "algorithm", "values", title="does it help? both tuned, at as much communication", box=box.SIMPLE_HEAD
    )
    for name in ("communication rounds", "seeds", what + (", %" if form == ".2f" else "")):
        table.add_column(name, justify="right")
    for one in found["entries"]:
        diverged = f" ({one['diverged']} diverged)" if one["diverged"] else ""
        cells = (
            f"{one['communication_rounds']:,}",
            f"{one['seeds']}{diverged}",
            spread_words(one[f"test_{found['what']}"], form),
        )
        table.add_row(plain(one["algorithm"]), plain(describe_point(one["values"])), *cells)
    return table
