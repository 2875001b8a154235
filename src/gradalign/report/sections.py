"""The HTML of one experiment: table, order, controls, figures' places, settings, how to repeat it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradalign.report.experiments import Experiment, settings_of, shown_value
from gradalign.report.folders import shown_text
from gradalign.report.gather import Held
from gradalign.report.order import RULE, overall
from gradalign.report.repeat import how_to_repeat
from gradalign.report.series import AXES, BETA, CHOICES, DRIFT, VARIANCE, Quantity, curves_of, measured
from gradalign.report.table import Pair, comparison_table, paper_pairs, pairs_of

COLOURS = 8
_MOST_DIVISIONS = 5


def text(content: object) -> str:
    """Return text as HTML, safe between tags and in quoted attributes."""
    return html.escape(shown_text(content), quote=True)


def experiment_section(number: int, experiment: Experiment) -> str:
    """Return one experiment's part of the page."""
    return "\n".join(
        (
            f'<section id="experiment-{number}" data-experiment="{number}" aria-labelledby="name-{number}">',
            f'<h2 id="name-{number}">{text(experiment.name)}</h2>',
            _facts(experiment),
            _comparison(experiment),
            _failures(experiment),
            _order(experiment),
            _curves(number, experiment),
            _holdings(number, experiment),
            _settings(experiment),
            _repeat(experiment),
            "</section>",
        )
    )


def _facts(experiment: Experiment) -> str:
    """Say what data and what scale: a subset must not pass for the whole."""
    summaries = [run.summary for run in experiment.runs if run.summary]
    task = next((s["task"] for s in summaries if isinstance(s.get("task"), Mapping)), {})
    facts = {shown_text(key).replace("_", " "): _fact(key, value) for key, value in task.items() if key != "name"}
    seeds = sorted({run.seed for run in experiment.runs})
    lines = {
        "task": shown_value(task.get("name") or _table(experiment.runs[0].spec.get("task")).get("name") or "not named"),
        "data": ", ".join(f"{name} {value}" for name, value in facts.items()) or "not described",
        "scale": " / ".join(_distinct(s.get("scale") for s in summaries)) or "as the recipe has it",
        "seeds": ", ".join(map(str, seeds)),
        "versions": " / ".join(_distinct(_versions(s.get("versions")) for s in summaries)) or "unknown",
    }
    source, claim = experiment.paper_text("source"), experiment.paper_text("claim")
    if source or claim:
        lines["paper"] = ": ".join(part for part in (source, claim) if part)
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in lines.items())
    return f'<dl class="facts">{items}</dl>'


def _fact(key: str, value: Any) -> str:
    if key == "examples_per_client" and isinstance(value, list) and len(value) == 3:
        return "{} to {} (median {})".format(*(shown_value(value[i]) for i in (0, 2, 1)))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown_value(value)


def _versions(given: Any) -> str | None:
    if not isinstance(given, Mapping):
        return None
    return ", ".join(f"{shown_value(name)} {shown_value(value)}" for name, value in given.items())


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(shown_text(value) for value in values if isinstance(value, str)))


def _swatch(number: int) -> str:
    return f'<span class="swatch d{number // COLOURS % 4}" style="--c: var(--c{number % COLOURS})" aria-hidden="true"></span>'


def _comparison(experiment: Experiment) -> str:
    heads, rows = comparison_table(experiment)
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{_swatch(number)}{text(row.label)}</th><td>{text(row.seeds)}</td>'
        + "".join(f"<td>{text(cell)}</td>" for cell in row.cells)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        '<h3>Comparison</h3><div class="wide" role="region" aria-label="Comparison" tabindex="0"><table class="comparison">'
        "<caption>Mean ± standard deviation over the seeds that finished. A round with a gradient phase counts as two "
        'communication rounds.</caption><thead><tr><th scope="col" class="text">algorithm</th>'
        f'<th scope="col">seeds</th>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _failures(experiment: Experiment) -> str:
    items = "".join(
        f'<li class="{run.state}">{text(group.label)}, seed {run.seed}: {run.state}'
        f"{text(': ' + run.failure) if run.failure else ''}</li>"
        for group in experiment.groups
        for run in group.runs
        if run.state != "complete"
    )
    return f"<ul>{items}</ul>" if items else ""


def _order(experiment: Experiment) -> str:
    """Say whether the order is the paper's, or, without the paper's numbers, who is told apart from whom."""
    pairs = paper_pairs(experiment)
    if pairs:
        caption = overall([pair.verdict for pair in pairs if pair.verdict])
        head = ('<th scope="col">paper</th>', '<th scope="col" class="text">order</th>')
    else:
        pairs = [pair for pair in pairs_of(experiment) if pair.ours is not None]
        caption = _told_apart(pairs)
        head = ("", '<th scope="col" class="text">told apart</th>')
    if not pairs:
        return ""
    rows = "".join(_pair_row(pair) for pair in pairs)
    return (
        f"<h3>{'Does the order agree with the paper’s?' if pairs[0].verdict else 'Who is told apart?'}</h3>"
        f'<p class="verdict">{text(caption)}</p><p class="soft">{text(RULE)} Judged by the final test accuracy; differences '
        'in points, ± half the interval.</p><div class="wide" role="region" aria-label="Pairs" tabindex="0"><table>'
        f'<thead><tr><th scope="col" class="text">pair</th><th scope="col">ours</th>{head[0]}{head[1]}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _told_apart(pairs: Sequence[Pair]) -> str:
    decided = sum(pair.ours is not None and pair.ours.decided for pair in pairs)
    if pairs and all(pair.ours is not None and pair.ours.margin is None for pair in pairs):
        return "With one seed each, no difference can be told from chance."
    return f"The seeds tell {decided} of {len(pairs)} pair{'s' * (len(pairs) != 1)} apart."


def _pair_row(pair: Pair) -> str:
    ours = "–"
    if pair.ours is not None:
        ours = f"{pair.ours.value:+.2f}" + (f" ± {pair.ours.margin:.2f}" if pair.ours.margin is not None else "")
    paper = ""
    if pair.paper is not None:
        paper = f"<td>{pair.paper:+.2f}{' (within its own spread)' if pair.within_papers_spread else ''}</td>"
    if pair.verdict is not None:
        word: str = pair.verdict
    elif pair.ours is None or pair.ours.margin is None:
        word = "cannot tell"
    else:
        word = "yes" if pair.ours.decided else "undecided"
    return (
        f'<tr><th scope="row">{text(pair.first.label)} − {text(pair.second.label)}</th><td>{text(ours)}</td>{paper}'
        f'<td class="text {"agrees" if word == "agrees" else "disagrees" if word == "disagrees" else ""}">{text(word)}</td></tr>'
    )


def _radios(name: str, legend: str, field: str, choices: Mapping[str, str]) -> str:
    items = "".join(
        f'<input type="radio" name="{name}" id="{name}-{text(key)}" value="{text(key)}" data-state="{field}"'
        f'{" checked" if place == 0 else ""} autocomplete="off"><label for="{name}-{text(key)}">{text(label)}</label>'
        for place, (key, label) in enumerate(choices.items())
    )
    return f'<fieldset class="choice"><legend>{text(legend)}</legend>{items}</fieldset>'


def _curves(number: int, experiment: Experiment) -> str:
    choices = {q.key: q.label for q in CHOICES if measured(curves_of(experiment, q))}
    if not choices:
        choices = {CHOICES[0].key: CHOICES[0].label}
    small = [_figure(quantity) for quantity in (DRIFT, VARIANCE, BETA) if measured(curves_of(experiment, quantity))]
    return (
        '<h3>Curves</h3><p class="soft">Lines are means over the seeds, bands go from the lowest seed to the highest. '
        "Runs that ended early are dotted, with a cross at their end, and not in the mean.</p>"
        f'<div class="controls">{_radios(f"quantity-{number}", "Curve", "quantity", choices)}'
        f"{_radios(f'axis-{number}', 'over', 'axis', AXES)}"
        '<button type="button" class="mode" data-mode="seeds" aria-pressed="false">Single seeds</button>'
        '<button type="button" class="mode" data-mode="log" aria-pressed="true">Logarithmic loss, r and drift</button></div>'
        f'{_legend(experiment)}{_figure(None)}<div class="pair">{"".join(small)}</div>'
    )


def _legend(experiment: Experiment) -> str:
    items = "".join(
        f'<button type="button" data-group="{number}" aria-pressed="true">{_swatch(number)}'
        f'<span class="name">{text(group.label)}</span></button>'
        for number, group in enumerate(experiment.groups)
    )
    several = ""
    if len(experiment.groups) > 1:
        several = '<button type="button" class="all" data-show="all">all</button>'
        several += '<button type="button" class="all" data-show="none">none</button>'
    if len(experiment.groups) > 12:
        several += '<button type="button" class="all" data-show="best">best 8</button>'
        several += '<span class="soft shown-count" role="status"></span>'
    return f'<div class="legend" role="group" aria-label="Shown algorithms">{items}{several}</div>'


def _figure(quantity: Quantity | None) -> str:
    key = quantity.key if quantity else "choice"
    return (
        f'<div class="figure" data-figure="{key}"><h4></h4><div class="plot" role="img"></div>'
        "<details><summary>Numbers of this figure</summary><div></div></details></div>"
    )


def divisions(experiment: Experiment) -> list[tuple[str, Held]]:
    """Return the first few different divisions of the data, with the seeds that have them."""
    found: list[tuple[list[int], Held]] = []
    for run in experiment.runs:
        if run.held is None:
            continue
        same = next((seeds for seeds, held in found if held == run.held), None)
        if same is not None:
            same.append(run.seed)
        elif len(found) < _MOST_DIVISIONS:
            found.append(([run.seed], run.held))
    return [(f"seed {', '.join(map(str, sorted(set(seeds))))}", held) for seeds, held in found]


def _holdings(number: int, experiment: Experiment) -> str:
    found = divisions(experiment)
    if not found:
        return ""
    held = found[0][1]
    sizes = [sum(row) for row in held.counts]
    classes = [sum(count > 0 for count in row) for row in held.counts]
    shown = f" The first {len(held.counts):,} of {held.clients:,} are shown." if len(held.counts) < held.clients else ""
    words = (
        f"{held.clients:,} clients hold {min(sizes):,} to {max(sizes):,} examples and {min(classes)} to {max(classes)} "
        f"of {len(held.names)} classes each ({found[0][0]}).{shown}"
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
        "<details><summary>Sizes of the clients</summary><div><table><thead><tr>"
        '<th scope="col">client</th><th scope="col">examples</th><th scope="col">classes</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div></details></div>"
    )


def _settings(experiment: Experiment) -> str:
    """Return the settings that all groups share, and a table of those in which they differ."""
    groups = [settings_of(group.runs[0]) for group in experiment.groups]
    keys = list(dict.fromkeys(key for settings in groups for key in settings))
    shared = [key for key in keys if all(key in s and s[key] == groups[0][key] for s in groups)]
    own = [key for key in keys if key not in shared]
    rows = "".join(
        f'<tr><th scope="row">{text(key)}</th><td class="text">{text(shown_value(groups[0][key]))}</td></tr>'
        for key in shared
    )
    heads = "".join(f'<th scope="col">{text(key)}</th>' for key in own)
    lines = "".join(
        f'<tr><th scope="row">{text(group.label)}</th>'
        + "".join(f"<td>{text(shown_value(settings[key]) if key in settings else '–')}</td>" for key in own)
        + "</tr>"
        for group, settings in zip(experiment.groups, groups, strict=True)
    )
    differing = (
        '<div class="wide" role="region" aria-label="Differing settings" tabindex="0"><table><caption>Settings in which they '
        f'differ</caption><thead><tr><th scope="col" class="text">algorithm</th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )
    return (
        f"<h3>Settings</h3>{differing if own and len(groups) > 1 else ''}"
        f"<details><summary>Settings that all share</summary><div><table><tbody>{rows}</tbody></table></div></details>"
    )


def _repeat(experiment: Experiment) -> str:
    repeat = how_to_repeat(experiment)
    folders = "".join(
        f'<tr><th scope="row">{text(group.label)}</th><td>{run.seed}</td><td class="text">{run.state}</td>'
        f'<td class="text"><code>{text(run.folder)}</code></td></tr>'
        for group in experiment.groups
        for run in group.runs
    )
    listed = (
        "<details><summary>Run folders</summary><div><table><thead><tr>"
        '<th scope="col" class="text">algorithm</th><th scope="col">seed</th><th scope="col" class="text">state</th>'
        f'<th scope="col" class="text">folder</th></tr></thead><tbody>{folders}</tbody></table></div></details>'
    )
    if repeat.recipe is None:
        words = "These runs were made from Python with gradalign.run, not from a recipe; their settings are above."
        return f"<h3>To repeat it</h3><p>{words}</p>{listed}"
    link = base64.b64encode(repeat.recipe.encode("utf-8", errors="replace")).decode()
    return (
        f"<h3>To repeat it</h3><p>Save the recipe as {text(repeat.file_name)} and run it; one run alone is repeated with "
        "<code>gradalign run FOLDER/spec.toml</code>.</p>"
        f"<pre><code>{text_lines(repeat.commands)}</code></pre>"
        f'<p><a class="download" download="{text(repeat.file_name)}" href="data:text/plain;base64,{link}">Save the recipe</a></p>'
        f"<details><summary>The recipe</summary><div><pre><code>{text_lines(repeat.recipe.splitlines())}</code></pre>"
        f"</div></details>{listed}"
    )


def text_lines(lines: Iterable[str]) -> str:
    """Return lines as HTML, each escaped by itself so that the breaks between them stay."""
    return "\n".join(text(line) for line in lines)
