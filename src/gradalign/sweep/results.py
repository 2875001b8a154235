"""What a sweep leaves behind: the best values as a recipe, all trials as a table, a summary, pictures."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from gradalign.compare import spread
from gradalign.recipes import merge
from gradalign.recipes.scale import describe_scale
from gradalign.report.figures import COLOURS
from gradalign.runs import SUMMARY, write_atomically, write_json, write_toml, write_whole
from gradalign.server.measure import versions
from gradalign.sweep.grid import Point, apply_point, describe_point, ordered, shown
from gradalign.sweep.plan import SweepPlan, plain
from gradalign.sweep.protocol import FINALISTS, TEST, TEST_BETA, Found, Outcome, are_accuracies, best_of, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE, BEST, BETA, VALUES = "trials.csv", "best.toml", "beta.png", "values.png"
_FACTS = ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss", "rounds_done", "rounds", "seconds")


def trials_table(outcomes: Sequence[Outcome], lists: Iterable[str]) -> str:
    """Return all trials as CSV: stage, values, how each ended, what it reached, what it cost."""
    names = list(ordered(dict.fromkeys(lists, 0)))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["stage", "trial", "algorithm", "seed", *names, "state", *_FACTS, "folder", "worker"])
    for one in outcomes:
        values = [shown(one.point[name]) if name in one.point else "" for name in names]
        facts = ["" if one.facts.get(name) is None else one.facts[name] for name in (*_FACTS, "folder", "worker")]
        table.writerow([one.stage, one.facts.get("trial", ""), one.entry, one.seed, *values, one.state, *facts])
    return text.getvalue()


class TrialsFile:
    """trials.csv, written anew whenever something has changed."""

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self._path, self._lists, self._before = folder / TABLE, plan.search.lists, ""

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """Write all trials known so far."""
        text = trials_table(outcomes, self._lists)
        if text != self._before:
            write_whole(self._path, text)
            self._before = text


def finalists_table(found: Found) -> list[dict[str, Any]]:
    """Return what is known of each finalist; the chosen one has the best mean of validation scores over the seeds.

    The test set decides nothing: it is only reported. A finalist whose validation diverged with any seed is not
    chosen, unless all did.
    """
    rows: list[dict[str, Any]] = []
    ranks: list[tuple[bool, float]] = []
    accuracies = are_accuracies(found.tuned)
    for first in found.finalists:
        runs = [one for one in found.tested if one.point == first.point]
        again = [one for one in found.validated if one.point == first.point]
        scores = [one.score for one in (first, *again) if one.score is not None]
        rows.append(
            {
                "values": first.point,
                "validation_accuracy" if accuracies else "validation_loss": spread(
                    [score if accuracies else -score for score in scores]
                ),
                "test_accuracy": spread(_known(runs, "test_accuracy")),
                "test_loss": spread(_known(runs, "test_loss")),
                "diverged": sum(one.state == "diverged" for one in (*again, *runs)),
                "folders": [one.facts["folder"] for one in (first, *again, *runs) if "folder" in one.facts],
            }
        )
        ranks.append((len(scores) == 1 + len(again), statistics.fmean(scores)))
    best = ranks.index(max(ranks))
    return [row | {"chosen": place == best} for place, row in enumerate(rows)]


def _known(outcomes: Sequence[Outcome], name: str) -> list[float]:
    values = [one.facts.get(name) for one in outcomes if one.state == "complete"]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def summarise_sweep(plan: SweepPlan, found: Found) -> dict[str, Any]:
    """Return what summary.json says."""
    stages: dict[str, list[Outcome]] = {}
    for one in found.all():
        stages.setdefault(one.stage, []).append(one)
    finalists = finalists_table(found)
    spec = plan.spec(plan.search.entry, {})
    baseline = best_of(found.baseline, "the baseline") if found.baseline else None
    return {
        "kind": "sweep",
        "score": "accuracy" if are_accuracies(found.tuned) else "loss",
        "scale": describe_scale(spec.full_size, spec) if spec.full_size else None,
        **{key: value for key, value in plan.describe().items() if key != "recipes"},
        "baseline": plan.search.baseline,
        "seeds": list(range(plan.seed, plan.seed + plan.seeds)),
        "stages": [_stage_row(name, outcomes) for name, outcomes in stages.items()],
        "finalists": finalists,
        "best": next(row["values"] for row in finalists if row["chosen"]),
        "baseline_best": {"values": baseline.point, "validation_score": baseline.score} if baseline else None,
        "versions": versions(),
    }


def _stage_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    complete = [one for one in outcomes if one.score is not None and name not in (FINALISTS, TEST, TEST_BETA)]
    best = max(complete, key=rank) if complete else None
    return {
        "name": name,
        "algorithm": outcomes[0].entry,
        "trials": len(outcomes),
        **{state: sum(one.state == state for one in outcomes) for state in ("complete", "pruned", "diverged")},
        "varied": list(ordered({key: 0 for one in outcomes for key in one.point if _varies(key, outcomes)})),
        "seconds": round(sum(float(one.facts.get("seconds") or 0.0) for one in outcomes), 3),
        "best": None if best is None else {"values": best.point, "score": best.score},
    }


def _varies(name: str, outcomes: Sequence[Outcome]) -> bool:
    return len({one.point.get(name) for one in outcomes}) > 1


def best_recipe(plan: SweepPlan, best: Point, baseline: Point | None) -> dict[str, Any]:
    """Return the recipe with the best values; its [compare] sets the tuned baseline beside it."""
    tables = apply_point(plan.recipe.tables_for(plan.search.entry), best)
    name = tables["algorithm"]["name"]
    compare: dict[str, Any] = {"algorithms": [name], "seeds": plan.seeds, "curves": plan.recipe.compare.curves}
    if plan.search.baseline is not None and baseline is not None:
        own = plan.recipe.tables_for(plan.search.baseline)
        settings = merge(plan.recipe.compare.settings.get(plan.search.baseline, {}), apply_point({}, baseline))
        settings |= {"rounds": own["rounds"]} if "rounds" in own else {}
        compare |= {"algorithms": [name, plan.search.baseline], "settings": {plan.search.baseline: settings}}
    recipe: dict[str, Any] = plain({**tables, "compare": compare})
    return recipe


def write_results(folder: Path, plan: SweepPlan, found: Found) -> dict[str, Any]:
    """Write best.toml, trials.csv, the pictures and, last, summary.json; return the summary."""
    summary = summarise_sweep(plan, found)
    TrialsFile(folder, plan).write(found.all())
    baseline: Mapping[str, Any] | None = summary["baseline_best"]
    write_toml(folder / BEST, best_recipe(plan, summary["best"], dict(baseline["values"]) if baseline else None))
    if plan.search.baseline is not None:
        _draw_beta(folder, plan, found, summary)
    _draw_values(folder, plan, found)
    write_json(folder / SUMMARY, summary)
    return summary


# Pictures


def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))


def _height(score: float | None, accuracies: bool) -> float:
    return 100 * (score or 0.0) if accuracies else -(score or 0.0)


def _tidy(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Draw ratios evenly, with zero, where it was tried, at the left end."""
    positive = [value for value in values if value > 0]
    if not positive:
        return
    if min(values) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive) / 2)
    axes.set_xticks(sorted(set(values)), [shown(value) for value in sorted(set(values))], rotation=45, fontsize=8)
    axes.minorticks_off()


def _draw_beta(folder: Path, plan: SweepPlan, found: Found, summary: dict[str, Any]) -> None:
    """Draw validation accuracy over β with all else fixed, and the finalists' test accuracy where they have it."""
    searched = [one for one in found.tuned if one.stage in ("beta-coarse", "beta-fine")]
    accuracies = are_accuracies(searched)
    scored = sorted((one for one in searched if one.score is not None), key=lambda one: float(one.point["beta"]))
    if not scored:
        return
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    betas = [float(one.point["beta"]) for one in scored]
    heights = [_height(one.score, accuracies) for one in scored]
    axes.plot(betas, heights, color=COLOURS[0], linewidth=1.2, label="validation, one seed")
    for stage, marker, filled in (("beta-coarse", "o", COLOURS[0]), ("beta-fine", "s", "white")):
        own = [(beta, y) for one, beta, y in zip(scored, betas, heights, strict=True) if one.stage == stage]
        xs, ys = [beta for beta, _ in own], [y for _, y in own]
        axes.plot(xs, ys, marker, color=COLOURS[0], markerfacecolor=filled, label=f"  {stage.removeprefix('beta-')}")
    ended = [float(one.point["beta"]) for one in searched if one.score is None]
    if ended:
        low: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(ended, [0.02] * len(ended), "x", color="#999999", label="ended early or diverged", **low)
    if summary["baseline_best"] is not None:
        level = _height(summary["baseline_best"]["validation_score"], accuracies)
        label = f"validation, tuned {plan.search.baseline}"
        axes.axhline(level, color=COLOURS[6], linestyle="--", linewidth=1, label=label)
    _draw_tested(axes, found, accuracies)
    all_betas = betas + ended + _draw_finalists(axes, summary, accuracies)
    _scale(axes, all_betas)
    axes.set_xlabel("β")
    _tidy(axes, "accuracy, %" if accuracies else "loss")
    fixed = {name: value for name, value in scored[0].point.items() if name != "beta"}
    axes.set_title(f"{plan.name}: {describe_point(fixed)}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    _save(figure, folder / BETA)


def _draw_tested(axes: Axes, found: Found, accuracies: bool) -> None:
    """Draw the test accuracy of every β of the search, where it was asked for: the paper's figure."""
    known = sorted((float(one.point["beta"]), one.score) for one in found.tested_betas if one.score is not None)
    if known:
        heights = [_height(score, accuracies) for _, score in known]
        axes.plot([beta for beta, _ in known], heights, "^-", color=COLOURS[2], linewidth=1.2, label="test, one seed")


def _draw_finalists(axes: Axes, summary: dict[str, Any], accuracies: bool) -> list[float]:
    """Draw the finalists' test results, mean and standard deviation over the seeds; return their β."""
    what, scale = ("test_accuracy", 100) if accuracies else ("test_loss", 1)
    seeds = len(summary["seeds"])
    rows = [row for row in summary["finalists"] if row[what] is not None]
    label = f"finalists on the test set, {seeds} seed{'s' if seeds > 1 else ''}, other values tuned too"
    drawn: list[float] = []
    for row in rows:
        beta = float(row["values"]["beta"])
        beside = 1.0 + 0.06 * drawn.count(beta)  # finalists often share their β: side by side
        drawn.append(beta)
        deviation = scale * (row[what]["std"] or 0.0)
        axes.errorbar(
            [beta * beside],
            [scale * row[what]["mean"]],
            yerr=[deviation],
            fmt="D",
            color=COLOURS[1],
            markerfacecolor=COLOURS[1] if row["chosen"] else "white",
            capsize=3,
            label=label if row is rows[0] else None,
        )
    return drawn


def _draw_values(folder: Path, plan: SweepPlan, found: Found) -> None:
    """Draw a panel for each varied value: every complete trial of the algorithm, and the best at each value."""
    outcomes = [one for one in found.tuned if one.score is not None]
    accuracies = are_accuracies(outcomes)
    names = [name for name in plan.search.lists if len({one.point.get(name) for one in outcomes}) > 1]
    if not names:
        return
    rows = (len(names) + 2) // 3
    figure = Figure(figsize=(4 * min(3, len(names)), 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, min(3, len(names)), squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_value(axes, name, [one for one in outcomes if name in one.point], accuracies)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    figure.suptitle(f"{plan.name}: trials of the search, and the best at each value", fontsize=10)
    _save(figure, folder / VALUES)


def _draw_value(axes: Axes, name: str, outcomes: Sequence[Outcome], accuracies: bool) -> None:
    tried = {one.point[name] for one in outcomes}
    numbers = sorted(value for value in tried if not isinstance(value, str))
    words = sorted(value for value in tried if isinstance(value, str))
    values = [*numbers, *words]
    by_number = name in ("lr", "beta", "mu", "alpha", "server_lr", "clip_norm", "weight_decay") and not words
    places = {value: float(value) if by_number else place for place, value in enumerate(values)}
    heights = [_height(one.score, accuracies) for one in outcomes]
    axes.plot([places[one.point[name]] for one in outcomes], heights, "o", color=COLOURS[0], alpha=0.35, markersize=4)
    better = max if accuracies else min
    best = [better(y for one, y in zip(outcomes, heights, strict=True) if one.point[name] == v) for v in values]
    axes.plot([places[value] for value in values], best, color=COLOURS[1], linewidth=1.2)
    if by_number and len(numbers) <= 12:
        _scale(axes, [float(value) for value in numbers])
    elif by_number:
        axes.set_xscale("log" if min(numbers) > 0 else "linear")
    else:
        axes.set_xticks(range(len(values)), [shown(value) for value in values])
    axes.set_xlabel({"beta": "β", "batch": "batch size", "weight_decay": "weight decay"}.get(name, name))
    _tidy(axes, "validation accuracy, %" if accuracies else "validation loss")
