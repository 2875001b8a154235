"""What a claim is, and the rule that judges it; and every entry beside the baseline, at equal cost.

Each claim stands in the plan, which says what was fixed before any run and what was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import model_validator

from gradalign.recipes.spec import Finite, NotNegative, Portion, Section
from gradalign.report.statistics import Difference, difference

Verdict = Literal["reproduced", "not reproduced", "undecidable", "pending"]
Cost = Literal["communication", "updates", "rounds", "bytes", "computation"]
Rows = Sequence[Mapping[str, float]]
Runs = Mapping[str, Sequence[Rows]]

AXES: dict[Cost, str] = {
    "communication": "communication_rounds",
    "updates": "local_updates",
    "rounds": "round",
    "bytes": "bytes",
    "computation": "examples",
}
"""What is equal in a comparison, and the column of a run's rows that counts it."""
GAP = "gap"  # how far training accuracy is above test accuracy: a metric that is worked out, over the same window
WINDOW = 0.1
_DECIDED = ("reproduced", "not reproduced")
_ENDED = 0.5  # points: a curve that gains more in the last tenth of a run than this has not come to its end
COSTS: tuple[Cost, ...] = ("communication", "updates", "bytes", "computation")


class Claim(Section):
    """One sentence, most of them the paper's, as a difference ``first`` − ``second`` of a measured number.

    Attributes:
        second: An entry of the experiment, EXPERIMENT/ENTRY of another, or a level to compare the first with.
        at: What both have spent alike when they are compared.
        metric: A column of the runs' rows, or "gap"; shares are judged in percentage points.
        expect: What the paper says of the difference.
        claimed: The paper's difference, where it prints one: in points, or in the metric's own unit.
        tolerance: For "equal": how large a difference still counts as none. Else: by how much the first may be on
            the wrong side and still count as "not worse".
        window: The last share of what was spent, over whose measurements the metric is averaged.
        papers: Whether the paper says so, of this experiment; of other claims it is said whether they hold.
        settled: The claim is about where runs end, so it is undecidable while a side still rises.
    """

    text: str
    first: str
    second: str | Finite
    at: Cost
    metric: str = "test_accuracy"
    expect: Literal["higher", "lower", "equal"] = "higher"
    claimed: NotNegative | None = None
    tolerance: NotNegative | None = None
    window: Portion = WINDOW
    papers: bool = True
    settled: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Claim:
        if self.expect == "equal" and self.tolerance is None:
            raise ValueError('"equal" needs a tolerance')
        return self

    @property
    def unit(self) -> float:
        """What a share of one is in the numbers that are judged: 100 points."""
        return 100.0 if self.metric.endswith("accuracy") or self.metric == GAP else 1.0

    def speaks_for(self, verdict: Verdict) -> set[str | float]:
        """Return the sides that a decided verdict says are the better ones: of an equality both."""
        if self.expect == "equal":
            return {self.first, self.second}
        first_is_better = (self.expect == "higher") == (self.metric == "test_accuracy")  # all else is better lower
        return {self.first if first_is_better == (verdict == "reproduced") else self.second}


def spent(rows: Rows, at: Cost) -> float:
    """Return how much of what is to be equal a run has spent in all."""
    return max((row.get(AXES[at], 0.0) for row in rows), default=0.0)


def score(rows: Rows, claim: Claim, budget: float) -> float | None:
    """Return the metric's mean over the measurements in the last ``window`` of a budget; None when there is none.

    Single measurements jump from round to round; the mean over a window is what settings and seeds can be judged by.
    """
    low = (1 - claim.window) * budget
    if claim.metric != GAP:
        return _mean(rows, claim, claim.metric, low, budget)
    trained, tested = (_mean(rows, claim, name, low, budget) for name in ("train_accuracy", "test_accuracy"))
    return None if trained is None or tested is None else trained - tested


def _mean(rows: Rows, claim: Claim, metric: str, above: float, until: float) -> float | None:
    inside = [row for row in rows if above < row.get(AXES[claim.at], 0.0) <= until]
    values = [claim.unit * row[metric] for row in inside if row.get(metric) is not None]
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _sides(runs: Runs, claim: Claim) -> tuple[list[Sequence[Rows]], float]:
    """Return the runs of both sides, and the most that every one of them has spent."""
    sides = [runs.get(claim.first, []), runs.get(claim.second, []) if isinstance(claim.second, str) else []]
    return sides, min((spent(rows, claim.at) for side in sides for rows in side), default=0.0)


def scores(runs: Runs, claim: Claim) -> tuple[list[float], list[float]]:
    """Return the seeds' scores of both sides, at the most that every run of both has spent."""
    sides, budget = _sides(runs, claim)
    first, second = ([one for rows in side if (one := score(rows, claim, budget)) is not None] for side in sides)
    # A level is a sample without spread: Welch's interval is then Student's of the first alone.
    return first, second if isinstance(claim.second, str) else [claim.second * claim.unit] * 2


def rises(runs: Runs, claim: Claim) -> list[float]:
    """Return by how many points each side's test accuracy is higher in the last tenth than in the one before."""
    sides, budget = _sides(runs, claim)
    tenths = [(low * budget, high * budget) for low, high in ((0.8, 0.9), (0.9, 1.0))]
    ends = [[[_mean(rows, claim, "test_accuracy", *one) for one in tenths] for rows in side] for side in sides]
    steps = [[last - before for before, last in side if before is not None and last is not None] for side in ends]
    return [100.0 / claim.unit * fmean(side) for side in steps if side]  # in points, whatever the claim's unit


def judge(claim: Claim, found: Difference | None) -> tuple[Verdict, str]:
    """Judge a claim by the 95 % interval of the difference (Welch); return the verdict and the rule that gave it."""
    if found is None or found.margin is None:
        return "pending", "fewer than two finished runs of a side have no spread to judge by"
    low, high = found.value - found.margin, found.value + found.margin
    interval = f"95 % interval from {low:+.3g} to {high:+.3g}"
    if claim.expect == "equal" and claim.tolerance is not None:
        if -claim.tolerance < low and high < claim.tolerance:
            return "reproduced", f"{interval} lies within ±{claim.tolerance:g}"
        if low > claim.tolerance or high < -claim.tolerance:
            return "not reproduced", f"{interval} lies outside ±{claim.tolerance:g}"
        return "undecidable", f"{interval} reaches over ±{claim.tolerance:g}"
    if claim.expect == "lower":
        low, high = -high, -low
    bound = -(claim.tolerance or 0.0)
    what = f"a loss of {claim.tolerance:g}" if claim.tolerance else "0"
    if low > bound:
        return "reproduced", f"{interval} leaves out {what} on the claim's side"
    if high < bound:
        return "not reproduced", f"{interval} leaves out {what} on the other side"
    if claim.claimed is not None and high < claim.claimed:
        return "not reproduced", f"{interval} has {what} in it and leaves out the paper's {claim.claimed:g}"
    paper = "" if claim.claimed is None else f" and the paper's {claim.claimed:g}"
    return "undecidable", f"{interval} has {what}{paper} in it"


def verdict_row(claim: Claim, runs: Runs, diverged: Mapping[str, int] | None = None) -> dict[str, object]:
    """Return a claim with its numbers and its verdict, as plain values.

    ``diverged`` says how many runs of an entry have no number. A side of which any diverged cannot win by the others.
    """
    first, second = scores(runs, claim)
    found = difference(first, second)
    verdict, why = judge(claim, found)
    lost = {side: (diverged or {}).get(str(side), 0) for side in (claim.first, claim.second)}
    sides = [side for side in lost if isinstance(side, str)]
    if verdict == "pending" and all(len(runs.get(side, ())) + lost[side] > 1 for side in sides):
        verdict, why = "undecidable", "fewer than two runs of a side have a number"
        names = ("train_accuracy", "test_accuracy") if claim.metric == GAP else (claim.metric,)
        measured = {name for side in sides for rows in runs.get(side, ()) for row in rows for name in row}
        why += "".join(f': none has measured "{name}"' for name in names if measured and name not in measured)
    risen = rises(runs, claim) if claim.settled or claim.metric == "test_accuracy" else []
    if verdict != "pending" and any(points > _ENDED for points in risen):
        words = " and ".join(f"{max(points, 0.0):.1f}" for points in risen)
        why += f"; still rising by {words} points over the last tenth"
        verdict = "undecidable" if claim.settled and verdict in _DECIDED else verdict
    for side, count in lost.items():
        if count:
            wins = verdict in _DECIDED and side in claim.speaks_for(verdict)
            why += f"; {count} diverged of {side}" + (", which cannot win by the others" if wins else "")
            verdict = "undecidable" if wins else verdict
    return {
        **claim.model_dump(exclude_none=True),
        "first_scores": first,
        "second_scores": second if isinstance(claim.second, str) else [],
        "difference": None if found is None else found.value,
        "margin": None if found is None else found.margin,
        "rises": risen,
        "verdict": verdict,
        "why": why,
    }


def beside_baseline(runs: Runs, baseline: str) -> list[dict[str, Any]]:
    """Return a row for each entry that has finished runs, the baseline first.

    A row has the seeds' test accuracies over the last tenth of the run, in percent (``scores``); what was ``spent`` of
    every cost, as multiples of the baseline's; and the ``difference`` to the baseline at every equal cost with Welch's
    margin, as claims are judged by.
    """
    names = sorted((name for name, own in runs.items() if own), key=lambda name: name != baseline)
    costs = {name: {at: fmean(spent(rows, at) for rows in runs[name]) for at in COSTS} for name in names}
    table = []
    for name in names:
        row: dict[str, Any] = {"name": name, "scores": _scores(runs[name]), "spent": {}, "difference": {}}
        for at in COSTS if baseline in costs else ():
            found = difference(*scores(runs, Claim(text="", first=name, second=baseline, at=at)))
            if found is not None and name != baseline:
                row["difference"][at] = {"value": found.value, "margin": found.margin}
            if costs[baseline][at]:
                row["spent"][at] = costs[name][at] / costs[baseline][at]
        table.append(row)
    return table


def _scores(runs: Sequence[Rows]) -> list[float]:
    """Return every run's mean test accuracy over its last tenth."""
    whole = Claim(text="", first="", second=0.0, at="rounds")
    return [one for rows in runs if (one := score(rows, whole, spent(rows, "rounds"))) is not None]
