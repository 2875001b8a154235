"""The server's side: what goes into a Flower ServerApp, and clients whose data is elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.algorithms.rules import ServerRule
from gradalign.client import LocalTraining
from gradalign.client.trainer import check_device
from gradalign.errors import GradalignError
from gradalign.flower.engine import FlowerEngine
from gradalign.flower.exchange import Patience, Roster, logger
from gradalign.server.federation import Federation, describe, make_federation
from gradalign.server.measure import Measure, Row
from gradalign.server.result import Result
from gradalign.server.runner import CHECKPOINT_SECONDS, RunOptions, conduct
from gradalign.tasks.batches import Examples
from gradalign.tasks.task import Task


class _RemoteExamples(Examples):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def batch(self, index: Tensor) -> Any:
        raise GradalignError("the client's examples are on its own node, not on the server")


class RemoteClients(Sequence[Examples]):
    """The clients as the server sees them; ``sizes`` may grow while nodes connect."""

    elsewhere = True  # their data is not looked at here

    def __init__(self, total: int, sizes: Mapping[int, int]) -> None:
        self._total, self._sizes = total, sizes

    def __len__(self) -> int:
        return self._total

    def weight(self, client: int) -> float:
        """Return how many examples a client has; NaN while it has not said so, which no average takes for a number."""
        return float(self._sizes.get(client, math.nan))

    def __getitem__(self, client: Any) -> Any:
        return _RemoteExamples(self._sizes.get(client, 1))


class AlignedStrategy:
    """Runs any algorithm of this library on Flower's nodes.

    A round is one exchange of messages, or two when the algorithm needs gradients: ``train.gradient`` to the sampled
    clients, then ``train`` with ḡ to those that answered. Clients are known by their ``partition-id``.

    It has a ``start`` like Flower's strategies but is not one of them: Flower's loop knows one training phase a round.

    Args:
        algorithm: For example ``FedGA(beta=0.1)`` or ``FedGA(beta=0.1) + FedAdam(lr=0.03)``.
        task: What is trained: a model or a function that makes one, or a Task, whose test examples are then used for
            evaluation on the server. The task's clients are not looked at: the data is at the nodes.
        local: How clients train; sent to them in every round.
        clients: N, the number of partitions; None takes the nodes' ``num-partitions``.
        clients_per_round: How many are sampled each round; None takes all.
        weights: "uniform", or "examples" to weight clients by their number of examples.
        min_fraction: The share of the sampled clients that must answer each phase; with fewer the round is played
            again, and then the run stops with a checkpoint.
        patience: How long every wait may last and how often a round is played again.
        measure: What is measured and how often. Measuring training loss and alignment costs a gradient phase,
            which the next round uses again; by default only the test examples are looked at.
        seed: The seed of everything random.
        out: A folder to write the run to. A server that is started again with the same folder goes on from there.
        checkpoint_seconds: How much work a crash of the server may cost; 0 writes a checkpoint after every round.
        train_config: More values for every message's ConfigRecord, for example ``{"clipping_norm": 1.0}`` for mods.
        device: Where the server evaluates.
        fast: Use faster ways of computing, on both sides, that give the same result up to rounding.
    """

    def __init__(
        self,
        algorithm: Algorithm | ServerRule | Combination,
        task: Task | nn.Module | Callable[[], nn.Module],
        *,
        local: LocalTraining | None = None,
        clients: int | None = None,
        clients_per_round: int | None = None,
        weights: str = "uniform",
        min_fraction: float = 0.5,
        patience: Patience | None = None,
        measure: Measure | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        train_config: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        fast: bool = True,
    ) -> None:
        self.algorithm = combine(algorithm)
        self.task = task if isinstance(task, Task) else Task(model=task, clients=RemoteClients(1, {}), name="flower")
        self.local = local or LocalTraining()
        self.patience = patience or Patience()
        self.measure = measure or Measure(train_every=0)
        self._clients, self._device, self._train_config = clients, check_device(device), dict(train_config or {})
        self._make_federation = partial(
            make_federation,
            per_round=clients_per_round,
            weights=weights,
            dropout=0.0,
            seed=seed,
            fast=fast,
            min_fraction=min_fraction,
        )
        self._where = RunOptions(out=out, resume=True, checkpoint_seconds=checkpoint_seconds, progress=False)

    def federation(self, roster: Roster, rounds: int | None = None) -> Federation:
        """Return what stays the same over all rounds, asking the nodes for what only they know."""
        total = self._clients
        if total is None:
            if not roster.wait(lambda: roster.partitions is not None):
                raise GradalignError(
                    f"no node told its num-partitions within {self.patience.connect_seconds:g} s; give clients=, or "
                    "start the nodes with --node-config 'partition-id=0 num-partitions=3'"
                )
            total = roster.partitions or 1
        task = replace(self.task, clients=RemoteClients(total, roster.sizes), client_tests=None)
        return self._make_federation(task, self.algorithm, self.local, rounds=rounds)

    def start(self, grid: Grid, num_rounds: int = 3) -> Result:
        """Run all rounds, or those that the run folder leaves to do, and return the history and the model."""
        if num_rounds < 1:
            raise GradalignError(f"num_rounds must be at least 1, got {num_rounds}")
        roster = Roster(grid, self.patience)
        federation = self.federation(roster, num_rounds)
        engine = FlowerEngine(federation, roster, train_config=self._train_config, device=self._device)
        total = len(federation.task.clients)
        if federation.by_examples:
            roster.locate(range(total), total)
        logger.info("%s on %d clients, %d rounds", self.algorithm.label, total, num_rounds)
        spec = {"rounds": num_rounds, **describe(federation, self.measure)}
        return conduct(federation, lambda: engine, spec, num_rounds, self.measure, self._where, _log_row)


def _log_row(row: Row) -> None:
    if row["sampled"] is None:
        return
    tested = "" if row["test_accuracy"] is None else f", test accuracy {row['test_accuracy']:.2%}"
    loss = math.nan if row["local_loss"] is None else row["local_loss"]
    reported = f"{row['reported']} of {row['sampled']} clients reported"
    logger.info("round %d: %s, local loss %.4g%s", row["round"], reported, loss, tested)
