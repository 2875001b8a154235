"""What is measured at the server's point, and how often.

How far the clients' gradients disagree, with g_i = ∇f_i(x), weights p_i that sum to one and ḡ = Σ p_i g_i:

    r(x) = ½ Σ p_i ‖g_i − ḡ‖²          half the variance of the gradients, the paper's regulariser
    drift = ‖ḡ − g_1‖                  the paper's drift curve: the first client against the mean
    cosine = Σ p_i cos(g_i, ḡ)         1 when all gradients point the same way

When nobody said how often, measuring is made a small part of the run. Costs are counted in examples whose gradient is
taken. Counting instead of timing keeps the spacing, and with it the rows of a run, the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.trainer import one_thread
from gradalign.engines import Engine
from gradalign.errors import DivergedError, GradalignError, real, whole
from gradalign.seeding import Purpose, numpy_stream
from gradalign.server.federation import Federation, ServerState

TEST_POINTS, TRAIN_POINTS = 50, 20
SHARE = 0.04  # of the run's own cost, which keeps measuring below 5 % of its time
FREE = 5000.0  # examples: a moment, so that small runs have whole curves
_FORWARD_ONLY = 1 / 3  # what an example that is only evaluated costs
_LOOKED_AT = 50  # clients whose sizes stand for all

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


def spacing(rounds: int, points: int, cost: float, budget: float) -> int:
    """Return every how many rounds to measure: about ``points`` times at most, and within the budget.

    The start and the end are always measured, whatever they cost.
    """
    closest = max(1, rounds // points)
    if cost <= 0.0:
        return closest
    affordable = math.floor(budget / cost)  # the start included
    return rounds if affordable <= 2 else max(closest, math.ceil(rounds / (affordable - 1)))


def settle(measure: Measure, federation: Federation, rounds: int) -> Measure:
    """Return the measure with the spacings that were left open decided.

    Half of the budget is for the test set, half for the clients' gradients. Where the clients' data is elsewhere its
    size is not known, and only the number of points counts.
    """
    if measure.test_every is not None and measure.train_every is not None:
        return measure
    test, probed, budget = (0.0, 0.0, 0.0) if federation.elsewhere else _costs(measure, federation, rounds)
    test_every, train_every = measure.test_every, measure.train_every
    if test_every is None:
        test_every = spacing(rounds, TEST_POINTS, test, budget / 2)
    if train_every is None:
        train_every = spacing(rounds, TRAIN_POINTS, probed, budget / 2)
    return replace(measure, test_every=test_every, train_every=train_every)


def _costs(measure: Measure, federation: Federation, rounds: int) -> tuple[float, float, float]:
    """Return what one evaluation and one pass over the probed clients cost, and what a whole run may spend on them."""
    task, local = federation.task, federation.local
    total, phases = len(task.clients), federation.algorithm.needs_gradients
    looked_at = probe_clients(total, min(_LOOKED_AT, total), federation.seed)
    sizes = [len(task.client(client, federation.seed)) for client in looked_at]
    whole = sum(sizes) / len(sizes)
    trained = sum(local.steps_for(size) * local.batch_for(size) for size in sizes) / len(sizes)
    if phases:
        trained += min(whole, local.gradient_examples or whole)
    test = 0.0 if task.test_examples is None else _FORWARD_ONLY * len(task.test_examples)
    # Gradients of whole clients that the round after needs anyway are taken over from the measurement.
    taken_over = federation.per_round / total if phases and local.gradient_examples is None else 0.0
    probed = min(measure.train_clients, total) * whole * (1.0 - taken_over)
    return test, probed, SHARE * rounds * federation.per_round * trained + FREE


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How well the clients' gradients agree at one point."""

    r: float
    drift: float
    drift_ratio: float | None
    """drift / ‖ḡ‖; None where ḡ = 0."""
    cosine: float | None
    """None where a gradient is 0."""
    mean_norm: float
    """‖ḡ‖."""


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_i v_i / Σ w_i in float64, summed in the given order."""
    if not vectors:
        raise GradalignError("cannot average no vectors")
    total = torch.zeros(vectors[0].shape, dtype=torch.float64)
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=float(weight))
    return total / float(sum(weights))


def alignment_of(gradients: Sequence[Tensor], weights: Sequence[float] | None = None) -> Alignment:
    """Measure the alignment of gradients taken at one point; the first one is client 1 of the drift."""
    weights = [1.0] * len(gradients) if weights is None else weights
    mean = weighted_mean(gradients, weights)
    mean_norm = float(mean.norm())
    total, spread, cosine, cosine_known = float(sum(weights)), 0.0, 0.0, mean_norm > 0.0
    for gradient, weight in zip(gradients, weights, strict=True):
        g = gradient.double()
        share, norm = float(weight) / total, float(g.norm())
        spread += share * float((g - mean).square().sum())
        cosine_known = cosine_known and norm > 0.0
        if cosine_known:
            cosine += share * float(g @ mean) / (norm * mean_norm)
    drift = float((mean - gradients[0].double()).norm())
    return Alignment(
        r=0.5 * spread,
        drift=drift,
        drift_ratio=drift / mean_norm if mean_norm > 0.0 else None,
        cosine=cosine if cosine_known else None,
        mean_norm=mean_norm,
    )


def probe_clients(clients: int, limit: int, seed: int) -> list[int]:
    """Return the fixed clients on which alignment and training loss are measured: all, or 0 and a seeded choice."""
    if limit >= clients:
        return list(range(clients))
    others = numpy_stream(seed, Purpose.PROBE).choice(clients - 1, limit - 1, replace=False, shuffle=False)
    return [0, *sorted(int(i) + 1 for i in np.atleast_1d(others))]


def measured_at(state: ServerState, federation: Federation, measure: Measure, rounds: int, engine: Engine) -> Row:
    """Measure what is due at this point."""
    row: Row = dict.fromkeys(
        ("test_loss", "test_accuracy", "train_loss", "train_accuracy", "r", "drift", "drift_ratio", "cosine")
    )
    scored_on = federation.task.scored_on
    row |= {f"{scored_on}_loss": None, f"{scored_on}_accuracy": None}
    if measure.due(measure.test_every, state.round, rounds):
        score = engine.evaluate(state.point)
        if score is not None:
            row[f"{scored_on}_loss"] = score.loss / score.examples
            row[f"{scored_on}_accuracy"] = None if score.correct is None else score.correct / score.examples
    if measure.due(measure.train_every, state.round, rounds):
        row |= _measured_on_clients(state, federation, measure, engine)
    _require_finite(row, state.round)
    return row


def _measured_on_clients(state: ServerState, federation: Federation, measure: Measure, engine: Engine) -> Row:
    """Measure what one gradient pass over some clients tells; a round at this point may go on with the gradients."""
    algorithm = federation.algorithm_at(state.round)
    told = Broadcast(point=state.point, round=state.round, algorithm=algorithm, one_by_one=True)
    clients = probe_clients(len(federation.task.clients), measure.train_clients, federation.seed)
    who = [Participant(client=client, weight=federation.weight(client)) for client in clients]
    gradients: list[Tensor] = []
    losses: list[float] = []
    accuracies: list[float] = []
    weights: list[float] = []
    for reply in engine.gradients(told, who):
        gradients.append(reply.vector.to("cpu", copy=True))
        losses += reply.losses
        accuracies += [accuracy for accuracy in reply.accuracies if accuracy is not None]
        weights += reply.weights
    if not gradients:
        return {}
    with one_thread():  # norms over several threads round differently
        found = alignment_of(gradients, weights)
    return {
        "train_loss": _mean(losses, weights),
        "train_accuracy": _mean(accuracies, weights) if len(accuracies) == len(weights) else None,
        "r": found.r,
        "drift": found.drift,
        "drift_ratio": found.drift_ratio,
        "cosine": found.cosine,
    }


def _require_finite(row: Row, rounds: int) -> None:
    """Refuse what cannot be measured: the run has diverged."""
    bad = next((name for name, value in row.items() if value is not None and not math.isfinite(value)), None)
    if bad is None:
        return
    name = bad.replace("_", " ")
    if rounds == 0:
        raise DivergedError(
            f"the {name} is NaN or infinite before any training; look at the model, the loss or the data"
        )
    raise DivergedError(
        f"the {name} became NaN or infinite after round {rounds}; "
        "lower local.lr or algorithm.beta, or set local.clip_norm"
    )


def _mean(values: list[float], weights: list[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)
