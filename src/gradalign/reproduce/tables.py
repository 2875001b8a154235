"""Every entry of an experiment beside its baseline: what it reached, and by how much it differs at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gradalign.report.statistics import difference, mean_and_std
from gradalign.reproduce.verdicts import Claim, Cost, Rows, score, scores, spent

COSTS: tuple[Cost, ...] = ("communication", "updates", "bytes", "computation")
_LENGTHS = ("K", "epochs", "batch", "weight_decay")  # the same for all entries of most experiments


def beside_baseline(runs: Mapping[str, Sequence[Rows]], baseline: str) -> list[dict[str, Any]]:
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


def markdown(experiments: Sequence[Mapping[str, Any]]) -> str:
    """Return results as Markdown, a table for each experiment."""
    return "\n".join(line for one in experiments for line in _section(one))


def _section(experiment: Mapping[str, Any]) -> list[str]:
    chosen = {one["name"]: (one["chosen"] or {}).get("values", {}) for one in experiment["algorithms"]}
    heads = ["", "test accuracy, %", *(f"− {experiment['baseline']}, equal {at}" for at in COSTS), "costs", "chosen"]
    lines = [f"## {experiment['name']}", "", experiment["title"], "", _line(heads), _line(["---"] * len(heads))]
    for row in experiment["beside_baseline"]:
        name = row["name"]
        reached = f"{mean_and_std(row['scores'], '.2f')} ({len(row['scores'])})"
        pairs = [_pair(row["difference"].get(at)) for at in COSTS]
        costs = ", ".join(f"{row['spent'][at]:.2f}" if at in row["spent"] else "–" for at in COSTS)
        values = ", ".join(f"{key} {value}" for key, value in chosen.get(name, {}).items() if key not in _LENGTHS)
        lines.append(_line([name, reached, *pairs, costs, values]))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    margin = "" if found["margin"] is None else f" ± {found['margin']:.2f}"
    return f"{found['value']:+.2f}{margin}".replace("-", "−")
