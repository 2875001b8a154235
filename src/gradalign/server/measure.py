"""What is measured at the server's point, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from gradalign.checks import real, whole
from gradalign.client.exchange import Broadcast, Gradient, Participant
from gradalign.client.trainer import one_thread
from gradalign.engines import Engine
from gradalign.errors import DivergedError
from gradalign.server.alignment import alignment_of
from gradalign.server.federation import Federation, ServerState
from gradalign.server.rounds import probe_clients

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured and how often, in rounds; 0 is never, None picks a spacing. The last round is always measured.

    Attributes:
        test_every: Test loss and accuracy (None: up to fifty points, fewer where they would cost much of the run).
        train_every: Training loss and accuracy, r(x), drift and cosine, all from one gradient pass over some clients
            at the server's point (None: up to twenty points, fewer where they would cost much of the run).
        train_clients: How many clients that pass visits: client 0 and others, the same in all rounds.
        target_accuracy: The accuracy, on test or validation examples, for "communication rounds to a target".
    """

    test_every: int | None = None
    train_every: int | None = None
    train_clients: int = 50
    target_accuracy: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("test_every", 0), ("train_every", 0), ("train_clients", 1)):
            value = getattr(self, name)
            if value is not None or name == "train_clients":
                object.__setattr__(self, name, whole(f"measure.{name}", value, least))
        if self.target_accuracy is not None:
            target = real("measure.target_accuracy", self.target_accuracy, 0.0, 1.0)
            object.__setattr__(self, "target_accuracy", target)

    def due(self, every: int | None, round_index: int, rounds: int) -> bool:
        """Return whether something measured at this (settled) spacing is due after this many rounds."""
        return bool(every) and (round_index % int(every or 1) == 0 or round_index == rounds)


def measured_at(
    state: ServerState, federation: Federation, measure: Measure, rounds: int, engine: Engine
) -> tuple[Row, dict[int, Gradient]]:
    """Measure what is due at this point; also return the clients' gradients where they were taken."""
    row: Row = dict.fromkeys(
        ("test_loss", "test_accuracy", "train_loss", "train_accuracy", "r", "drift", "drift_ratio", "cosine")
    )
    scored_on = federation.task.scored_on
    row |= {f"{scored_on}_loss": None, f"{scored_on}_accuracy": None}
    gradients: dict[int, Gradient] = {}
    weights: list[float] = []
    if measure.due(measure.test_every, state.round, rounds):
        score = engine.evaluate(state.point)
        if score is not None:
            row[f"{scored_on}_loss"] = score.loss / score.examples
            row[f"{scored_on}_accuracy"] = None if score.correct is None else score.correct / score.examples
    if measure.due(measure.train_every, state.round, rounds):
        clients = probe_clients(len(federation.task.clients), measure.train_clients, federation.seed)
        told = Broadcast(
            point=state.point, round=state.round, algorithm=federation.algorithm_at(state.round), one_by_one=True
        )
        who = [Participant(client=client, weight=federation.weight(client)) for client in clients]
        for reply in engine.gradients(told, who):
            gradients[reply.clients[0]] = replace(reply, vector=reply.vector.to("cpu", copy=True))
            weights.append(reply.weights[0])
    if gradients:
        row["train_loss"] = _mean([reply.losses[0] for reply in gradients.values()], weights)
        known = [reply.accuracies[0] for reply in gradients.values() if reply.accuracies[0] is not None]
        row["train_accuracy"] = _mean(known, weights) if len(known) == len(weights) else None
        with one_thread():  # norms over several threads round differently
            found = alignment_of([reply.vector for reply in gradients.values()], weights)
        row |= {"r": found.r, "drift": found.drift, "drift_ratio": found.drift_ratio, "cosine": found.cosine}
    bad = [name for name, value in row.items() if value is not None and not math.isfinite(value)]
    if bad:
        name = bad[0].replace("_", " ")
        if state.round == 0:
            raise DivergedError(
                f"the {name} is NaN or infinite before any training; look at the model, the loss or the data"
            )
        raise DivergedError(
            f"the {name} became NaN or infinite after round {state.round}; "
            "lower local.lr or algorithm.beta, or set local.clip_norm"
        )
    return row, gradients


def _mean(values: list[float], weights: list[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)
