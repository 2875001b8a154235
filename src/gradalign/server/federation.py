"""What stays the same over all rounds of a run, and what is carried from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gradalign.algorithms.plan import Combination
from gradalign.algorithms.rules import Memory
from gradalign.algorithms.schedule import spanning, value_at
from gradalign.client import LocalTraining
from gradalign.client.flat import Point
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What stays the same over all rounds.

    Attributes:
        task: What is trained.
        algorithm: The plan of every round.
        local: How a client trains.
        per_round: |S|, the number of clients sampled each round.
        by_examples: Weight clients by their number of examples instead of uniformly, in ḡ and in the average.
        dropout: The chance that a sampled client falls silent between the gradient phase and its report.
        seed: The seed of everything random.
        fast: Whether engines may use ways of computing that are the same up to rounding.
        min_fraction: The share of the sampled clients that must answer each phase for the round to count.
        rounds: The length of the run, which schedules in shares of it need.
    """

    task: Task
    algorithm: Combination
    local: LocalTraining
    per_round: int
    by_examples: bool = False
    dropout: float = 0.0
    seed: int = 0
    fast: bool = True
    min_fraction: float = 0.0
    rounds: int | None = None

    def algorithm_at(self, round_index: int) -> Combination:
        """Return the algorithm with its schedules resolved for this round."""
        spread = self.algorithm if self.rounds is None else self.algorithm.over(self.rounds)
        return spread.at(round_index)

    def lr_at(self, round_index: int) -> float:
        """Return the clients' learning rate in this round."""
        lr = self.local.lr
        return value_at(lr if self.rounds is None else spanning(lr, self.rounds), round_index)

    def sample(self, round_index: int) -> list[int]:
        """Return this round's clients, in ascending order: uniform, without replacement, in O(|S|) time."""
        clients = len(self.task.clients)
        if self.per_round == clients:
            return list(range(clients))
        stream = numpy_stream(self.seed, Purpose.SAMPLE_CLIENTS, round_index)
        return sorted(int(i) for i in stream.choice(clients, self.per_round, replace=False, shuffle=False))

    def silent(self, round_index: int, client: int) -> bool:
        """Return whether this client drops out of this round after the gradient phase."""
        if not self.dropout:
            return False
        return bool(numpy_stream(self.seed, Purpose.DROPOUT_OF_CLIENTS, round_index, client).random() < self.dropout)

    def weight(self, client: int) -> float:
        """Return the client's weight before normalisation; NaN for one elsewhere that has not told its size yet."""
        if not self.by_examples:
            return 1.0
        if self.elsewhere:
            return float(self.task.clients.weight(client))  # type: ignore[attr-defined]
        sizes = self.task.sizes
        return float(len(self.task.client(client, self.seed)) if sizes is None else sizes[client])

    @property
    def elsewhere(self) -> bool:
        """Whether the clients' data is on other machines, so that only they know how much it is."""
        return getattr(self.task.clients, "elsewhere", False)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What has been spent since round 0."""

    communication_rounds: int = 0
    local_updates: int = 0
    examples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Everything a run carries from round to round."""

    point: Point
    round: int = 0
    memory: Memory = field(default_factory=dict)
    """The server rule's."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """The server's vector of each keeping algorithm, float64."""
    kept: Mapping[str, dict[int, Tensor]] = field(default_factory=dict)
    """The clients' vectors of each keeping algorithm; only clients that were seen have one."""
    totals: Totals = field(default_factory=Totals)
