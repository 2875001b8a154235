r"""The page: one HTML file with everything in it, that asks the network for nothing.

Names come from folders that anybody may have written. Three walls: ``html.escape`` in text and attributes, ``<`` and
its kin as ``\u003c`` in the embedded data, and a policy that lets the browser run only the two scripts whose hashes it
names and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from typing import Any

from gradalign._version import __version__
from gradalign.report.experiments import Experiment
from gradalign.report.markup import COLOURS, text
from gradalign.report.plots import divisions
from gradalign.report.sections import experiment_section
from gradalign.report.series import AXES, CHOICES, QUANTITIES, Series, best_groups, measured, series_of, shown_groups
from gradalign.runs.find import Skipped
from gradalign.runs.untrusted import shown_text

_DARK = """
  color-scheme: dark;
  --ground: #14171b; --panel: #1f242a; --ink: #e8eaed; --soft: #a3acb5; --line: #3a424b; --grid: #2a3037;
  --accent: #79b8ff; --on-accent: #10151b; --good: #7ee787; --bad: #ff9492;
  --c0: #58a6e0; --c1: #ff8a4c; --c2: #2fc79a; --c3: #e39ac6;
  --c4: #f0b53a; --c5: #a5d8ff; --c6: #f0f0f0; --c7: #9aa0a6;
"""


def page_bytes(experiments: Sequence[Experiment], skipped: Sequence[Skipped], title: str | None = None) -> bytes:
    """Return the whole page."""
    from plotly.offline import get_plotlyjs

    heading = shown_text(title) if title else _heading(experiments)
    library, script = _inert(get_plotlyjs()), _own("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    series = [series_of(experiment) for experiment in experiments]
    sections = "\n".join(
        experiment_section(number, one, curves, alone=len(experiments) == 1)
        for number, (one, curves) in enumerate(zip(experiments, series, strict=True))
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="gradalign {text(__version__)}">
<title>{text(heading)} – gradalign report</title>
<link rel="icon" href="data:,">
<style>{_style()}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the results</a>
<header>
<h1>{text(heading)}</h1>
<button type="button" class="theme" hidden>Dark page</button>
</header>
<main id="content" tabindex="-1">
<noscript><p>The tables are all here; the curves need JavaScript, which this page carries itself.</p></noscript>
{_contents(experiments)}
{sections}
{_skipped(skipped)}
</main>
<footer>Made by gradalign {text(__version__)} on {datetime.now():%Y-%m-%d %H:%M}. This page loads nothing.</footer>
<script type="application/json" id="data">{embedded(page_data(experiments, series))}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""
    return page.encode("utf-8", errors="replace")


def _heading(experiments: Sequence[Experiment]) -> str:
    names = list(dict.fromkeys(experiment.name for experiment in experiments))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def page_data(experiments: Sequence[Experiment], series: Sequence[Series]) -> dict[str, Any]:
    """Return the numbers that the page's script draws."""
    return {
        "axes": AXES,
        "quantities": {quantity.key: asdict(quantity) for quantity in QUANTITIES},
        "experiments": [_experiment_data(one, curves) for one, curves in zip(experiments, series, strict=True)],
    }


def _experiment_data(experiment: Experiment, curves: Series) -> dict[str, Any]:
    chosen = [quantity.key for quantity in CHOICES if measured(curves[quantity.key])]
    return {
        "groups": [
            {
                "label": group.label,
                "seeds": len(group.complete),
                "colour": number % COLOURS,
                "dash": number // COLOURS % 4,
            }
            for number, group in enumerate(experiment.groups)
        ],
        "choices": chosen or [CHOICES[0].key],
        "best": best_groups(experiment),
        "shown": shown_groups(experiment),
        "curves": {key: [asdict(curve) for curve in group_curves] for key, group_curves in curves.items()},
        "held": [asdict(held) for _, held in divisions(experiment)],
    }


def embedded(data: Any) -> str:
    """Return JSON that may stand in a script element: nothing in it can end the element or a line."""
    code = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return code.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _inert(script: str) -> str:
    """Return a script whose own strings cannot end the element it stands in; in JavaScript it says the same."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _own(name: str) -> str:
    return (files("gradalign.report") / name).read_text(encoding="utf-8")


def _style() -> str:
    dark = f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{{_DARK}}} }}"
    return _own("page.css").replace("/*DARK*/", f"{dark}\n:root[data-theme=dark] {{{_DARK}}}")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _contents(experiments: Sequence[Experiment]) -> str:
    if len(experiments) < 2:
        return ""
    items = "".join(
        f'<li><a href="#experiment-{number}">{text(one.name)}</a> '
        f'<span class="soft">({len(one.runs)} run{"s" * (len(one.runs) != 1)})</span></li>'
        for number, one in enumerate(experiments)
    )
    return f'<nav aria-label="Experiments"><ul>{items}</ul></nav>'


def _skipped(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return ""
    items = "".join(f"<li><code>{text(one.folder)}</code>: {text(one.reason)}</li>" for one in skipped)
    return f'<section class="skipped"><h2>Not in this report</h2><ul>{items}</ul></section>'
