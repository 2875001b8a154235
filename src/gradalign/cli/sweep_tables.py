"""What ``gradalign sweep`` prints at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradalign.cli.tables import plain, spread_words, summaries_explained
from gradalign.runs import REPORT
from gradalign.sweep.grid import describe_point
from gradalign.sweep.plot import BETA, VALUES
from gradalign.sweep.results import BEST, TABLE
from gradalign.tracking.sweep_progress import score_words


def print_sweep(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the stages, the finalists and where everything is."""
    stages = Table(title=f"{plain(summary['name'])}: the stages")
    for name, justify in (("stage", "left"), ("algorithm", "left"), ("trials", "right"), ("ended early", "right")):
        stages.add_column(name, justify=justify)  # type: ignore[arg-type]
    stages.add_column("best values", overflow="fold")
    stages.add_column("score", justify="right")
    accuracies = summary["score"] == "accuracy"
    for stage in summary["stages"]:
        best, words = stage["best"], ("–", "–")
        if best is not None:
            varied = {name: best["values"][name] for name in stage["varied"]}
            words = (describe_point(varied or best["values"]), score_words(best["score"], accuracies=accuracies))
        early = str(stage["pruned"]) + (f" (+ {stage['diverged']} diverged)" if stage["diverged"] else "")
        stages.add_row(
            plain(stage["name"]), plain(stage["algorithm"]), plain(stage["trials"]), plain(early), *map(plain, words)
        )
    console.print(stages)
    finalists = Table(title=f"the finalists, {len(summary['seeds'])} seed{'s' if len(summary['seeds']) > 1 else ''}")
    finalists.add_column("values", overflow="fold")
    what = "accuracy" if accuracies else "loss"
    for name in ("validation", "test"):
        finalists.add_column(f"{name} {what}" + (", %" if accuracies else ""), justify="right")
    for row in summary["finalists"]:
        scale, form = (100.0, ".2f") if accuracies else (1.0, ".4g")
        validated, tested = (spread_words(row[f"{name}_{what}"], form, scale) for name in ("validation", "test"))
        mark = "[bold]" if row["chosen"] else ""
        finalists.add_row(
            f"{mark}{plain(describe_point(row['values']))}" + (" (chosen)" if row["chosen"] else ""),
            validated,
            tested + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
        )
    console.print(finalists)
    console.print(
        "chosen by validation on training data that was held out; tested after training on all training data; "
        "mean ± standard deviation over the seeds",
        soft_wrap=True,
    )
    if summary["scale"]:
        console.print(f"scale: {plain(summary['scale'])}", soft_wrap=True)
    places = {"best values": BEST, "all trials": TABLE, "accuracy over β": BETA, "accuracy over each value": VALUES}
    for what, file in places.items():
        if (folder / file).exists():
            console.print(f"{what}: {plain(str(folder / file))}", soft_wrap=True)
    if (folder / REPORT).exists():
        console.print(f"report: {plain(str(folder / REPORT))}", soft_wrap=True)
    else:
        console.print("report: none here, because the finalists' runs lie in another process's folder", soft_wrap=True)


def print_shown_sweep(console: Console, shown: Mapping[str, Any], folder: Path) -> None:
    """Print what ``gradalign show`` found in a sweep's folder."""
    if not shown["complete"]:
        console.print("not complete: continue it with the command that began it", soft_wrap=True)
        return
    with summaries_explained(folder):
        print_sweep(console, shown["summary"], folder)
