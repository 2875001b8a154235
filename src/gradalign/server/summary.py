"""The numbers of a run: a row for each round, and the summary of its end."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields
from typing import Any

import torch

from gradalign import __version__
from gradalign.server.federation import Federation, ServerState
from gradalign.server.measure import Measure, Row
from gradalign.server.rounds import RoundFacts


def row_of(state: ServerState, facts: RoundFacts | None, measured: Row, seconds: float) -> Row:
    """Return one row of the metrics."""
    row: Row = {"round": state.round, **asdict(state.totals), **measured}
    row |= {one.name: getattr(facts, one.name) if facts else None for one in fields(RoundFacts)}
    return row | {"seconds": round(seconds, 3)}


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    """Return rows as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def summarise(rows: list[Row], federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return the numbers of a finished run."""

    def final(name: str) -> Any:
        return next((row[name] for row in reversed(rows) if row[name] is not None), None)

    def best(name: str) -> Row:
        """Return the first row with the highest number, or one without any."""
        tested = [row for row in rows if row[name] is not None]
        return max(tested, key=lambda row: row[name], default={name: None, "round": None})

    summary: dict[str, Any] = {
        "algorithm": federation.algorithm.label,
        "seed": federation.seed,
        "rounds": rows[-1]["round"],
        "final_test_accuracy": final("test_accuracy"),
        "best_test_accuracy": best("test_accuracy")["test_accuracy"],
        "best_round": best("test_accuracy")["round"],
        "final_test_loss": final("test_loss"),
        "final_train_loss": final("train_loss"),
        "final_r": final("r"),
        "target_accuracy": measure.target_accuracy,
        "communication_rounds_to_target": rounds_to(rows, measure.target_accuracy),
    }
    if federation.task.scored_on == "validation":
        summary |= {
            "final_validation_accuracy": final("validation_accuracy"),
            "best_validation_accuracy": best("validation_accuracy")["validation_accuracy"],
            "final_validation_loss": final("validation_loss"),
        }
    totals = ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds")
    summary |= {name: rows[-1][name] for name in totals}
    return summary | {"task": federation.task.describe(), "versions": versions()}


def rounds_to(rows: list[Row], target: float | None) -> int | None:
    """Return the communication rounds after which the accuracy, on whatever is scored, first reached the target."""
    if target is None:
        return None
    for row in rows:
        accuracies = (row["test_accuracy"], row.get("validation_accuracy"))
        if any(accuracy is not None and accuracy >= target for accuracy in accuracies):
            return int(row["communication_rounds"])
    return None


def versions() -> dict[str, str]:
    """Return the versions that made a result."""
    return {"gradalign": __version__, "torch": torch.__version__, "python": platform.python_version()}
