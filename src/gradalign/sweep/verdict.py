"""Does alignment help? The tuned algorithm beside the tuned one without alignment, at as much communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gradalign.report.statistics import Difference, difference, spread_of
from gradalign.sweep.grid import Point
from gradalign.sweep.protocol import Found, Outcome, Scoring


def known(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Return one number of the trials that came to their end and have it."""
    values = [one.facts.get(name) for one in outcomes if one.state == "complete"]
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def compare_with_baseline(found: Found, chosen: Point, scoring: Scoring) -> dict[str, Any] | None:
    """Return both results on the test set, their difference and a sentence; None for an algorithm without alignment."""
    ours = [one for one in found.tested if one.point == chosen]
    theirs = found.tested_baseline
    if not ours or not theirs:
        return None
    what, scale = scoring.name, abs(scoring.factor)
    scores = [[scale * value for value in known(runs, f"test_{what}")] for runs in (ours, theirs)]
    apart = difference(*scores)
    rounds = [max(known(runs, "communication_rounds"), default=0.0) for runs in (ours, theirs)]
    names = [ours[0].entry, theirs[0].entry]
    return {
        "what": what,
        "entries": [
            {
                "algorithm": name,
                "values": runs[0].point,
                "communication_rounds": int(spent),
                f"test_{what}": spread_of(own),
            }
            | {"seeds": len(own), "diverged": sum(one.state == "diverged" for one in runs)}
            for name, runs, spent, own in zip(names, (ours, theirs), rounds, scores, strict=True)
        ],
        "difference": None if apart is None else apart.value,
        "margin": None if apart is None else apart.margin,
        "sentence": _sentence(names, apart, scoring, rounds, [len(own) for own in scores]),
    }


def _sentence(
    names: Sequence[str], apart: Difference | None, scoring: Scoring, rounds: Sequence[float], seeds: Sequence[int]
) -> str:
    ours, theirs = names
    if apart is None:
        return f"Whether {ours} helps cannot be told: of {ours if not seeds[0] else theirs} no run came to its end."
    counts = f"{seeds[0]} seeds each" if seeds[0] == seeds[1] else f"{seeds[0]} and {seeds[1]} seeds"
    unit, form = (
        ("points of test accuracy", "+.2f") if scoring.name == "accuracy" else (f"of test {scoring.name}", "+.4g")
    )
    margin = "" if apart.margin is None else f" ± {format(apart.margin, form[1:])}"
    spent = " and ".join(f"{own:,.0f}" for own in dict.fromkeys(rounds))  # one number where they are alike
    found = f"{format(apart.value, form)}{margin} {unit} beside the tuned {theirs}, at {spent} communication rounds"
    if apart.margin is None:
        return f"Whether {ours} helps cannot be told from a single seed: {found}; give --seeds 3 or more."
    if not apart.decided:
        return f"Whether {ours} helps cannot be told from {counts}: {found} (95 % interval); more --seeds may tell."
    helps = "helps" if (apart.value > 0) == scoring.larger else "does harm"
    return f"{ours} {helps} here: {found} (95 % interval, {counts})."
