"""When the paper's numbers stand beside a result: where its setting is the paper's, up to length and what was tuned.

A recipe's ``[paper.setting]`` names what the numbers are of, a list where the paper chose among values. It is looked
for in the experiment as it is run, so that it does not matter how another setting came in. What is not named there has
to be as it is without being asked for; the tuned numbers are free, but they have to be numbers; β may
be off for up to half of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradalign.recipes import found
from gradalign.runs.untrusted import number_of

if TYPE_CHECKING:
    from gradalign.recipes.spec import Spec

NUMBERS_LEFT_OUT = "its numbers are left out here, where the setting is not the paper's"
_TUNED = {
    "task": (),
    "clients": (),
    "local": ("lr", "weight_decay", "batch_size", "gradient_examples"),
    "server": (),
    "algorithm": ("beta", "mu"),
}
_USUAL = {"weights": "uniform", "mean": "fresh", "control": "fresh", "lr": 1.0}  # besides nothing and zero
_ELSEWHERE = {"task": ("data_dir",), "algorithm": ("name",)}  # said of a run, or looked at by itself
_FEWER = {"client_share", "data_share", "train_limit", "test_limit"}


def is_papers_problem(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec's setting is the one that its [paper] numbers are of; the run may be shorter."""
    task, setting = found(spec, "task"), found(spec, "paper", "setting")
    if found(spec, "paper", "applies") is False or _FEWER & set(task if isinstance(task, Mapping) else ()):
        return False
    if not isinstance(setting, Mapping):
        return True
    return spec.get("precision") is None and all(_is_papers(spec, setting, part) for part in _TUNED)


def _is_papers(spec: Mapping[str, Any], setting: Mapping[str, Any], part: str) -> bool:
    tables = spec.get(part), setting.get(part)
    own, named = (table if isinstance(table, Mapping) else {} for table in tables)
    for key in {*own, *named} - {*_ELSEWHERE.get(part, ())}:
        value, wanted = own.get(key), named.get(key)
        if key in _TUNED[part]:
            number = _late(value, spec) if key == "beta" else value
            fits = value in (None, "whole") or (isinstance(number, int | float) and (key != "beta" or number > 0))
        elif wanted is None:
            fits = not value or value == _USUAL.get(key)
        else:
            fits = value in wanted if isinstance(wanted, list) else value == wanted
        if not fits:
            return False
    return True


def _late(beta: Any, spec: Mapping[str, Any]) -> Any:
    """Return the number behind a β that is off at first, and anything else as it is."""
    share, begins, rounds = (number_of(one) for one in (found(beta, "share"), found(beta, "round"), spec.get("rounds")))
    early = share <= 0.5 if share is not None else begins is not None and rounds is not None and begins <= rounds / 2
    return found(beta, "value") if found(beta, "kind") == "off-until" and early else beta


def papers_accuracy(spec: Mapping[str, Any], name: str) -> Any:
    """Return the paper's accuracy of an algorithm; None where there is none, or the setting is another."""
    if not is_papers_problem(spec) or found(spec, "algorithm", "name") != name:
        return None
    return found(spec, "paper", "test_accuracy", name)


def paper_note(*specs: Spec) -> dict[str, Any] | None:
    """Return what a summary says of the paper beside its numbers; None where the recipe knows of no paper."""
    paper = specs[0].paper
    if paper is None:
        return None
    applies = any(is_papers_problem(spec.to_dict()) for spec in specs)
    return {"source": paper.source, "claim": paper.claim, "applies": applies}
