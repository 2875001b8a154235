"""What is measured at the server's point, and how often.

When nobody said how often, measuring is made a small part of the run. Costs are counted in examples whose gradient is
taken. Counting instead of timing keeps the spacing, and with it the rows of a run, the same on every machine.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradalign import __version__
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.trainer import one_thread
from gradalign.engines import Engine
from gradalign.errors import DivergedError, GradalignError, flag, real, whole
from gradalign.seeding import Purpose, numpy_stream
from gradalign.server.clients import ClientResults, client_columns, score_clients, spread_over_clients
from gradalign.server.federation import Federation
from gradalign.server.monitor import EarlyStopping, Monitor
from gradalign.server.state import ServerState
from gradalign.tasks.metrics import metrics_of

TEST_POINTS, TRAIN_POINTS = 50, 20
SHARE = 0.04  # of the run's own cost, which keeps measuring below 5 % of its time
FREE = 5000.0  # examples: a moment, so that small runs have whole curves
_FORWARD_ONLY = 1 / 3  # what an example that is only evaluated costs
_LOOKED_AT = 50  # clients whose sizes stand for all

TRAIN_COLUMNS = ("train_loss", "train_accuracy", "r", "drift", "drift_ratio", "cosine")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured and how often, in rounds; 0 is never, None picks a spacing. The last round is always measured.

    Attributes:
        test_every: Test loss and accuracy (None: up to fifty points, fewer where they would cost much of the run).
        train_every: Training loss and accuracy, r(x), drift and cosine, all from one gradient pass over some clients
            at the server's point (None: up to twenty points, fewer where they would cost much of the run).
        train_clients: How many clients that pass visits: client 0 and others, the same in all rounds.
        clients_every: Every client's own loss, accuracy and metrics, on ``Task.client_tests`` (None: at the end alone,
            where the task has any).
        test_clients: How many clients that is: client 0 and others, the same in all rounds; all where there are fewer.
        personalized: Whether these clients are also scored after each has trained the model at home for one round.
        metrics: Names of metrics from torchmetrics, such as "f1" and "auc", beside those of ``Task.metrics``.
        monitor: The metric that early stopping, ``keep_best`` and sweeps go by: "accuracy", "loss", one of the metrics,
            or any column of the history (None: the accuracy, or the loss where there is none).
        mode: Whether "max" or "min" of it is best (None: by the metric, which is "min" for losses and errors).
        early_stopping: ``EarlyStopping(patience=5)``, or a table of its fields: when to stop before the last round.
        keep_best: Whether the model of the best round is kept, as ``Result.best`` and ``best.safetensors``.
        target_accuracy: The accuracy, on test or validation examples, for "communication rounds to a target".
    """

    test_every: int | None = None
    train_every: int | None = None
    train_clients: int = 50
    clients_every: int | None = None
    test_clients: int = 1000
    personalized: bool = False
    metrics: Sequence[str] = ()
    monitor: str | None = None
    mode: Literal["max", "min"] | None = None
    early_stopping: EarlyStopping | None = None
    keep_best: bool = False
    target_accuracy: float | None = None

    def __post_init__(self) -> None:
        numbers = {"test_every": 0, "train_every": 0, "train_clients": 1, "clients_every": 0, "test_clients": 1}
        checked: dict[str, Any] = {"early_stopping": EarlyStopping.of(self.early_stopping)}
        for name, least in numbers.items():
            if (value := getattr(self, name)) is not None or least:
                checked[name] = whole(f"measure.{name}", value, least)
        if self.target_accuracy is not None:
            checked["target_accuracy"] = real("measure.target_accuracy", self.target_accuracy, 0.0, 1.0)
        checked |= {name: flag(f"measure.{name}", getattr(self, name)) for name in ("personalized", "keep_best")}
        if not isinstance(self.metrics, list | tuple) or not all(isinstance(name, str) for name in self.metrics):
            raise GradalignError(f"measure.metrics is a list of names, got {self.metrics!r}")
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise GradalignError(f"measure.monitor is the name of a metric, got {self.monitor!r}")
        if self.mode is not None and (self.mode not in ("max", "min") or self.monitor is None):
            raise GradalignError(f'measure.mode must be "max" or "min" of a measure.monitor, got {self.mode!r}')
        for name, value in (checked | {"metrics": tuple(self.metrics)}).items():
            object.__setattr__(self, name, value)

    def due(self, round_index: int, *, last: bool) -> set[str]:
        """Return what a settled measure wants after this round: "test", "clients", "train"."""
        spacings = {"test": self.test_every, "clients": self.clients_every, "train": self.train_every}
        wanted = {what for what, every in spacings.items() if every and round_index % every == 0}
        return wanted | ({what for what, every in spacings.items() if every != 0} if last else set())


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
    test_every, train_every = measure.test_every, measure.train_every
    measure = replace(measure, clients_every=_clients_every(measure, federation))
    if test_every is not None and train_every is not None:
        return measure
    test, probed, budget = (0.0, 0.0, 0.0) if federation.elsewhere else _costs(measure, federation, rounds)
    if test_every is None:
        test_every = spacing(rounds, TEST_POINTS, test, budget / 2)
    if train_every is None:
        train_every = spacing(rounds, TRAIN_POINTS, probed, budget / 2)
    return replace(measure, test_every=test_every, train_every=train_every)


def _clients_every(measure: Measure, federation: Federation) -> int | None:
    """Return every how many rounds clients are scored, None for the end alone: where they have tests, or are asked."""
    asked = "clients_every" if measure.clients_every else "personalized" if measure.personalized else None
    if federation.task.client_tests is not None or (federation.elsewhere and asked):
        return measure.clients_every
    if asked:
        raise GradalignError(
            f"measure.{asked} is set, but the task {federation.task.name} has no test examples of its clients; give "
            "Task(client_tests=...), or hold some out with clients.holdout or gradalign.hold_out"
        )
    return 0


def _costs(measure: Measure, federation: Federation, rounds: int) -> tuple[float, float, float]:
    """Return what one evaluation and one pass over the probed clients cost, and what a whole run may spend on them."""
    task, local = federation.task, federation.local
    total, own = len(task.clients), federation.algorithm.uses_own_gradient
    looked_at = probe_clients(total, min(_LOOKED_AT, total), federation.seed)
    sizes = [len(task.client(client, federation.seed)) for client in looked_at]
    whole = sum(sizes) / len(sizes)
    trained = sum(local.steps_for(size) * local.batch_for(size) for size in sizes) / len(sizes)
    if own:
        trained += min(whole, local.gradient_examples or whole)
    test = 0.0 if task.test_examples is None else _FORWARD_ONLY * len(task.test_examples)
    # Gradients of whole clients that the round after needs anyway are taken over from the measurement.
    taken_over = federation.per_round / total if own and local.gradient_examples is None else 0.0
    probed = min(measure.train_clients, total) * whole * (1.0 - taken_over)
    return test, probed, SHARE * rounds * federation.per_round * trained + FREE


def probe_clients(clients: int, limit: int, seed: int) -> list[int]:
    """Return the fixed clients on which alignment and training loss are measured: all, or 0 and a seeded choice."""
    if limit >= clients:
        return list(range(clients))
    others = numpy_stream(seed, Purpose.PROBE).choice(clients - 1, limit - 1, replace=False, shuffle=False)
    return [0, *sorted(int(i) + 1 for i in np.atleast_1d(others))]


def row_columns(measure: Measure, federation: Federation) -> list[str]:
    """Return what a settled measure puts into the rows, measured or not."""
    task = federation.task
    names = ["test_loss", "test_accuracy", *TRAIN_COLUMNS]
    names += [f"{task.scored_on}_{name}" for name in ("loss", "accuracy", *task.metrics)]
    return names + (client_columns(measure, task) if measure.clients_every != 0 else [])


def require_measurable(measure: Measure, federation: Federation, *, score: bool = False) -> None:
    """Refuse what this task does not have, before anything is written; ``score``: the last round must be monitored."""
    settled, task = replace(measure, clients_every=_clients_every(measure, federation)), federation.task
    Monitor(settled, task).check(settled, task, row_columns(settled, federation), score=score)


def measured_at(
    state: ServerState, federation: Federation, measure: Measure, engine: Engine, due: set[str]
) -> tuple[Row, ClientResults | None]:
    """Measure what is due at this point; return columns of a row, and the clients' results."""
    row, task, results = Row(), federation.task, None
    if "test" in due and (score := engine.evaluate(state.point)) is not None:
        row = {"loss": score.mean_loss, "accuracy": score.accuracy}
        with one_thread():
            row |= metrics_of(task.metrics, score.predictions)
        row = {f"{task.scored_on}_{name}": value for name, value in row.items()}
    if "clients" in due:
        chosen = probe_clients(len(task.clients), measure.test_clients, federation.seed)
        results = score_clients(state, federation, measure, engine, chosen)
        row |= spread_over_clients(results, task)
    if "train" in due:  # last, so that a round at this point may go on with the gradients
        row |= _measured_on_clients(state, federation, measure, engine)
    _require_finite(row, state.round)
    return row, results


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How far the clients' gradients g_i at one point disagree, with ḡ = Σ p_i g_i and weights that sum to one."""

    r: float
    """½ Σ p_i ‖g_i − ḡ‖², half the variance of the gradients: the paper's regulariser."""
    drift: float
    """‖ḡ − g_1‖, the paper's drift curve: the first client against the mean."""
    drift_ratio: float | None
    """drift / ‖ḡ‖; None where ḡ = 0."""
    cosine: float | None
    """Σ p_i cos(g_i, ḡ), 1 when all gradients point the same way; None where a gradient is 0."""


def alignment_of(gradients: Sequence[Tensor], weights: Sequence[float]) -> Alignment:
    """Measure the alignment of gradients taken at one point; the first one is client 1 of the drift."""
    total, mean = float(sum(weights)), torch.zeros(gradients[0].shape, dtype=torch.float64)
    for gradient, weight in zip(gradients, weights, strict=True):
        mean.add_(gradient, alpha=float(weight))
    mean /= total
    mean_norm = float(mean.norm())
    spread, cosine, cosine_known = 0.0, 0.0, mean_norm > 0.0
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
    )


def _measured_on_clients(state: ServerState, federation: Federation, measure: Measure, engine: Engine) -> Row:
    """Measure what one gradient pass over some clients tells; a round at this point may go on with the gradients."""
    algorithm = federation.algorithm_at(state.round)
    told = Broadcast(point=state.point, round=state.round, algorithm=algorithm, one_by_one=True)
    clients = probe_clients(len(federation.task.clients), measure.train_clients, federation.seed)
    who = [Participant(client=client, weight=federation.weight(client)) for client in clients]
    replies = [replace(reply, vector=reply.vector.to("cpu", copy=True)) for reply in engine.gradients(told, who)]
    if not replies:
        return {}
    weights = [reply.weights[0] for reply in replies]
    accuracies = [accuracy for reply in replies for accuracy in reply.accuracies if accuracy is not None]
    with one_thread():  # norms over several threads round differently
        found = alignment_of([reply.vector for reply in replies], weights)
    return {
        "train_loss": _mean([reply.losses[0] for reply in replies], weights),
        "train_accuracy": _mean(accuracies, weights) if len(accuracies) == len(weights) else None,
        **asdict(found),
    }


def _require_finite(row: Row, rounds: int) -> None:
    """Refuse what cannot be measured: the run has diverged."""
    bad = next((name for name, value in row.items() if value is not None and not math.isfinite(value)), None)
    if bad is None:
        return
    what = f"the {bad.replace('_', ' ')}"
    if rounds == 0:
        raise DivergedError(f"{what} is NaN or infinite before any training; look at the model, the loss or the data")
    raise DivergedError(
        f"{what} became NaN or infinite after round {rounds}; lower local.lr or algorithm.beta, or set local.clip_norm"
    )


def _mean(values: list[float], weights: list[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


def rounds_to(rows: Sequence[Mapping[str, Any]], target: float | None) -> int | None:
    """Return the communication rounds after which the accuracy, on whatever is scored, first reached the target."""
    if target is None:
        return None
    for row in rows:
        accuracies = (row.get("test_accuracy"), row.get("validation_accuracy"))
        if any(accuracy is not None and accuracy >= target for accuracy in accuracies):
            return int(row["communication_rounds"])
    return None


def versions() -> dict[str, str]:
    return {"gradalign": __version__, "torch": torch.__version__, "python": platform.python_version()}
