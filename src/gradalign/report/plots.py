"""The HTML around the figures: controls that are real radio buttons and buttons, and the data beside each figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradalign.report.experiments import Experiment
from gradalign.report.markup import heads, swatch, text
from gradalign.report.series import (
    AXES,
    BETA,
    CHOICES,
    DRIFT,
    MOST_SHOWN,
    VARIANCE,
    Quantity,
    Series,
    measured,
)
from gradalign.report.table import MOST_UNSORTED
from gradalign.runs.read import HeldClassCounts

_MOST_DIVISIONS = 5


def curves_part(number: int, experiment: Experiment, series: Series) -> str:
    """Return the controls, the legend and the figures' places; the page's script fills them."""
    choices = {q.key: q.label for q in CHOICES if measured(series[q.key])}
    if not choices:
        choices = {CHOICES[0].key: CHOICES[0].label}
    axes = {key: label.split(",")[0] for key, label in AXES.items()}
    small = [_figure(quantity) for quantity in (DRIFT, VARIANCE, BETA) if measured(series[quantity.key])]
    return (
        '<h3>Curves</h3><p class="soft">Lines are means over the seeds, bands go from the lowest seed to the highest. '
        "Runs that ended early are dotted, with a cross at their end, and not in the mean.</p>"
        f'<div class="controls">{_radios(f"quantity-{number}", "Curve", "quantity", choices)}'
        f"{_radios(f'axis-{number}', 'over', 'axis', axes)}"
        f"{_mode('seeds', 'Single seeds', 'false')}{_mode('log', 'Logarithmic loss, r and drift', 'true')}</div>"
        f'{_legend(experiment)}{_figure(None)}<div class="pair">{"".join(small)}</div>'
    )


def _mode(name: str, label: str, pressed: str) -> str:
    return f'<button type="button" class="mode" data-mode="{name}" aria-pressed="{pressed}">{text(label)}</button>'


def _radios(name: str, legend: str, field: str, choices: Mapping[str, str]) -> str:
    items = "".join(
        f'<input type="radio" name="{name}" id="{name}-{text(key)}" value="{text(key)}" data-state="{field}"'
        f'{" checked" if place == 0 else ""} autocomplete="off"><label for="{name}-{text(key)}">{text(label)}</label>'
        for place, (key, label) in enumerate(choices.items())
    )
    return f'<fieldset class="choice"><legend>{text(legend)}</legend>{items}</fieldset>'


def _legend(experiment: Experiment) -> str:
    items = "".join(
        f'<button type="button" data-group="{number}" aria-pressed="true">{swatch(number)}'
        f'<span class="name">{text(group.label)}</span></button>'
        for number, group in enumerate(experiment.groups)
    )
    several = ""
    if len(experiment.groups) > 1:
        several = '<button type="button" class="all" data-show="all">all</button>'
        several += '<button type="button" class="all" data-show="none">none</button>'
    if len(experiment.groups) > MOST_UNSORTED:
        several += f'<button type="button" class="all" data-show="best">best {MOST_SHOWN}</button>'
        several += '<span class="soft shown-count" role="status"></span>'
    return f'<div class="legend" role="group" aria-label="Shown algorithms">{items}{several}</div>'


def _figure(quantity: Quantity | None) -> str:
    key = quantity.key if quantity else "choice"
    return (
        f'<div class="figure" data-figure="{key}"><h4></h4><div class="plot" role="img"></div>'
        "<details><summary>Numbers of this figure</summary><div></div></details></div>"
    )


def divisions(experiment: Experiment) -> list[tuple[str, HeldClassCounts]]:
    """Return the first few different divisions of the data, with the seeds that have them."""
    found: list[tuple[list[int], HeldClassCounts]] = []
    for run in experiment.runs:
        if run.held is None:
            continue
        same = next((seeds for seeds, held in found if held == run.held), None)
        if same is not None:
            same.append(run.seed)
        elif len(found) < _MOST_DIVISIONS:
            found.append(([run.seed], run.held))
    return [(f"seed {', '.join(map(str, sorted(set(seeds))))}", held) for seeds, held in found]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def class_counts_part(number: int, experiment: Experiment) -> str:
    """Return the place of the picture of who holds what, and its numbers; nothing where no folder has them."""
    found = divisions(experiment)
    if not found:
        return ""
    held = found[0][1]
    sizes = [sum(row) for row in held.counts]
    classes = [sum(count > 0 for count in row) for row in held.counts]
    shown = f" The first {len(held.counts):,} of {held.clients:,} are shown." if len(held.counts) < held.clients else ""
    words = (
        f"{held.clients:,} clients hold {_range(sizes)} examples and {_range(classes)} of {len(held.names)} classes "
        f"each ({found[0][0]}).{shown}"
    )
    radios = _radios(f"held-{number}", "Division of", "held", {str(i): name for i, (name, _) in enumerate(found)})
    body = "".join(
        f'<tr><th scope="row">{client}</th><td>{size:,}</td><td>{count}</td></tr>'
        for client, (size, count) in enumerate(zip(sizes, classes, strict=True))
    )
    return (
        f"<h3>Who holds what</h3><p>{text(words)}</p>"
        f'<div class="controls">{radios if len(found) > 1 else ""}</div>'
        f'<div class="figure holdings"><div class="plot" role="img" aria-label="{text(words)}"></div>'
        f"<details><summary>Sizes of the clients</summary><div><table>{heads('client', 'examples', 'classes', left=0)}"
        f"<tbody>{body}</tbody></table></div></details></div>"
    )
