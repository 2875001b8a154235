"""How every client fares: its loss, accuracy and metrics on test examples of its own, and how these are spread.

Of every metric four numbers stand in the rows: the mean over the clients, the worst client's, the mean of the worst
tenth (at least one client), and the standard deviation over the clients. Clients count alike, however many examples
they have. "Personalized" is the same after every client has trained the model at home for one round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from gradalign.client.exchange import Broadcast, ClientScore, Participant
from gradalign.engines import Engine
from gradalign.server.federation import Federation
from gradalign.server.state import ServerState
from gradalign.tasks.metrics import larger_is_better
from gradalign.tasks.task import Task

if TYPE_CHECKING:
    from gradalign.server.measure import Measure

STATISTICS = ("mean", "worst", "worst_tenth", "spread")
PLAIN, TUNED = "clients", "personalized"
_OWN = ("client", "examples", "loss", "accuracy")


@dataclass(frozen=True, kw_only=True)
class ClientResults:
    """The clients' scores at one point: as it is, and after each has trained it at home, where that was asked for."""

    round: int
    of: int
    """How many clients there are; the scores may be of some of them."""
    clients: tuple[ClientScore, ...]
    personalized: tuple[ClientScore, ...] = ()

    def to_table(self) -> dict[str, Any]:
        """Return plain columns that JSON can hold; what is not finite is None."""
        return {"round": self.round, "of": self.of} | {
            name: _columns(scores) for name, scores in ((PLAIN, self.clients), (TUNED, self.personalized)) if scores
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ClientResults:
        """Return what ``to_table`` described."""
        plain, tuned = (_scores(table.get(name, {})) for name in (PLAIN, TUNED))
        return cls(round=table["round"], of=table["of"], clients=plain, personalized=tuned)


def _columns(scores: Sequence[ClientScore]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for one in scores for name in one.metrics)
    found: dict[str, list[Any]] = {name: [getattr(one, name) for one in scores] for name in _OWN}
    found |= {name: [one.metrics.get(name) for one in scores] for name in names}
    return {name: [_finite(value) for value in column] for name, column in found.items()}


def _scores(columns: Mapping[str, Sequence[Any]]) -> tuple[ClientScore, ...]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return tuple(
        ClientScore(
            client=row["client"],
            examples=row["examples"],
            loss=math.nan if row["loss"] is None else row["loss"],
            accuracy=row["accuracy"],
            metrics={name: value for name, value in row.items() if name not in _OWN and value is not None},
        )
        for row in rows
    )


def _finite(value: Any) -> Any:
    return value if value is None or math.isfinite(value) else None


def client_columns(measure: Measure, task: Task) -> list[str]:
    """Return the columns that the rows of a run have for its clients."""
    prefixes = [PLAIN, TUNED] if measure.personalized else [PLAIN]
    metrics = ("accuracy", "loss", *task.metrics)
    return [f"{prefix}_{what}_{metric}" for prefix in prefixes for metric in metrics for what in STATISTICS]


def spread_over_clients(results: ClientResults, task: Task) -> dict[str, float]:
    """Return the columns' values; a metric that some client lacks is taken over the others."""
    row: dict[str, float] = {}
    for prefix, scores in ((PLAIN, results.clients), (TUNED, results.personalized)):
        for metric, values in (_columns(scores) if scores else {}).items():
            known = [value for value in values if value is not None]
            # A mean without the clients whose loss is not finite would hide them.
            if metric in ("client", "examples") or not known or (metric == "loss" and len(known) < len(values)):
                continue
            worst_first = sorted(known, reverse=not larger_is_better(metric, task.metrics.get(metric)))
            tenth = worst_first[: math.ceil(len(known) / 10)]
            numbers = fmean(known), worst_first[0], fmean(tenth), pstdev(known)
            row |= {f"{prefix}_{what}_{metric}": value for what, value in zip(STATISTICS, numbers, strict=True)}
    return row


def score_clients(
    state: ServerState, federation: Federation, measure: Measure, engine: Engine, chosen: Sequence[int]
) -> ClientResults:
    """Let these clients score the server's point on their own test examples."""
    played = min(state.round, (federation.rounds or state.round + 1) - 1)  # after the last round, as in the last
    algorithm, lr = federation.algorithm_at(played), federation.lr_at(played)
    told = Broadcast(point=state.point, round=state.round, algorithm=algorithm, lr=lr)
    who = [Participant(client=client) for client in chosen]
    return ClientResults(
        round=state.round,
        of=len(federation.task.clients),
        clients=tuple(engine.evaluate_clients(told, who)),
        personalized=tuple(engine.evaluate_clients(told, who, tuned=True)) if measure.personalized else (),
    )
