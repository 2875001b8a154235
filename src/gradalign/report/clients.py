"""The page's section on single clients: how the worst of them fare, and every one's results."""

from __future__ import annotations

from typing import Any

from gradalign.report.experiments import Experiment, shown_value
from gradalign.report.statistics import spread_of, spread_words
from gradalign.runs.read import Run

_COLUMNS = ("mean", "worst", "worst_tenth", "spread")
_WHEN = {"clients": "", "personalized": ", tuned at home"}
_MOST_CLIENTS = 500


def clients_section(experiment: Experiment) -> dict[str, Any] | None:
    """Return what the template says of the clients' own results; None where no run has them."""
    scored = any(group.finals("final_clients_mean_accuracy") for group in experiment.groups)
    metric, scale, form = ("accuracy", 100.0, ".2f") if scored else ("loss", 1.0, ".4g")
    rows = []
    for group in experiment.groups:
        for when, words in _WHEN.items():
            values = [group.finals(f"final_{when}_{what}_{metric}") for what in _COLUMNS]
            if any(values):
                cells = [spread_words(spread_of(numbers), form, scale) for numbers in values]
                rows.append((f"{group.label}{words}", cells))
    if not rows:
        return None
    return {
        "metric": f"{metric} in %" if scored else metric,
        "columns": [what.replace("_", " ") for what in _COLUMNS],
        "rows": rows,
        "each": _each(experiment, metric, scale, form),
    }


def _each(experiment: Experiment, metric: str, scale: float, form: str) -> dict[str, Any] | None:
    """Return every client's number under every algorithm, of one seed; of many clients the first."""
    first = next((run for group in experiment.groups for run in group.complete if run.clients is not None), None)
    if first is None or first.clients is None:
        return None
    clients = [int(client or 0) for client in first.clients.clients["client"][:_MOST_CLIENTS]]
    sizes = _column(experiment.groups, first.seed, "examples")
    numbers = [_column([group], first.seed, metric) for group in experiment.groups]
    cells = [
        ["–" if (value := own.get(client)) is None else format(scale * value, form) for own in numbers]
        for client in clients
    ]
    return {
        "seed": first.seed,
        "few": f"The first {len(clients):,} of {first.clients.of:,}. " if len(clients) < first.clients.of else "",
        "heads": ["client", "examples", *(group.label for group in experiment.groups)],
        "rows": [
            (_name(first, client), int(sizes.get(client) or 0), row) for client, row in zip(clients, cells, strict=True)
        ],
    }


def _name(run: Run, client: int) -> str:
    """Return what the task calls a client, else its number."""
    names = run.summary.get("client_names")
    return shown_value(names[client]) if isinstance(names, list) and client < len(names) else str(client)


def _column(groups: Any, seed: int, name: str) -> dict[int, float | None]:
    """Return one column by client, of the first run with this seed that has it."""
    for run in (run for group in groups for run in group.complete if run.seed == seed and run.clients is not None):
        columns = run.clients.clients
        return dict(zip(map(int, columns["client"]), columns.get(name, []), strict=False))
    return {}
