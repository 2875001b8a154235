"""The lines of a printed summary that only some runs have: further metrics, the clients' own results, an early end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from gradalign.cli.common import plain
from gradalign.runs.untrusted import number_of

_STATISTICS = ("mean", "worst", "worst_tenth", "spread")
_NAMES = {"clients": "clients", "personalized": "tuned at home"}


def further_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each of these lines."""
    for key, value in summary.items():
        on, _, name = key.removeprefix("final_").partition("_")
        known = number_of(value)
        further = on in ("test", "validation") and name not in ("accuracy", "loss")
        if key.startswith("final_") and further and known is not None:
            yield f"{on} {name}", f"{known:.4g}"
    for prefix, name in _NAMES.items():
        words = _client_words(summary, prefix)
        if words:
            yield name, words
    followed = summary.get("monitor")
    best = number_of(followed.get("best")) if isinstance(followed, Mapping) else None
    if isinstance(followed, Mapping) and best is not None:
        yield "best round", f"{followed.get('round')}, {str(followed.get('name')).replace('_', ' ')} {best:.4g}"
    if summary.get("stopped"):
        yield "stopped early", str(summary["stopped"])


def _client_words(summary: Mapping[str, Any], prefix: str) -> str:
    """Say how the clients fared one by one: by accuracy, or by loss where there is none."""
    for metric, form in (("accuracy", "{:.2%}"), ("loss", "{:.4g}")):
        found = {what: number_of(summary.get(f"final_{prefix}_{what}_{metric}")) for what in _STATISTICS}
        if None not in found.values():
            words = (f"{what.replace('_', ' ')} {form.format(value)}" for what, value in found.items())
            return f"{metric}: {', '.join(words)}"
    return ""


def clients_tables(entries: Sequence[Mapping[str, Any]], words: Callable[..., str]) -> Iterator[Table]:
    """Yield a comparison's tables of the clients' own results, as far as there are any; ``words`` says mean ± std."""
    for prefix in _NAMES:
        for metric, unit, form, scale in (("accuracy", ", %", ".2f", 100.0), ("loss", "", ".4g", 1.0)):
            if not any(entry.get(f"final_{prefix}_worst_{metric}") for entry in entries):
                continue
            tuned = ", tuned at home" if prefix == "personalized" else ""
            table = Table(title=f"{metric}{unit} of each client on its own test examples{tuned}")
            table.add_column("algorithm", style="bold")
            for what in _STATISTICS:
                table.add_column(what.replace("_", " "), justify="right")
            for entry in entries:
                cells = (words(entry.get(f"final_{prefix}_{what}_{metric}"), form, scale) for what in _STATISTICS)
                table.add_row(plain(entry["name"]), *cells)
            yield table
            break
