"""The comparison as a table: mean ± deviation over the seeds, the paper's numbers, and who is told apart from whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from gradalign.report.experiments import Experiment, Group
from gradalign.report.order import Difference, Verdict, difference, spread_of, verdict

_MOST_PAIRED = 8
MOST_UNSORTED = 12


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One group's line, as text; ``number`` is the group's place in the experiment."""

    number: int
    label: str
    seeds: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two groups compared; ``paper`` is the paper's difference in points, where it has both."""

    first: Group
    second: Group
    ours: Difference | None
    paper: float | None
    within_papers_spread: bool = False
    verdict: Verdict | None = None


def comparison_table(experiment: Experiment) -> tuple[tuple[str, ...], list[TableRow]]:
    """Return the heads of the columns after algorithm and seeds, and the rows; of many groups the best come first."""
    groups = experiment.groups
    on = experiment.scored_on
    scored = any(group.scores() for group in groups)
    with_paper = any(group.paper for group in groups)
    heads = [f"final {on} accuracy, %", f"best {on} accuracy, %"] if scored else []
    if with_paper:
        heads += ["paper, %", "ours − paper"]
    heads += [f"final {on} loss", "final r(x)", "communication rounds", "seconds"]
    places = {id(group): place for place, group in enumerate(groups)}
    ordered = groups if len(groups) <= MOST_UNSORTED else ranked(experiment)
    return tuple(heads), [_row(group, places[id(group)], scored=scored, with_paper=with_paper) for group in ordered]


def _row(group: Group, number: int, *, scored: bool, with_paper: bool) -> TableRow:
    cells = []
    if scored:
        cells += [_percent(group.scores()), _percent(group.finals(f"best_{group.scored_on}_accuracy"))]
    if with_paper:
        cells += [_paper(group), _beside_paper(group)]
    cells += [
        _mean_and_std(group.finals(f"final_{group.scored_on}_loss"), ".4g"),
        _mean_and_std(group.finals("final_r"), ".3g"),
        _mean_and_std(group.finals("communication_rounds"), ",.0f"),
        _mean_and_std(group.finals("seconds"), ".3g"),
    ]
    return TableRow(number=number, label=group.label, seeds=_seeds(group), cells=tuple(cells))


def _seeds(group: Group) -> str:
    words = [str(len(group.complete))]
    for state in ("diverged", "unfinished"):
        count = sum(run.state == state for run in group.runs)
        words += [f"{count} {state}"] if count else []
    return " + ".join(words)


def _percent(values: Sequence[float]) -> str:
    return _mean_and_std([100 * value for value in values], ".2f")


def _mean_and_std(values: Sequence[float], form: str) -> str:
    spread = spread_of(values)
    if spread is None:
        return "–"
    mean, std = spread
    if std is None or (std == 0 and form.endswith(".0f")):  # a count that no seed changes
        return format(mean, form)
    if form.endswith("g") and std > 0:  # two digits of the deviation, and as many decimals of the mean
        form = f".{min(max(1 - math.floor(math.log10(std)), 0), 12)}f"
    return f"{format(mean, form)} ± {format(std, form)}"


def _paper(group: Group) -> str:
    if group.paper is None:
        return "–"
    return f"{group.paper.mean:.2f}" + (f" ± {group.paper.std:.2f}" if group.paper.std is not None else "")


def _beside_paper(group: Group) -> str:
    spread = spread_of(group.scores())
    return "–" if group.paper is None or spread is None else f"{100 * spread[0] - group.paper.mean:+.2f}"


def ranked(experiment: Experiment) -> list[Group]:
    """Return the groups with the highest mean of the final accuracy first, those without any at the end."""

    def height(group: Group) -> float:
        spread = spread_of(group.scores())
        return spread[0] if spread else float("-inf")

    return sorted(experiment.groups, key=height, reverse=True)


def pairs_of(experiment: Experiment) -> list[Pair]:
    """Return who is told apart from whom, the better first; of many groups only the best against the others."""
    groups = ranked(experiment)
    chosen = list(combinations(groups, 2)) if len(groups) <= _MOST_PAIRED else [(groups[0], g) for g in groups[1:]]
    return [pair_of(first, second) for first, second in chosen]


def paper_pairs(experiment: Experiment) -> list[Pair]:
    """Return the pairs of which the paper has both numbers, in the paper's order.

    Where an algorithm is there with several settings, the one that ended highest stands for it.
    """
    standing: dict[str, Group] = {}
    for group in ranked(experiment):
        if group.paper is not None:
            standing.setdefault(group.name, group)
    ordered = sorted(standing.values(), key=lambda group: -group.paper.mean if group.paper else 0.0)
    return [pair_of(first, second) for first, second in combinations(ordered, 2)]


def pair_of(first: Group, second: Group) -> Pair:
    """Compare two groups with one another and with the paper."""
    ours = difference([100 * value for value in first.scores()], [100 * value for value in second.scores()])
    if first.paper is None or second.paper is None:
        return Pair(first=first, second=second, ours=ours, paper=None)
    apart = round(first.paper.mean - second.paper.mean, 9)
    stds = [paper.std for paper in (first.paper, second.paper) if paper.std is not None]
    within = len(stds) == 2 and abs(apart) <= (stds[0] ** 2 + stds[1] ** 2) ** 0.5
    judged = verdict(ours, apart)
    return Pair(first=first, second=second, ours=ours, paper=apart, within_papers_spread=within, verdict=judged)
