"""The HTML of one experiment: what was run, the comparison, and whether the order is the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradalign.report.appendix import repeat_part, settings_part
from gradalign.report.experiments import Experiment, shown_value
from gradalign.report.markup import folded, heads, swatch, table_of, text, wide_table
from gradalign.report.order import PAPER_RULE, RULE, overall
from gradalign.report.plots import class_counts_part, curves_part
from gradalign.report.series import Series
from gradalign.report.table import Pair, comparison_table, pairs_of, paper_pairs
from gradalign.runs.untrusted import shown_text

_SHORT = 28  # letters of a name that still fit into one line


def experiment_section(number: int, experiment: Experiment, series: Series, *, alone: bool) -> str:
    """Return one experiment's part of the page."""
    name = "What was run" if alone else experiment.name  # alone, its name is the page's title
    return "\n".join(
        (
            f'<section id="experiment-{number}" data-experiment="{number}" aria-labelledby="name-{number}">',
            f'<h2 id="name-{number}">{text(name)}</h2>',
            _facts(experiment),
            _comparison(experiment),
            _failures(experiment),
            _order(experiment),
            curves_part(number, experiment, series),
            class_counts_part(number, experiment),
            settings_part(experiment),
            repeat_part(experiment),
            "</section>",
        )
    )


def _facts(experiment: Experiment) -> str:
    """Say what data and what scale: a subset must not pass for the whole."""
    summaries = [run.summary for run in experiment.runs if run.summary]
    asked = table_of(experiment.runs[0].spec.get("task"))
    task: Mapping[str, Any] = next((s["task"] for s in summaries if isinstance(s.get("task"), Mapping)), asked)
    facts = {shown_text(key).replace("_", " "): _fact(key, value) for key, value in task.items() if key != "name"}
    seeds = sorted({run.seed for run in experiment.runs})
    lines = {
        "task": shown_value(task.get("name") or asked.get("name") or "not named"),
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


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(shown_text(value) for value in values if isinstance(value, str)))


def _comparison(experiment: Experiment) -> str:
    columns, rows = comparison_table(experiment)
    body = "".join(
        f'<tr><th scope="row"{" class=long" * (len(row.label) > _SHORT)}>{swatch(row.number)}{text(row.label)}</th>'
        + f"<td>{text(row.seeds)}</td>"
        + "".join(f"<td>{text(cell)}</td>" for cell in row.cells)
        + "</tr>"
        for row in rows
    )
    caption = (
        "Mean ± standard deviation over the seeds that finished. A round with a gradient phase counts as two "
        "communication rounds."
    )
    content = f"<caption>{caption}</caption>{heads('algorithm', 'seeds', *columns)}<tbody>{body}</tbody>"
    return f"<h3>Comparison</h3>{wide_table('Comparison', content, 'comparison')}"


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
        title, rule = "Does the order agree with the paper's?", f"{RULE} {PAPER_RULE}"
        answer = overall([pair.verdict for pair in pairs if pair.verdict])
        top = heads("pair", "ours", "paper", "order")
    else:
        pairs = [pair for pair in pairs_of(experiment) if pair.ours is not None]
        title, rule, answer, top = "Who is told apart?", RULE, _told_apart(pairs), heads("pair", "ours", "told apart")
    if not pairs:
        return ""
    content = f"{top}<tbody>{''.join(_pair_row(pair) for pair in pairs)}</tbody>"
    return (
        f'<h3>{text(title)}</h3><p class="verdict">{text(answer)}</p>'
        f'<p class="soft">{text(rule)} Judged by the final {experiment.scored_on} accuracy; differences in points, '
        "± half the interval.</p>"
        f"{folded('All pairs', wide_table('Pairs', content), len(pairs))}"
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
    look = word if word in ("agrees", "disagrees") else ""
    return (
        f'<tr><th scope="row">{text(pair.first.label)} − {text(pair.second.label)}</th><td>{text(ours)}</td>{paper}'
        f'<td class="{look}">{text(word)}</td></tr>'
    )
