"""The lines of a printed summary that only some runs have: further metrics, the clients' own results, an early end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradalign.runs.untrusted import number_of


def further_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each of these lines."""
    for key, value in summary.items():
        on, _, name = key.removeprefix("final_").partition("_")
        known = number_of(value)
        if key.startswith("final_") and on in ("test", "validation") and name not in ("accuracy", "loss") and known:
            yield f"{on} {name}", f"{known:.4g}"
    for prefix, name in (("clients", "clients"), ("personalized", "tuned at home")):
        words = _client_words(summary, prefix)
        if words:
            yield name, words
    if summary.get("stopped"):
        yield "stopped early", str(summary["stopped"])


def _client_words(summary: Mapping[str, Any], prefix: str) -> str:
    """Say how the clients fared one by one: by accuracy, or by loss where there is none."""
    for metric, form in (("accuracy", "{:.2%}"), ("loss", "{:.4g}")):
        found = {
            what: number_of(summary.get(f"final_{prefix}_{what}_{metric}"))
            for what in ("worst", "worst_tenth", "mean", "spread")
        }
        if None not in found.values():
            words = (f"{what.replace('_', ' ')} {form.format(value)}" for what, value in found.items())
            return f"{metric}: {', '.join(words)}"
    return ""
