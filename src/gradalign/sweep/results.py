"""What a sweep leaves behind: the best values as a recipe, all trials as a table, a summary."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradalign.compare import spread
from gradalign.recipes.scale import describe_scale
from gradalign.recipes.spec import merge
from gradalign.runs import SUMMARY, write_whole
from gradalign.runs.folder import write_json, write_toml
from gradalign.server.runner import versions
from gradalign.sweep.conduct import FINALISTS, TEST, TEST_BETA, Found
from gradalign.sweep.grid import Point, apply_point, ordered, shown
from gradalign.sweep.plan import SweepPlan, plain
from gradalign.sweep.protocol import Outcome, are_accuracies, best_of, rank

TABLE, BEST = "trials.csv", "best.toml"
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
    from gradalign.sweep.plot import draw_beta, draw_values

    summary = summarise_sweep(plan, found)
    TrialsFile(folder, plan).write(found.all())
    baseline: Mapping[str, Any] | None = summary["baseline_best"]
    write_toml(folder / BEST, best_recipe(plan, summary["best"], dict(baseline["values"]) if baseline else None))
    if plan.search.baseline is not None:
        draw_beta(folder, plan, found, summary)
    draw_values(folder, plan, found)
    write_json(folder / SUMMARY, summary)
    return summary
