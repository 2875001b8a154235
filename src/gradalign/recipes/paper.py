"""The paper's numbers belong beside the paper's problem. Imports nothing heavy: the report asks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradalign.recipes import found

if TYPE_CHECKING:
    from gradalign.recipes.spec import Spec

NUMBERS_LEFT_OUT = "its numbers are left out here, where the clients or their examples are not the paper's"


def is_papers_problem(spec: Mapping[str, Any]) -> bool:
    """Return whether a spec's problem is the one that its [paper] numbers are of; the run may be shorter."""
    task = found(spec, "task")
    fewer = {"client_share", "data_share", "train_limit", "test_limit"} & set(task if isinstance(task, Mapping) else ())
    return found(spec, "paper", "applies") is not False and not fewer


def paper_note(spec: Spec) -> dict[str, Any] | None:
    """Return what a summary says of the paper beside its numbers; None where the recipe knows of no paper."""
    if spec.paper is None:
        return None
    return {"source": spec.paper.source, "claim": spec.paper.claim, "applies": is_papers_problem(spec.to_dict())}


def paper_number(spec: Spec, entry: str) -> Any:
    """Return the paper's accuracy of an algorithm; None where there is none, or the problem is another."""
    return spec.paper.test_accuracy.get(entry) if spec.paper and is_papers_problem(spec.to_dict()) else None
