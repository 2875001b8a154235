"""Runs sorted into experiments (what is compared) and groups (the seeds of one algorithm with one set of settings)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradalign.errors import shown_text
from gradalign.recipes import found
from gradalign.recipes.papers import papers_accuracy
from gradalign.runs.read import Run, canonical
from gradalign.runs.untrusted import HeldClassCounts, number_of
from gradalign.tracking import flat_settings

_LONGEST_NAME, _LONGEST_LABEL = 80, 300
_NOT_SETTINGS = ("seed", "name", "paper", "full_size")
_SHORT = {"algorithm.beta": "β", "algorithm.mu": "μ", "local.steps": "K"}
_MOST_DIVISIONS = 5


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """What the paper reports for an algorithm, in percent; ``std`` where it gives one."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f}" if self.std is not None else "")


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The runs of one algorithm with one set of settings; they differ in their seeds.

    ``label`` is its whole name, ``short`` what tells it from the others, for a legend.
    """

    label: str
    short: str
    name: str
    runs: tuple[Run, ...]
    paper: PaperNumber | None
    window: float = 0.0
    """The last share of what was spent, over whose measurements accuracies are averaged; 0: the last one alone."""

    @property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.state == "complete"]

    @property
    def scored_on(self) -> str:
        """What its runs were scored on: "test" or "validation"."""
        return self.runs[0].scored_on

    def scores(self) -> list[float]:
        """Return the final accuracy of every run that finished and has it: what groups are judged by."""
        if not self.window:
            return self.finals(f"final_{self.scored_on}_accuracy")
        runs = [run for run in self.complete if run.rows]
        found = (self.score_within(run, "round", run.rows[-1]["round"]) for run in runs)
        return [score for score in found if score is not None]

    def score_within(self, run: Run, axis: str, most: float) -> float | None:
        """Return a run's accuracy by what it had spent up to there: its last measurement, or its mean over a window."""
        key = f"{self.scored_on}_accuracy"
        within = [row for row in run.rows if axis in row and row[axis] <= most]
        known = [row[key] for row in within if key in row and (not self.window or row[axis] > (1 - self.window) * most)]
        return None if not known else fmean(known) if self.window else known[-1]

    def finals(self, name: str) -> list[float]:
        """Return one number of the summaries, of every run that finished and has it."""
        found = (number_of(run.summary.get(name)) for run in self.complete)
        return [value for value in found if value is not None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What was compared: groups on one task."""

    name: str
    groups: tuple[Group, ...]

    @property
    def scored_on(self) -> str:
        return self.groups[0].scored_on

    @property
    def scored_by(self) -> str:
        """What groups are judged by, in words."""
        window = self.groups[0].window
        words = f"{self.scored_on} accuracy"
        return f"{words} over the last {100 * window:.0f} % of the run" if window else f"final {words}"

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    def paper_text(self, key: str) -> str | None:
        """Return the paper's ``source`` or ``claim`` as the recipe has it."""
        texts = (found(run.spec, "paper", key) for run in self.runs)
        return next((shown_text(text) for text in texts if isinstance(text, str)), None)


def arrange(runs: Iterable[Run], window: float = 0.0) -> list[Experiment]:
    """Sort runs into experiments and groups; what was scored on held-out training data comes last, by itself.

    ``window`` is the last share of a run over which its accuracy is averaged.
    """
    sorted_out: dict[str, list[Run]] = {}
    of_comparison: dict[Path, str] = {}
    for run in runs:
        key = canonical([run.spec.get("name"), run.spec.get("task"), run.scored_on])
        if run.comparison is not None:  # its entries belong together whatever they vary
            key = of_comparison.setdefault(run.comparison, key)
        sorted_out.setdefault(key, []).append(run)
    found = (_experiment(own, window) for own in sorted_out.values())
    return sorted(found, key=lambda experiment: experiment.scored_on)


def settings_of(run: Run) -> dict[str, Any]:
    """Return a run's settings by dotted name, without its seed, its name and what is only told."""
    own = {key: value for key, value in run.spec.items() if key not in _NOT_SETTINGS}
    return {shown_text(key): value for key, value in flat_settings(own).items()}


def divisions(experiment: Experiment) -> list[tuple[str, HeldClassCounts]]:
    """Return the first few divisions of the data, with their seeds; with the groups' names where a seed has several."""
    differing: list[tuple[HeldClassCounts, dict[int, None], dict[str, None]]] = []
    for group, run in ((own, run) for own in experiment.groups for run in own.runs):
        same = next((one for one in differing if one[0] == run.held), None)
        if same is not None:
            same[1][run.seed] = same[2][group.short] = None
        elif run.held is not None and len(differing) < _MOST_DIVISIONS:
            differing.append((run.held, {run.seed: None}, {group.short: None}))
    seeds = [seed for _, own, _ in differing for seed in own]
    words = [f" ({', '.join(names)})" if len(set(seeds)) < len(seeds) else "" for _, _, names in differing]
    pairs = zip(differing, words, strict=True)
    return [(f"seed {', '.join(map(str, sorted(own)))}{whose}", counts) for (counts, own, _), whose in pairs]


def _experiment(runs: Sequence[Run], window: float) -> Experiment:
    grouped: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.place):
        grouped.setdefault(canonical([_name_of(run), settings_of(run)]), []).append(run)
    members = [sorted(group, key=lambda run: run.seed) for group in grouped.values()]
    firsts = [group[0] for group in members]
    groups = [
        Group(label=label, short=short, name=name, runs=tuple(own), paper=_paper_number(own[0]), window=window)
        for (label, short), name, own in zip(_labels(members), map(_name_of, firsts), members, strict=True)
    ]
    first = runs[0].spec
    name = first.get("name") or found(first, "task", "name") or "experiment"
    scored = " (validation data)" if groups[0].scored_on == "validation" else ""
    return Experiment(name=_short_text(name) + scored, groups=tuple(groups))


def _name_of(run: Run) -> str:
    return run.entry or shown_text(run.spec["algorithm"]["name"])


def _labels(groups: Sequence[Sequence[Run]]) -> list[tuple[str, str]]:
    """Name every group, wholly and shortly; where several have one algorithm, by the settings in which those differ.

    Where all have it, those settings alone are the short name.
    """
    known = [(_name_of(group[0]), settings_of(group[0])) for group in groups]
    alike = len({name for name, _ in known}) == 1
    labels = []
    for name, own in known:
        rivals = [settings for other, settings in known if other == name]
        differing = [key for key in own if any(rival.get(key) != own[key] for rival in rivals)]
        words = ", ".join(f"{_SHORT.get(key, key.split('.')[-1])}={shown_value(own[key])}" for key in sorted(differing))
        whole = f"{name} ({words})" if words else name
        labels.append((_short_text(whole, _LONGEST_LABEL), _short_text(words if words and alike else whole)))
    return labels


def shown_value(value: Any) -> str:
    """Return a setting as the recipe would have it, short."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else _short_text(value)


def _short_text(text: object, longest: int = _LONGEST_NAME) -> str:
    shown = shown_text(text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _paper_number(run: Run) -> PaperNumber | None:
    """Return the paper's accuracy, which is one on test data of its problem: nothing else is set beside it."""
    given = papers_accuracy(run.spec, _name_of(run)) if run.scored_on == "test" else None
    values = [number_of(value) for value in (given if isinstance(given, list) else [given])]
    if not values or values[0] is None:
        return None
    return PaperNumber(mean=values[0], std=values[1] if len(values) > 1 else None)
