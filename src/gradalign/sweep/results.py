"""What a sweep leaves behind: the best values as a recipe, all trials as a table, a summary, pictures."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from gradalign.recipes.names import plain_name
from gradalign.recipes.scale import describe_scale, lay_over
from gradalign.recipes.spec import Spec
from gradalign.report.experiments import shown_value
from gradalign.report.figures import COLOURS, STYLE, save, tidy
from gradalign.report.statistics import spread_of
from gradalign.runs import SUMMARY, write_json, write_toml, write_whole
from gradalign.server.measure import versions
from gradalign.sweep.grid import PLACES, Point, apply_point, describe_point
from gradalign.sweep.plan import SweepPlan, plain
from gradalign.sweep.protocol import FINAL, Found, Outcome, Scoring, at_ends, best_of, count_states, scoring_of
from gradalign.sweep.verdict import compare_with_baseline, known

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE, BEST, BETA, VALUES = "trials.csv", "best.toml", "beta.png", "values.png"
_FACTS = ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss", "rounds_done", "rounds", "seconds")


def _trials_table(outcomes: Sequence[Outcome], lists: Collection[str]) -> str:
    """Return all trials as CSV: stage, values, how each ended, what it reached, what it cost."""
    names = [name for name in PLACES if name in lists]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["stage", "trial", "algorithm", "seed", *names, "state", *_FACTS, "folder", "worker"])
    for one in outcomes:
        values = [shown_value(one.point[name]) if name in one.point else "" for name in names]
        facts = ["" if one.facts.get(name) is None else one.facts[name] for name in (*_FACTS, "folder", "worker")]
        table.writerow([one.stage, one.facts.get("trial", ""), one.entry, one.seed, *values, one.state, *facts])
    return text.getvalue()


class TrialsFile:
    """trials.csv, written anew whenever something has changed."""

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self._path, self._lists, self._before = folder / TABLE, plan.search.lists, ""

    def write(self, outcomes: Sequence[Outcome]) -> None:
        text = _trials_table(outcomes, self._lists)
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
    scoring = scoring_of(found.tuned)
    sign = 1 if scoring.larger else -1
    for first in found.finalists:
        runs = [one for one in found.tested if one.point == first.point]
        again = [one for one in found.validated if one.point == first.point]
        scores = [one.score for one in (first, *again) if one.score is not None]
        rows.append(
            {
                "values": first.point,
                f"validation_{scoring.name}": spread_of([sign * score for score in scores]),
                f"test_{scoring.name}": spread_of(known(runs, f"test_{scoring.name}")),
                "test_accuracy": spread_of(known(runs, "test_accuracy")),
                "test_loss": spread_of(known(runs, "test_loss")),
                "diverged": sum(one.state == "diverged" for one in (*again, *runs)),
                "folders": [one.facts["folder"] for one in (first, *again, *runs) if "folder" in one.facts],
            }
        )
        ranks.append((len(scores) == 1 + len(again), statistics.fmean(scores)))
    best = ranks.index(max(ranks))
    return [row | {"chosen": place == best} for place, row in enumerate(rows)]


def summarise_sweep(plan: SweepPlan, found: Found) -> dict[str, Any]:
    stages: dict[str, list[Outcome]] = {}
    for one in found.all():
        stages.setdefault(one.stage, []).append(one)
    finalists = finalists_table(found)
    chosen = next(row["values"] for row in finalists if row["chosen"])
    scoring = scoring_of(found.tuned)
    spec = plan.spec(plan.search.entry, {})
    baseline = best_of(found.baseline, "the baseline") if found.baseline else None
    ends = {plan.search.entry: at_ends(found.tuned, chosen)}
    if baseline is not None:
        ends[baseline.entry] = at_ends(found.baseline, baseline.point)
    return {
        "kind": "sweep",
        "score": scoring.name,
        "larger_is_better": scoring.larger,
        "scale": describe_scale(spec),
        **{key: value for key, value in plan.describe().items() if key != "recipes"},
        "baseline": plan.search.baseline,
        "seeds": list(range(plan.seed, plan.seed + plan.seeds)),
        "stages": [_stage_row(name, outcomes) for name, outcomes in stages.items()],
        "finalists": finalists,
        "best": chosen,
        "baseline_best": {"values": baseline.point, "validation_score": baseline.score} if baseline else None,
        "at_ends": {entry: words for entry, words in ends.items() if words},
        "does_it_help": compare_with_baseline(found, chosen, scoring),
        "versions": versions(),
    }


def _stage_row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    searched = name not in FINAL and any(one.score is not None for one in outcomes)
    best = best_of(outcomes, name) if searched else None
    return {
        "name": name,
        "algorithm": outcomes[0].entry,
        "trials": len(outcomes),
        **count_states(outcomes),
        "varied": [name for name in PLACES if _varies(name, outcomes)],
        "seconds": round(sum(float(one.facts.get("seconds") or 0.0) for one in outcomes), 3),
        "best": None if best is None else {"values": best.point, "score": best.score},
    }


def _varies(name: str, outcomes: Iterable[Outcome]) -> bool:
    return len({one.point.get(name) for one in outcomes}) > 1


def best_recipe(plan: SweepPlan, best: Point, baseline: Point | None) -> dict[str, Any]:
    """Return the recipe with the best values; its [compare] sets the tuned baseline beside it."""
    tables = apply_point(plan.recipe.tables_for(plan.search.entry), best)
    name = tables["algorithm"]["name"]
    compare = plan.recipe.compare.model_dump(include={"curves", "equal"}) | {"algorithms": [name], "seeds": plan.seeds}
    other, known = plan.search.baseline, plan.recipe.compare.settings
    told = [plain_name(entry) for entry in (plan.search.entry, name, other or "")]
    settings = {key: one for key, one in known.items() if plain_name(key) not in told}
    if other is not None and baseline is not None:
        theirs, stated = plan.recipe.settings_of(other), set(plan.recipe.stated_of(other))
        if "rounds" not in stated or "rounds" in plan.recipe.changes:  # they are the comparison's to give
            theirs, stated = lay_over(theirs, {"rounds": tables.get("rounds", Spec().rounds)}), stated - {"rounds"}
        written = {"algorithm", "local", "server", "clients", *stated}
        settings[other] = {key: one for key, one in apply_point(theirs, baseline).items() if key in written}
        compare["algorithms"] = [name, other]
    compare |= {"settings": settings} if settings else {}
    recipe: dict[str, Any] = plain({**tables, "compare": compare})
    return recipe


def write_results(folder: Path, plan: SweepPlan, found: Found) -> dict[str, Any]:
    """Write best.toml, the pictures and, last, summary.json; return the summary."""
    summary = summarise_sweep(plan, found)
    baseline = summary["baseline_best"]
    write_toml(folder / BEST, best_recipe(plan, summary["best"], baseline["values"] if baseline else None))
    with matplotlib.rc_context(STYLE):
        if plan.search.baseline is not None and "beta" in plan.search.lists:
            _draw_beta(folder, plan, found, summary)
        _draw_values(folder, plan, found)
    write_json(folder / SUMMARY, summary)
    return summary


# Pictures


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Draw ratios evenly, with zero, where it was tried, at the left end."""
    positive = [value for value in values if value > 0]
    if not positive:
        return
    if min(values) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive) / 2)
    ticks = sorted(set(values))
    axes.set_xticks(ticks, [shown_value(value) for value in ticks], rotation=45, fontsize=8)
    axes.minorticks_off()


def _draw_beta(folder: Path, plan: SweepPlan, found: Found, summary: dict[str, Any]) -> None:
    """Draw validation accuracy over β with all else fixed, and the finalists' test accuracy where they have it."""
    searched = [one for one in found.tuned if one.stage in ("beta-coarse", "beta-fine")]
    scoring = scoring_of(searched)
    scored = [one for one in searched if one.score is not None]
    if not scored:
        return
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_line(scored, scoring), color=COLOURS[0], linewidth=1.2, label="validation, one seed")
    for stage, marker, filled in (("coarse", "o", COLOURS[0]), ("fine", "s", "white")):
        own = _line([one for one in scored if one.stage == f"beta-{stage}"], scoring)
        axes.plot(*own, marker, color=COLOURS[0], markerfacecolor=filled, label=f"  {stage}")
    ended = [float(one.point["beta"]) for one in searched if one.score is None]
    if ended:
        low: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(ended, [0.02] * len(ended), "x", color="#999999", label="ended early or diverged", **low)
    if summary["baseline_best"] is not None:
        level = scoring.shown(summary["baseline_best"]["validation_score"])
        label = f"validation, tuned {plan.search.baseline}"
        axes.axhline(level, color=COLOURS[6], linestyle="--", linewidth=1, label=label)
    tested = [one for one in found.tested_betas if one.score is not None]
    if tested:  # the paper's figure
        axes.plot(*_line(tested, scoring), "^-", color=COLOURS[2], linewidth=1.2, label="test, one seed")
    betas = [float(one.point["beta"]) for one in searched]
    _scale(axes, betas + _draw_finalists(axes, summary, scoring))
    tidy(axes, "β", scoring.words)
    fixed = {name: value for name, value in scored[0].point.items() if name != "beta"}
    axes.set_title(f"{plan.name}: {describe_point(fixed)}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, folder / BETA)


def _line(outcomes: Iterable[Outcome], scoring: Scoring) -> tuple[list[float], list[float]]:
    """Return the β of trials in ascending order, and their heights."""
    points = sorted((float(one.point["beta"]), scoring.shown(one.score)) for one in outcomes)
    return [beta for beta, _ in points], [height for _, height in points]


def _draw_finalists(axes: Axes, summary: dict[str, Any], scoring: Scoring) -> list[float]:
    """Draw the finalists' test results, mean and standard deviation over the seeds; return their β."""
    what, scale = f"test_{scoring.name}", abs(scoring.factor)
    seeds = len(summary["seeds"])
    label = f"finalists on the test set, {seeds} seed{'s' if seeds > 1 else ''}, other values tuned too"
    drawn: list[float] = []
    for row in [row for row in summary["finalists"] if row[what] is not None]:
        beta = float(row["values"]["beta"])
        beside = 1.0 + 0.06 * drawn.count(beta)  # finalists often share their β: side by side
        mean, deviation = scale * row[what]["mean"], scale * (row[what]["std"] or 0.0)
        fill: Any = {"markerfacecolor": COLOURS[1] if row["chosen"] else "white", "label": None if drawn else label}
        axes.errorbar(beta * beside, mean, deviation, fmt="D", color=COLOURS[1], capsize=3, **fill)
        drawn.append(beta)
    return drawn


def _draw_values(folder: Path, plan: SweepPlan, found: Found) -> None:
    """Draw a panel for each varied value: every complete trial of the algorithm, and the best at each value."""
    outcomes = [one for one in found.tuned if one.score is not None]
    scoring = scoring_of(outcomes)
    names = [name for name in plan.search.lists if _varies(name, outcomes)]
    if not names:
        return
    rows = (len(names) + 2) // 3
    figure = Figure(figsize=(4 * min(3, len(names)), 3.4 * rows), layout="constrained")
    grid = figure.subplots(rows, min(3, len(names)), squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        _draw_value(axes, name, [one for one in outcomes if name in one.point], scoring)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    figure.suptitle(f"{plan.name}: trials of the search, and the best at each value", fontsize=10)
    save(figure, folder / VALUES)


def _draw_value(axes: Axes, name: str, outcomes: Sequence[Outcome], scoring: Scoring) -> None:
    tried = {one.point[name] for one in outcomes}
    numbers = sorted(value for value in tried if not isinstance(value, str))
    words = sorted(value for value in tried if isinstance(value, str))
    values = [*numbers, *words]
    by_number = name in ("lr", "beta", "mu", "alpha", "server_lr", "clip_norm", "weight_decay") and not words
    places = {value: float(value) if by_number else place for place, value in enumerate(values)}
    heights = [scoring.shown(one.score) for one in outcomes]
    axes.plot([places[one.point[name]] for one in outcomes], heights, "o", color=COLOURS[0], alpha=0.35, markersize=4)
    better = max if scoring.larger else min
    best = [better(y for one, y in zip(outcomes, heights, strict=True) if one.point[name] == v) for v in values]
    axes.plot([places[value] for value in values], best, color=COLOURS[1], linewidth=1.2)
    if by_number and len(numbers) <= 12:
        _scale(axes, [float(value) for value in numbers])
    elif by_number:
        axes.set_xscale("log" if min(numbers) > 0 else "linear")
    else:
        axes.set_xticks(range(len(values)), [shown_value(value) for value in values])
    label = {"beta": "β", "batch": "batch size", "weight_decay": "weight decay"}.get(name, name)
    tidy(axes, label, f"validation {scoring.words}")
