"""The server's side: what goes into a Flower ServerApp, and clients whose data is elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.client import LocalTraining
from gradalign.client.exchange import ClientScore
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import check_device
from gradalign.errors import GradalignError, whole
from gradalign.flower.engine import FlowerEngine
from gradalign.flower.exchange import Patience, Roster, logger
from gradalign.flower.hearing import EvaluateFn, Hearing
from gradalign.flower.layout import NamedArrays, as_arrays
from gradalign.server.federation import Federation, describe, make_federation
from gradalign.server.measure import Measure, Row
from gradalign.server.monitor import OnRound
from gradalign.server.result import Result
from gradalign.server.runner import CHECKPOINT_SECONDS, RunOptions, conduct
from gradalign.tasks.task import Task, with_metrics
from gradalign.tracking import Tracker, Trackers


class RemoteClients(Sequence[Any]):
    """The clients as the server sees them; ``sizes`` may grow while nodes connect."""

    elsewhere = True  # their data is not looked at here

    def __init__(self, total: int, sizes: Mapping[int, float]) -> None:
        self._total, self._sizes = total, sizes

    def __len__(self) -> int:
        return self._total

    def weight(self, client: int) -> float:
        """Return how many examples a client has; NaN while it has not said so, which no average takes for a number."""
        return float(self._sizes.get(client, math.nan))

    def __getitem__(self, client: Any) -> Any:
        raise GradalignError("the client's examples are on its own node, not on the server")


Aggregation = Callable[[list[RecordDict], str], MetricRecord]


class FlowerNames(TypedDict, total=False):
    """What ``AlignedStrategy`` takes as Flower's strategies do, with their defaults; see ``FedAvg`` there."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Aggregation | None
    evaluate_metrics_aggr_fn: Aggregation | None


@dataclass(frozen=True, kw_only=True, repr=False)
class AlignedResult(Result):
    """What a run gives back: a ``gradalign.Result``, and what Flower's ``Result`` has.

    Rounds are counted from 1; those that an earlier server played are not in the dictionaries.
    """

    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    train_metrics_clientapp: dict[int, MetricRecord] = field(default_factory=dict)
    evaluate_metrics_clientapp: dict[int, MetricRecord] = field(default_factory=dict)
    evaluate_metrics_serverapp: dict[int, MetricRecord] = field(default_factory=dict)
    client_scores: dict[int, list[ClientScore]] = field(default_factory=dict)
    """Each client's evaluation, by round."""


class AlignedStrategy:
    """Runs any algorithm of this library on Flower's nodes.

    A round is one exchange of messages, or two when the algorithm needs gradients: ``train.gradient`` to the sampled
    clients, then ``train`` with ḡ to those that answered. Clients are known by their ``partition-id``. After each
    round, clients whose app has an evaluate function are asked to evaluate, as in Flower.

    It has the names and the ``start`` of Flower's strategies but is not one of them: Flower's loop knows one training
    phase a round. ``OneTrip`` is, for algorithms that need no more.

    Args:
        algorithm: For example ``FedGA(beta=0.1)`` or ``FedGA(beta=0.1) + FedAdam(lr=0.03)``.
        task: What is trained: a model or a function that makes one, or a Task, whose test examples are then used for
            evaluation on the server. The task's clients are not looked at: the data is at the nodes. None takes the
            arrays that ``start`` is given for the model.
        local: How clients train; sent to them in every round. Apps with a loop of their own follow what they read.
        clients: N, the number of partitions; None takes the nodes' ``num-partitions``.
        clients_per_round: How many are sampled each round; None takes ``fraction_train`` of all.
        weights: "examples" weights clients by ``weighted_by_key``, as Flower does; "uniform", as the paper does.
        min_fraction: The share of the sampled clients that must answer each phase; with fewer the round is played
            again, and then the run stops with a checkpoint.
        patience: How long every wait may last and how often a round is played again.
        measure: What is measured and how often. Measuring training loss and alignment costs a gradient phase,
            which the next round uses again. Evaluation of every kind, here and at the clients, takes place every
            ``test_every`` rounds; by default that is all, after every round.
        seed: The seed of everything random.
        out: A folder to write the run to. A server that is started again with the same folder goes on from there.
        checkpoint_seconds: How much work a crash of the server may cost; 0 writes a checkpoint after every round.
        train_config: More values for every message's ConfigRecord, for example ``{"clipping_norm": 1.0}`` for mods.
        trackers: Who else is told each row, as for ``gradalign.run``.
        on_round: Called with each row; returns True to end the run, as for ``gradalign.run``.
        device: Where the server evaluates.
        fast: Use faster ways of computing, on both sides, that give the same result up to rounding.
        names: Those of Flower's FedAvg: ``fraction_train``, ``min_available_nodes``, ``evaluate_metrics_aggr_fn`` …
    """

    def __init__(
        self,
        algorithm: Algorithm | ServerRule | Combination,
        task: Task | nn.Module | Callable[[], nn.Module] | None = None,
        *,
        local: LocalTraining | None = None,
        clients: int | None = None,
        clients_per_round: int | None = None,
        weights: str = "examples",
        min_fraction: float = 0.5,
        patience: Patience | None = None,
        measure: Measure | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        train_config: Mapping[str, Any] | None = None,
        trackers: Sequence[Tracker] = (),
        on_round: OnRound | None = None,
        device: torch.device | str = "cpu",
        fast: bool = True,
        **names: Unpack[FlowerNames],
    ) -> None:
        self.algorithm = combine(algorithm)
        if task is not None and not isinstance(task, Task):
            task = Task(model=task, clients=RemoteClients(1, {}), name="flower")
        self.task, self.local = task, local or LocalTraining()
        self.patience = patience or Patience()
        evaluated = int(names.get("fraction_evaluate") != 0.0)
        self.measure = measure or Measure(train_every=0, test_every=1, clients_every=evaluated)
        unknown = names.keys() - FlowerNames.__annotations__.keys()
        if unknown:
            known = ", ".join(FlowerNames.__annotations__)
            raise GradalignError(f"AlignedStrategy has no argument {min(unknown)}; of Flower's it takes {known}")
        self.flower = FedAvg(**names)
        self._clients, self._device, self._train_config = clients, check_device(device), dict(train_config or {})
        self._per_round, self._on_round = clients_per_round, on_round
        self._min_available = names.get("min_available_nodes", 0)  # else min_fraction says when there are enough
        self._make_federation = partial(
            make_federation, weights=weights, dropout=0.0, seed=seed, fast=fast, min_fraction=min_fraction
        )
        self._where = RunOptions(
            out=out,
            resume=True,
            checkpoint_seconds=checkpoint_seconds,
            progress=False,
            trackers=Trackers(trackers),
        )

    def federation(self, roster: Roster, rounds: int | None = None, arrays: ArrayRecord | None = None) -> Federation:
        """Return what stays the same over all rounds, asking the nodes for what only they know."""
        total = self._clients
        if total is None:
            if not roster.wait(lambda: roster.partitions is not None):
                if roster.complaint:
                    raise GradalignError(
                        f"no node can take part{roster.complaint} (an app must be made by gradalign.flower)"
                    )
                raise GradalignError(
                    f"no node told its num-partitions within {self.patience.connect_seconds:g} s; give clients=, or "
                    "start the nodes with --node-config 'partition-id=0 num-partitions=3'"
                )
            total = roster.partitions or 1
        clients = RemoteClients(total, roster.sizes)
        task = replace(_started_from(self.task, arrays), clients=clients, client_tests=None)
        task = with_metrics(task, self.measure.metrics)
        per_round = self._share(total, "train") if self._per_round is None else self._per_round
        return self._make_federation(task, self.algorithm, self.local, per_round=per_round, rounds=rounds)

    def _share(self, total: int, phase: str) -> int:
        """Return how many of all clients take part in a phase, by Flower's rule."""
        fraction, least = getattr(self.flower, f"fraction_{phase}"), getattr(self.flower, f"min_{phase}_nodes")
        if not 0.0 <= fraction <= 1.0 or (phase == "train" and not fraction):
            raise GradalignError(f"fraction_{phase} must be from 0 to 1, got {fraction:g}, and nobody trains with 0")
        if least > max(total, 2):  # two is Flower's default, also where there is one client
            raise GradalignError(f"min_{phase}_nodes is {least}, but there are {total} clients")
        return int(min(total, max(int(total * fraction), least)))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> AlignedResult:
        """Run all rounds, or those that the run folder leaves to do, and return the history and the model.

        Args:
            grid: Flower's.
            initial_arrays: The model's state_dict to start from; None starts from what ``task`` makes.
            num_rounds: How many rounds.
            timeout: Seconds for the replies of each phase, instead of those that ``patience`` has for them.
            train_config: More values for the config of every message to train.
            evaluate_config: The same for messages to evaluate.
            evaluate_fn: Called with the round and the model's arrays before the first round and after each.
        """
        num_rounds = whole("num_rounds", num_rounds, 1)
        if initial_arrays is not None and not isinstance(initial_arrays, ArrayRecord):
            raise GradalignError(f"initial_arrays is an ArrayRecord, got {initial_arrays!r}; rounds are num_rounds=")
        patience = self.patience
        if timeout is not None:
            patience = replace(patience, gradient_seconds=float(timeout), train_seconds=float(timeout))
        roster = Roster(grid, patience)
        federation = self.federation(roster, num_rounds, initial_arrays)
        total, needed = len(federation.task.clients), self._min_available
        if needed > total:
            raise GradalignError(f"min_available_nodes is {needed}, but there are {total} clients")
        if needed and not roster.wait(lambda: roster.connected >= needed):
            waited = f"after {patience.connect_seconds:g} s"
            raise GradalignError(f"min_available_nodes is {needed}, and {waited} {roster.connected} are connected")
        engine = FlowerEngine(
            federation,
            roster,
            train_config={**self._train_config, **(train_config or {})},
            evaluate_config=evaluate_config,
            keys=(self.flower.arrayrecord_key, self.flower.configrecord_key),
            weight_key=self.flower.weighted_by_key,
            device=self._device,
        )
        evaluating = self._share(total, "evaluate")
        engine.hearing = hearing = Hearing(engine, self.flower, evaluating, evaluate_fn)
        logger.info("%s on %d clients, %d rounds", self.algorithm.label, total, num_rounds)
        spec = {"rounds": num_rounds, **describe(federation, self.measure)}
        done = conduct(
            federation, lambda: engine, spec, num_rounds, self.measure, self._where, _log_row, on_round=self._on_round
        )
        return AlignedResult(
            **vars(done),
            arrays=as_arrays(done.model, FlatModel(done.model).read()),
            **hearing.records(),
        )


def _started_from(task: Task | None, arrays: ArrayRecord | None) -> Task:
    """Return the task with a model that starts from these arrays."""
    if task is None:
        if arrays is None:
            raise GradalignError("give AlignedStrategy a model, or start(initial_arrays=...)")
        return Task(model=lambda: NamedArrays(arrays), clients=RemoteClients(1, {}), name="flower")
    if arrays is None:
        return task
    model, values = task.make_model(0), arrays.to_torch_state_dict()
    try:
        model.load_state_dict(values)
    except RuntimeError as error:
        first = " ".join(str(error).split())
        raise GradalignError(f"initial_arrays do not fit the model: {first}") from None
    return replace(task, model=model)


def _log_row(row: Row) -> None:
    if row["sampled"] is None:
        return
    tested = "" if row["test_accuracy"] is None else f", test accuracy {row['test_accuracy']:.2%}"
    loss = math.nan if row["local_loss"] is None else row["local_loss"]
    reported = f"{row['reported']} of {row['sampled']} clients reported"
    logger.info("round %d: %s, local loss %.4g%s", row["round"], reported, loss, tested)
