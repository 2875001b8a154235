"""What becomes of what was measured: a row for each round, and a summary of the run."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from gradalign.server.clients import client_columns
from gradalign.server.federation import Federation, ServerState
from gradalign.server.measure import Measure, Row, rounds_to, versions
from gradalign.server.monitor import Monitor
from gradalign.server.rounds import RoundFacts

_MOST_NAMES = 500  # of clients; the report shows no more


def row_of(state: ServerState, facts: RoundFacts | None, names: list[str], measured: Row, seconds: float) -> Row:
    """Return a round's row: what was spent, the columns with these names as far as they were measured, the facts."""
    row: Row = {"round": state.round, **asdict(state.totals), **dict.fromkeys(names), **measured}
    row |= {one.name: getattr(facts, one.name) if facts else None for one in fields(RoundFacts)}
    return row | {"seconds": round(seconds, 3)}


def columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def summarise(
    rows: list[Row], federation: Federation, measure: Measure, monitor: Monitor, stopped: str | None
) -> dict[str, Any]:
    """Return the numbers of a finished run; ``stopped`` says why it ended before its last round, if it did."""
    task = federation.task

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
    if task.scored_on == "validation":
        summary |= {
            "final_validation_accuracy": final("validation_accuracy"),
            "best_validation_accuracy": best("validation_accuracy")["validation_accuracy"],
            "final_validation_loss": final("validation_loss"),
        }
    further = [f"{task.scored_on}_{name}" for name in task.metrics]
    further += client_columns(measure, task) if measure.clients_every != 0 else []
    summary |= {f"final_{name}": value for name in further if (value := final(name)) is not None}
    if measure.monitor is not None or measure.early_stopping is not None or measure.keep_best:
        summary["monitor"] = monitor.facts(next((row for row in rows if row["round"] == monitor.best_round), {}))
    if stopped is not None:
        summary["stopped"] = stopped
    totals = ("communication_rounds", "local_updates", "examples", "bytes_up", "bytes_down", "seconds")
    summary |= {name: rows[-1][name] for name in totals}
    if task.client_names is not None:
        summary["client_names"] = [str(name) for name in task.client_names[:_MOST_NAMES]]
    return summary | {"task": task.describe(), "versions": versions()}
