r"""The page: one HTML file with everything in it, that asks the network for nothing.

Names come from folders that anybody may have written. Three walls: Jinja2 escapes every value in ``page.html.j2``,
``<`` and its kin are ``\u003c`` in the embedded data, and a policy lets the browser run only the two scripts whose
hashes it names and load nothing. In ``page.js``, names reach plotly as entities.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from gradalign import __version__
from gradalign.errors import shown_text
from gradalign.recipes.papers import NUMBERS_LEFT_OUT, is_papers_problem
from gradalign.report import Judged, budgets, how_to_repeat, series, statistics
from gradalign.report.clients import clients_section
from gradalign.report.experiments import Experiment, divisions, settings_of, shown_value
from gradalign.report.series import Curve, measured
from gradalign.runs.read import Skipped

_Curves = Mapping[str, Sequence[Curve]]  # every quantity's, one for each group
_COLOURS = 8  # of the page; further groups have them again with other line styles


def page_bytes(
    experiments: Sequence[Experiment],
    skipped: Sequence[Skipped],
    title: str | None = None,
    judged: Judged | None = None,
) -> bytes:
    from plotly.offline import get_plotlyjs

    library, script = _inert(get_plotlyjs()), _own("page.js")
    drawn = [(one, {kind.key: series.curves_of(one, kind) for kind in series.QUANTITIES}) for one in experiments]
    data = {
        "axes": series.AXES,
        "short_axes": series.SHORT_AXES,
        "quantities": {kind.key: asdict(kind) for kind in series.QUANTITIES},
        "experiments": [_experiment_data(one, curves) for one, curves in drawn],
    }
    page = _template().render(
        version=__version__,
        colours=_COLOURS,
        most_shown=series.MOST_SHOWN,
        most_unsorted=statistics.MOST_UNSORTED,
        rule=statistics.RULE,
        paper_rule=statistics.PAPER_RULE,
        axes=series.SHORT_AXES,
        heading=title or _heading(experiments),
        policy=_policy(library, script),
        style=_style(),
        sections=[_section(one, curves) for one, curves in drawn],
        skipped=skipped,
        judged=judged,
        now=f"{datetime.now():%Y-%m-%d %H:%M}",
        data=htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":")),
        library=library,
        script=script,
    )
    return page.encode("utf-8", errors="replace")


@cache
def _template() -> Template:
    def clean(value: object) -> object:
        """Prepare what is about to be escaped; markup that the template has made itself is clean already."""
        return value if isinstance(value, Markup) else shown_text(value)

    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=clean)
    return made.from_string(_own("page.html.j2"))


def _own(name: str) -> str:
    return (files("gradalign.report") / name).read_text(encoding="utf-8")


def _inert(script: str) -> str:
    """Return a script whose own strings cannot end the element it stands in; in JavaScript it says the same."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _style() -> str:
    style = _own("page.css")
    dark = style.partition(":root[data-theme=dark]")[2].partition("}")[0]
    return f"{style}\n@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {dark}}} }}"


def _policy(*scripts: str) -> str:
    """Let the browser run these scripts and load nothing."""
    digests = [hashlib.sha256(script.encode("utf-8")).digest() for script in scripts]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )


def _heading(experiments: Sequence[Experiment]) -> str:
    names = list(dict.fromkeys(experiment.name for experiment in experiments))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _experiment_data(experiment: Experiment, curves: _Curves) -> dict[str, Any]:
    groups = [
        {
            "label": group.label,
            "short": group.short,
            "seeds": len(group.complete),
            "colour": n % _COLOURS,
            "dash": n // _COLOURS % 4,
        }
        for n, group in enumerate(experiment.groups)
    ]
    return {
        "groups": groups,
        "choices": list(_choices(curves)),
        "best": series.best_groups(experiment),
        "shown": series.shown_groups(experiment),
        "curves": {key: [asdict(curve) for curve in group_curves] for key, group_curves in curves.items()},
        "class_counts": [asdict(counts) for _, counts in divisions(experiment)],
    }


def _choices(curves: _Curves) -> dict[str, str]:
    shown = [kind for kind in series.CHOICES if measured(curves[kind.key])] or series.CHOICES[:1]
    return {kind.key: kind.label for kind in shown}


def _section(experiment: Experiment, curves: _Curves) -> dict[str, Any]:
    """Return what the template says of one experiment."""
    columns, rows = statistics.comparison_table(experiment)
    repeat = how_to_repeat(experiment)
    return {
        "experiment": experiment,
        "facts": _facts(experiment),
        "columns": list(columns),
        "rows": rows,
        "failures": [(group, run) for group in experiment.groups for run in group.runs if run.state != "complete"],
        "views": budgets.equal_views(experiment),
        "target": budgets.to_target(experiment),
        "order": _order(experiment),
        "choices": _choices(curves),
        "small_figures": [quantity.key for quantity in series.SMALL if measured(curves[quantity.key])],
        "classes": _classes(experiment),
        "clients": clients_section(experiment),
        **_settings(experiment),
        "repeat": repeat,
        "recipe_base64": base64.b64encode((repeat.recipe or "").encode("utf-8", errors="replace")).decode(),
    }


def _facts(experiment: Experiment) -> dict[str, str]:
    """Say what data and what scale: a subset must not pass for the whole."""
    summaries = [run.summary for run in experiment.runs if run.summary]
    asked = experiment.runs[0].spec.get("task", {})
    task: Mapping[str, Any] = next((s["task"] for s in summaries if isinstance(s.get("task"), Mapping)), asked)
    data = [f"{shown_text(key).replace('_', ' ')} {_fact(key, task[key])}" for key in task if key != "name"]
    versions = [
        ", ".join(f"{shown_value(name)} {shown_value(value)}" for name, value in s["versions"].items())
        for s in summaries
        if isinstance(s.get("versions"), Mapping)
    ]
    paper = ": ".join(filter(None, (experiment.paper_text("source"), experiment.paper_text("claim"))))
    if paper and not any(is_papers_problem(run.spec) for run in experiment.runs):
        paper = f"{paper}; {NUMBERS_LEFT_OUT}"
    return {
        "task": shown_value(task.get("name") or asked.get("name") or "not named"),
        "data": ", ".join(data) or "not described",
        "scale": _distinct(s.get("scale") for s in summaries) or "as the recipe has it",
        "seeds": ", ".join(map(str, sorted({run.seed for run in experiment.runs}))),
        "versions": _distinct(versions) or "unknown",
    } | ({"paper": paper} if paper else {})


def _fact(key: str, value: Any) -> str:
    if key == "examples_per_client" and isinstance(value, list) and len(value) == 3:
        least, median, most = map(shown_value, value)
        return f"{least} to {most} (median {median})"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown_value(value)


def _distinct(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(value for value in values if value and isinstance(value, str)))


def _order(experiment: Experiment) -> dict[str, Any] | None:
    """Say whether the order is the paper's; None without the paper's numbers."""
    pairs = statistics.paper_pairs(experiment)
    answer = statistics.overall([pair.verdict for pair in pairs if pair.verdict])
    return {"answer": answer, "columns": ["pair", "ours", "paper", "order"], "rows": pairs} if pairs else None


def _classes(experiment: Experiment) -> dict[str, Any] | None:
    """Describe the division of the data; None where no folder has it."""
    found = divisions(experiment)
    if not found:
        return None
    seeds, counts = found[0]
    sizes = [(sum(row), sum(count > 0 for count in row)) for row in counts.counts]
    examples, classes = (_range(column) for column in zip(*sizes, strict=True))
    words = f"{counts.clients:,} clients have {examples} examples and {classes} of {len(counts.names)} classes each"
    few = f" The first {len(sizes):,} of {counts.clients:,} are shown." if len(sizes) < counts.clients else ""
    words = f"{words} ({seeds}).{few}"
    return {"words": words, "divisions": {str(i): name for i, (name, _) in enumerate(found)}, "sizes": sizes}


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that all groups share, and a table of those in which they differ."""
    pairs = [(group.label, settings_of(group.runs[0])) for group in experiment.groups]
    first = pairs[0][1]
    keys = dict.fromkeys(key for _, settings in pairs for key in settings)
    shared = [key for key in keys if all(key in s and s[key] == first.get(key) for _, s in pairs)]
    named = all(settings.get("algorithm.name") == label for label, settings in pairs)
    own = [key for key in keys if key not in shared and not (named and key == "algorithm.name")]
    rows = [(label, [shown_value(settings.get(key, "–")) for key in own]) for label, settings in pairs]
    return {
        "shared_settings": {key: shown_value(first[key]) for key in shared},
        "own_settings": own if len(pairs) > 1 else [],
        "settings": rows,
    }
