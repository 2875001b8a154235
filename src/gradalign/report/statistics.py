"""Is one algorithm better than another, and does the paper say so too? The seeds' results compared, and as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev, variance
from typing import Literal

from gradalign.report.experiments import Experiment, Group

RULE = (
    "Two algorithms are told apart when the 95 % confidence interval of the difference of their means over the seeds "
    "(Welch's t) leaves out zero; else the pair is undecided, within the spread of the seeds; with one seed nothing "
    "can be told."
)
PAPER_RULE = "The order of a pair that is told apart agrees or disagrees with the order of the paper's means."
MOST_UNSORTED = 12  # groups in the order of their comparison; of more, the best come first
_MOST_PAIRED = 8

Scores = Callable[[Group], Sequence[float]]
Verdict = Literal["agrees", "disagrees", "undecided", "cannot tell", "equal in the paper"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two means and half the width of its 95 % interval; no width when a side has one seed."""

    value: float
    margin: float | None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.margin is not None and abs(self.value) > self.margin


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
    paper: float | None = None
    within_papers_spread: bool = False
    verdict: Verdict | None = None

    @property
    def names(self) -> str:
        """What was subtracted from what."""
        return f"{self.first.short} − {self.second.short}"

    @property
    def cells(self) -> list[str]:
        """The differences as text: ours, and the paper's where it has one."""
        ours = "–" if self.ours is None else f"{self.ours.value:+.2f}"
        if self.ours is not None and self.ours.margin is not None:
            ours += f" ± {self.ours.margin:.2f}"
        if self.paper is None:
            return [ours]
        return [ours, f"{self.paper:+.2f}" + (" (within its own spread)" if self.within_papers_spread else "")]

    @property
    def word(self) -> str:
        """The verdict; without the paper's numbers, whether the two are told apart."""
        if self.verdict is not None:
            return self.verdict
        if self.ours is None or self.ours.margin is None:
            return "cannot tell"
        return "yes" if self.ours.decided else "undecided"


def spread_of(values: Sequence[float]) -> dict[str, float | None] | None:
    """Return mean and sample standard deviation; one value alone has no deviation, none at all has nothing."""
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None} if values else None


def spread_words(spread: Mapping[str, float | None] | None, form: str, scale: float = 1.0) -> str:
    """Return mean ± std; one seed alone has no deviation."""
    if spread is None or spread["mean"] is None:
        return "–"
    mean = format(scale * spread["mean"], form)
    return mean if spread["std"] is None else f"{mean} ± {format(scale * spread['std'], form)}"


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Return by how much the first algorithm's mean is above the second's (Welch); None when one has no result."""
    from scipy.special import stdtrit  # Student's quantile; scipy.stats has the same behind a second of imports

    if not first or not second:
        return None
    value = fmean(first) - fmean(second)
    if len(first) < 2 or len(second) < 2:
        return Difference(value=value, margin=None)
    parts = [(variance(values) / len(values), len(values) - 1) for values in (first, second)]
    squared = sum(part for part, _ in parts)
    if squared == 0.0:
        return Difference(value=value, margin=0.0)
    # As shares of the whole: the square of a tiny variance is zero.
    freedom = 1 / sum((part / squared) ** 2 / count for part, count in parts)
    return Difference(value=value, margin=float(stdtrit(freedom, 0.975)) * math.sqrt(squared))


def verdict(ours: Difference | None, paper: float) -> Verdict:
    """Judge a pair: ``paper`` is the paper's mean of the first minus that of the second."""
    if paper == 0.0:
        return "equal in the paper"
    if ours is None or ours.margin is None:
        return "cannot tell"
    if not ours.decided:
        return "undecided"
    return "agrees" if (ours.value > 0) == (paper > 0) else "disagrees"


def overall(verdicts: Sequence[Verdict]) -> str:
    """Say of all pairs together whether the order is the paper's."""
    words: dict[Verdict, str] = {
        "agrees": "agrees in",
        "disagrees": "disagrees in",
        "undecided": "is within the seeds' spread in",
        "cannot tell": "cannot be told in",
    }
    counts = {word: count for word in words if (count := verdicts.count(word))}
    total = sum(counts.values())
    if total == 0:
        return "There is no pair to compare with the paper."
    if list(counts) == ["agrees"]:
        return f"The order agrees with the paper's in all {total} pairs." if total > 1 else "The order is the paper's."
    if list(counts) == ["cannot tell"]:
        return "Whether the order agrees with the paper's cannot be told: that takes at least two finished seeds each."
    start = "It cannot be told whether the order agrees"
    if "disagrees" in counts:
        start = "The order does not agree with the paper's"
    elif "agrees" in counts:
        start = "Nothing contradicts the paper's order"
    return f"{start}: of {total} pairs it {', '.join(f'{words[word]} {counts[word]}' for word in counts)}."


def told_apart(pairs: Sequence[Pair]) -> str:
    """Say of how many pairs the seeds tell which is better; where one side has a single seed they never do."""
    single = sum(pair.ours is None or pair.ours.margin is None for pair in pairs)
    if single == len(pairs):
        return "no difference can be told from chance: that takes at least two finished seeds of both."
    decided = sum(pair.ours is not None and pair.ours.decided for pair in pairs)
    nothing = " or was not measured there" if any(pair.ours is None for pair in pairs) else ""
    more = f" ({single} of them cannot be, because one side has a single seed{nothing})" if single else ""
    return f"the seeds tell {decided} of {len(pairs)} pair{'s' * (len(pairs) != 1)} apart{more}."


def ranked(experiment: Experiment) -> list[Group]:
    """Return the groups with the highest mean of the final accuracy first, those without any at the end."""
    return sorted(experiment.groups, key=lambda group: fmean(group.scores() or [-math.inf]), reverse=True)


def in_order(experiment: Experiment) -> Sequence[Group]:
    """Return the groups as a table has them: in their own order, of many the best first."""
    return experiment.groups if len(experiment.groups) <= MOST_UNSORTED else ranked(experiment)


def pairs_of(experiment: Experiment, scores: Scores) -> list[Pair]:
    """Return all pairs, by these accuracies, the one that ended higher first; of many only the best with the others."""
    groups = ranked(experiment)
    chosen = list(combinations(groups, 2)) if len(groups) <= _MOST_PAIRED else [(groups[0], g) for g in groups[1:]]
    return [Pair(first=first, second=second, ours=_apart(first, second, scores)) for first, second in chosen]


def _apart(first: Group, second: Group, scores: Scores) -> Difference | None:
    return difference(*([100 * value for value in scores(group)] for group in (first, second)))


def paper_pairs(experiment: Experiment) -> list[Pair]:
    """Return the pairs of which the paper has both numbers, in the paper's order.

    Where an algorithm is there with several settings, the one that ended highest stands for it.
    """
    standing: dict[str, Group] = {}
    for group in ranked(experiment):
        if group.paper is not None:
            standing.setdefault(group.name, group)
    ordered = sorted(standing.values(), key=lambda group: -group.paper.mean if group.paper else 0.0)
    return [_paper_pair(first, second) for first, second in combinations(ordered, 2)]


def _paper_pair(first: Group, second: Group) -> Pair:
    ours = _apart(first, second, Group.scores)
    if first.paper is None or second.paper is None:
        return Pair(first=first, second=second, ours=ours)
    apart = round(first.paper.mean - second.paper.mean, 9)
    stds = [paper.std for paper in (first.paper, second.paper) if paper.std is not None]
    within = len(stds) == 2 and abs(apart) <= math.hypot(*stds)
    judged = verdict(ours, apart)
    return Pair(first=first, second=second, ours=ours, paper=apart, within_papers_spread=within, verdict=judged)


def comparison_table(experiment: Experiment) -> tuple[tuple[str, ...], list[TableRow]]:
    """Return the heads of the columns after algorithm and seeds, and the rows; of many groups the best come first."""
    groups, on = experiment.groups, experiment.scored_on
    scored, with_paper = any(group.scores() for group in groups), any(group.paper for group in groups)
    heads = [f"{experiment.scored_by}, %", f"best {on} accuracy, %"] if scored else []
    heads += ["paper, %", "ours − paper"] if with_paper else []
    heads += [f"final {on} loss", "final r(x)", "communication rounds", "seconds"]
    rows = []
    for group in in_order(experiment):
        cells = []
        if scored:
            cells += [in_percent(group.scores()), in_percent(group.finals(f"best_{group.scored_on}_accuracy"))]
        if with_paper:
            cells += ["–" if group.paper is None else str(group.paper), _beside_paper(group)]
        cells += [
            mean_and_std(group.finals(f"final_{group.scored_on}_loss"), ".4g"),
            mean_and_std(group.finals("final_r"), ".3g"),
            mean_and_std(group.finals("communication_rounds"), ",.0f"),
            mean_and_std(group.finals("seconds"), ".3g"),
        ]
        number = groups.index(group)
        rows.append(TableRow(number=number, label=group.label, seeds=_seeds(group), cells=tuple(cells)))
    return tuple(heads), rows


def _seeds(group: Group) -> str:
    words = [str(len(group.complete))]
    for state in ("diverged", "unfinished"):
        count = sum(run.state == state for run in group.runs)
        words += [f"{count} {state}"] if count else []
    return " + ".join(words)


def in_percent(values: Sequence[float]) -> str:
    """Return shares as a text in percent, mean ± standard deviation."""
    return mean_and_std([100 * value for value in values], ".2f")


def mean_and_std(values: Sequence[float], form: str) -> str:
    """Return mean ± standard deviation as text; one value alone has no deviation."""
    std = stdev(values) if len(values) > 1 else None
    if std == 0 and form.endswith(".0f"):  # a count that no seed changes
        values = values[:1]
    elif std and form.endswith("g"):  # two digits of the deviation, and as many decimals of the mean
        form = f".{min(max(1 - math.floor(math.log10(std)), 0), 12)}f"
    return spread_words(spread_of(values), form)


def _beside_paper(group: Group) -> str:
    scores = group.scores()
    return f"{100 * fmean(scores) - group.paper.mean:+.2f}" if group.paper is not None and scores else "–"
