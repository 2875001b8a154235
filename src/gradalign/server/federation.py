"""What stays the same over all rounds of a run, made from objects, and the same as plain values."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gradalign.algorithms import FedGA, FedProx, Scaffold, known_algorithms
from gradalign.algorithms.auto import AUTO
from gradalign.algorithms.plan import Algorithm, Combination
from gradalign.algorithms.rules import ServerRule, known_rules
from gradalign.algorithms.schedule import Schedule, spanning, value_at
from gradalign.client import LocalTraining
from gradalign.client.trainer import Setup
from gradalign.errors import GradalignError, flag, real, whole
from gradalign.seeding import Purpose, numpy_stream
from gradalign.tasks.task import Task, plain_value

if TYPE_CHECKING:
    from gradalign.server.measure import Measure


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

    def setup(self, device: torch.device | str) -> Setup:
        """Return what an engine needs to know for the clients' work."""
        return Setup(
            task=self.task,
            local=self.local,
            seed=self.seed,
            device=device,
            fast=self.fast,
            clients_per_round=self.per_round,
            algorithm=self.algorithm,
        )


def unlike(algorithm: Combination, local: LocalTraining, measure: Measure, one: int, other: int) -> str | None:
    """Return in what the first rounds of runs of two lengths differ; None where in nothing."""
    if measure.early_stopping is not None:  # by measurements, which lie elsewhere in a longer run
        return "early stopping may have ended it elsewhere"
    if algorithm.over(one) != algorithm.over(other):
        return f"what {algorithm.label} does in a round depends on how long the run is"
    differs = spanning(local.lr, one) != spanning(local.lr, other)
    return "local.lr depends on how long the run is" if differs else None


def single_step(local: LocalTraining, algorithm: Combination) -> LocalTraining:
    """Hold the algorithms that are defined for one step a round to it."""
    if not algorithm.one_step:
        return local
    if local.epochs is not None or local.steps not in (None, 1):
        given = f"local.epochs = {local.epochs}" if local.epochs else f"local.steps = {local.steps}"
        raise GradalignError(
            f"{algorithm.label} takes one local step a round, got {given}; set local.steps = 1, or use fedga or fedavg"
        )
    return replace(local, steps=1)


def without_effect(federation: Federation) -> str | None:
    """Say what of the algorithm does nothing where all clients take one local step; None where nothing is like that.

    β of "auto" is 0 then, FedProx's pull begins with the second step, and the mean of SCAFFOLD's ḡ − g_i is zero.
    """
    local, parts, sizes = federation.local, federation.algorithm.parts, federation.task.sizes
    if federation.elsewhere or local.steps_for(sys.maxsize if sizes is None else int(sizes.max())) > 1:
        return None
    resting = [part.label for part in parts if type(part) is FedGA and part.beta == AUTO]
    same = local.optimizer is None and not federation.dropout  # who steps, and by a sum, is who was asked for g_i
    if len(parts) == 1 and ((type(part := parts[0]) is FedProx and part.mu) or (part == Scaffold() and same)):
        resting = [part.label]
    why = "changes nothing: the model is the one without it; let clients take more local.steps or local.epochs"
    return f"with one local step a round {resting[0]} {why}" if resting else None


def make_federation(
    task: Task,
    algorithm: Combination,
    local: LocalTraining,
    *,
    per_round: int | None,
    weights: str,
    dropout: float,
    seed: int,
    fast: bool = True,
    min_fraction: float = 0.0,
    rounds: int | None = None,
) -> Federation:
    """Check what only the task can tell, and return the federation."""
    total = len(task.clients)
    if per_round is not None and whole("clients.per_round", per_round, 1) > total:
        raise GradalignError(f"clients.per_round is {per_round}, but the task {task.name} has {total} clients")
    inferring = [part.label for part in algorithm.parts if part.infers_gradients]
    if inferring and local.optimizer is not None:
        problem = f"{inferring[0]} takes the clients' updates for sums of gradients, and {local.optimizer}'s are not"
        raise GradalignError(f"{problem}: use plain SGD (no local.optimizer), or a form with fresh gradients")
    if weights not in ("uniform", "examples"):
        raise GradalignError(f'clients.weights must be "uniform" or "examples", got "{weights}"')
    return Federation(
        task=task,
        algorithm=algorithm,
        local=single_step(local, algorithm),
        per_round=total if per_round is None else int(per_round),
        by_examples=weights == "examples",
        dropout=real("clients.dropout", dropout, 0.0, 1.0, below=True),
        seed=seed,
        fast=flag("fast", fast),
        min_fraction=real("clients.min_fraction", min_fraction, 0.0, 1.0),
        rounds=rounds,
    )


def describe(federation: Federation, measure: Measure) -> dict[str, Any]:
    """Return a federation made from objects as the plain values that a recipe would have said.

    Read as a recipe, they give the same objects again. A class that no recipe can name (one of the user's own that
    lies in no module) is called by its own name, which a recipe refuses.
    """
    local = _plain(federation.local)
    precision = {"precision": local.pop("precision")} if "precision" in local else {}
    return {
        "seed": federation.seed,
        "fast": federation.fast,
        **precision,
        "task": plain_value(federation.task.describe()),
        "algorithm": _algorithm(federation.algorithm),
        "server": _plain(federation.algorithm.server),
        "local": local,
        "clients": {
            "per_round": federation.per_round,
            "weights": "examples" if federation.by_examples else "uniform",
            "dropout": federation.dropout,
            "min_fraction": federation.min_fraction,
        },
        "measure": _plain(measure),
    }


def _algorithm(algorithm: Combination) -> dict[str, Any]:
    """Return all parts' values: in one table, but for those of parts that share a key, also with the table itself."""
    names = [name for part in algorithm.parts if (name := _class_name(part)) != "fedavg"]
    names += [] if type(algorithm.server) is ServerRule else [_class_name(algorithm.server)]
    described: dict[str, Any] = {"name": "+".join(names) or "fedavg"}
    tables = {part.label: _plain(part) for part in algorithm.parts}
    times = Counter(key for table in tables.values() for key in table)
    own = {}
    for name, table in tables.items():
        if all(times[key] == 1 and key not in ("name", "parts") for key in table):
            described |= table
        else:
            own[name] = table
    return described | ({"parts": own} if own else {})


def _class_name(thing: Algorithm | ServerRule) -> str:
    """Return the name that a recipe has for a class: its label, or where to import one of the user's own from."""
    kind, known = type(thing), (known_rules() | known_algorithms()).get(thing.label)
    importable = kind.__module__ != "__main__" and "." not in kind.__qualname__
    if known is kind and (kind.__module__.startswith("gradalign.") or not importable):
        return thing.label
    return f"{kind.__module__}{':' if importable else '.'}{kind.__qualname__}"


def _plain(thing: Any) -> dict[str, Any]:
    """Return a dataclass's fields as TOML values; unset ones are left out, and so are empty tables."""
    values = {one.name: getattr(thing, one.name) for one in fields(thing)}
    return {name: _described(value) for name, value in values.items() if value is not None and value != {}}


def _described(value: Any) -> Any:
    if isinstance(value, Schedule):
        kind = re.sub(r"(?<!^)(?=[A-Z])", "-", type(value).__name__).lower()  # OffUntil is off-until
        return {"kind": kind} | _plain(value)
    return _plain(value) if is_dataclass(value) else plain_value(value)
