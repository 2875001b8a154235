"""The report page: what is in run folders, on one page that needs no network; and how to repeat it.

``experiments`` sorts runs, ``statistics`` compares them, ``series`` has the curves' numbers, ``page`` makes the page,
``clients`` what it says of single clients, ``figures`` every picture of runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradalign.errors import GradalignError, need, shown_text
from gradalign.recipes.trust import outside_names
from gradalign.report.experiments import Experiment, Group, arrange
from gradalign.runs import readable_name, write_whole
from gradalign.runs.read import Gathered, Skipped, gather

_TABLES = ("task", "algorithm", "server", "local", "clients", "measure")
Settings = dict[tuple[str, str | None], Any]


def write_report(
    folders: Sequence[Path],
    output: Path,
    *,
    title: str | None = None,
    figures: Path | None = None,
    unfinished: bool = False,
) -> Path:
    """Write one self-contained page about all runs in and below the folders, and return its path.

    Args:
        folders: Run folders, comparisons, sweeps, or folders above them.
        output: Where the page goes: its folder is made when it is missing, an old page is replaced at once.
        title: The page's title (default: the experiments' names).
        figures: A folder to write the same figures to, as PDF and PNG.
        unfinished: Show runs that have not finished, too.

    Raises:
        GradalignError: There is no run to report.
    """
    return report_gathered(gather(folders, unfinished=unfinished), output, title=title, figures=figures)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Verdicts on claims: a line of words; tables with their heads first, of the claims and of the settings' sources.

    ``window`` is the last share of a run over whose measurements claims on its end are judged, as the page then is.
    """

    words: str
    claims: Sequence[Sequence[str]]
    sources: Sequence[Sequence[str]]
    window: float


def report_gathered(
    gathered: Gathered,
    output: Path,
    *,
    title: str | None = None,
    figures: Path | None = None,
    on_figure: Callable[[Path], None] | None = None,
    judged: Judged | None = None,
) -> Path:
    """Write the page, and the figures where asked for, about runs read already; ``on_figure`` hears of each figure.

    A run that got past the reader and still cannot be shown moves from ``gathered.runs`` to ``gathered.skipped``.
    Verdicts stand first.
    """
    need_packages(figures=figures is not None)
    from gradalign.report.page import page_bytes

    if not gathered.runs:
        raise GradalignError("there is no finished run to report; give a run's folder, a comparison's, or one above")
    if output.is_dir():
        raise GradalignError(f"{output} is a folder; name the page, for example {output / 'report.html'}")
    if figures is not None and figures.exists() and not figures.is_dir():
        raise GradalignError(f"{figures} is a file; the figures need a folder")
    window = judged.window if judged else 0.0
    try:
        page = page_bytes(arrange(gathered.runs, window), gathered.skipped, title, judged)
    except Exception:
        _set_aside(gathered)
        page = page_bytes(arrange(gathered.runs, window), gathered.skipped, title, judged)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, page)
    if figures is not None:
        from gradalign.report.figures import write_figures

        write_figures(arrange(gathered.runs), figures, on_figure)
    return output


def need_packages(*, figures: bool) -> None:
    """Say in one sentence which package is missing for a page, or for figures."""
    for package in ("jinja2", "plotly", "pydantic", "scipy", "tomli_w"):
        need(package, "report")
    if figures:
        need("matplotlib", "plots")


def _set_aside(gathered: Gathered) -> None:
    """Leave out, by name, each run that cannot be shown even by itself: one folder must not end the whole report."""
    from gradalign.report.page import page_bytes

    shown = []
    for run in gathered.runs:
        try:
            page_bytes(arrange([run]), [])
            shown.append(run)
        except Exception as error:
            reason = shown_text(f"it cannot be shown ({type(error).__name__}: {error})"[:200])
            gathered.skipped.append(Skipped(folder=shown_text(run.folder), reason=reason))
    if not shown:
        raise GradalignError(f"there is no run that can be reported; {gathered.skipped[-1]}")
    gathered.runs = shown


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A recipe as TOML (None when the runs were not made from one), a name for its file, and the commands."""

    recipe: str | None
    file_name: str
    commands: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    """Tasks and algorithms that are not this package's: code that the recipe would run; no command is given for it."""


def how_to_repeat(experiment: Experiment) -> Repeat:
    """Return the recipe that gives these runs again, and the commands."""
    import tomli_w

    file_name = readable_name(experiment.name, "experiment") + ".toml"
    recipe = _recipe(experiment)
    if recipe is None:
        return Repeat(recipe=None, file_name=file_name)
    outside = tuple(dict.fromkeys(name for run in experiment.runs for name in outside_names(run.spec)))
    seeds = sorted({run.seed for run in experiment.runs})
    first, count = seeds[0], len(seeds)
    spans = [(first, count)] if seeds == list(range(first, first + count)) else [(seed, 1) for seed in seeds]
    compare = f"gradalign compare {shlex.quote(file_name)}"
    commands = () if outside else tuple(f"{compare} --seed {seed} --seeds {many}" for seed, many in spans)
    return Repeat(recipe=tomli_w.dumps(recipe), file_name=file_name, commands=commands, outside=outside)


def _recipe(experiment: Experiment) -> dict[str, Any] | None:
    """Return a recipe whose entries have these groups' settings: what all share, and each one's own in [compare]."""
    specs = [spec for group in experiment.groups if (spec := _checked(group)) is not None]
    if len(specs) < len(experiment.groups):
        return None
    entries = [_settings(spec) for spec in specs]
    shared = _shared(entries)
    names = _entry_names(experiment.groups)
    settings = {}
    for name, spec, own in zip(names, specs, entries, strict=True):
        beyond = _as_tables({place: value for place, value in own.items() if place not in shared})
        settings[name] = beyond | {"algorithm": {"name": spec["algorithm"]["name"]} | beyond.get("algorithm", {})}
    seeds = sorted({run.seed for run in experiment.runs})
    compare = {"algorithms": names, "seeds": len(seeds), "equal": "updates", "settings": settings}  # with their rounds
    return _as_tables(shared) | {"seed": seeds[0], "compare": compare}


def _checked(group: Group) -> dict[str, Any] | None:
    """Return a group's settings when a recipe can have them; a run made from Python objects has others."""
    from gradalign.recipes.spec import validate

    spec = {key: value for key, value in group.runs[0].spec.items() if key != "seed"}
    try:
        validated = validate(spec, "the run").to_dict()
    except (GradalignError, RecursionError):
        return None
    return {key: value for key, value in validated.items() if key in spec}


def _entry_names(groups: Sequence[Group]) -> list[str]:
    """Return names that differ also as folders: the algorithm's own where it is there once, else with a number."""
    all_names = [group.name for group in groups]
    numbered = [f"{name}-{1 + all_names[:place].count(name)}" for place, name in enumerate(all_names)]
    return [name if all_names.count(name) == 1 else number for name, number in zip(all_names, numbered, strict=True)]


def _settings(spec: Mapping[str, Any]) -> Settings:
    """Return a spec by table and name; what stands in no table, and what is compared as a whole, has no name."""
    return {
        (table, name): value
        for table, values in spec.items()
        for name, value in (values if table in _TABLES and isinstance(values, Mapping) else {None: values}).items()
    }


def _as_tables(settings: Settings) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    for (table, name), value in settings.items():
        if name is not None:
            spec.setdefault(table, {})[name] = value
        else:
            spec[table] = value
    return spec


def _shared(entries: Sequence[Settings]) -> Settings:
    """Return the settings that all have alike; the algorithm's are always its own.

    So are schedules where the rounds are not alike: those of the recipe would follow an entry's rounds.
    """
    uneven = any(entry.get(("rounds", None)) != entries[0].get(("rounds", None)) for entry in entries)
    return {
        (table, name): value
        for (table, name), value in entries[0].items()
        if table != "algorithm"
        and all(entry.get((table, name)) == value for entry in entries)
        and not (uneven and name is not None and isinstance(value, Mapping))
    }
