"""What stays the same over all rounds of a run, what is carried from one to the next, and both as plain values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradalign.algorithms import known_algorithms
from gradalign.algorithms.plan import Algorithm, Combination
from gradalign.algorithms.rules import Memory, ServerRule, known_rules
from gradalign.algorithms.schedule import Schedule, spanning, value_at
from gradalign.client import LocalTraining
from gradalign.client.flat import Point
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
    """The server's vector s of each algorithm that has one, float64."""
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What algorithms carry beside it."""
    kept: Mapping[str, dict[int, Tensor]] = field(default_factory=dict)
    """The clients' vectors of each keeping algorithm; only clients that were seen have one."""
    kept_weights: Mapping[str, dict[int, float]] = field(default_factory=dict)
    """The weights that these count with in s: those of the clients' last visits."""
    totals: Totals = field(default_factory=Totals)
    best: tuple[int, Point] | None = None
    """The best round so far and the point after it, where a run keeps that."""

    def last_kept(self, label: str, client: int) -> tuple[Tensor, float] | None:
        """Return a client's vector and its weight; None for a client never seen."""
        kept = self.kept.get(label, {}).get(client)
        return None if kept is None else (kept, self.kept_weights[label][client])

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state as named tensors and counters that JSON can hold: what a checkpoint is made of."""
        tensors = self.point._asdict()
        tensors |= {f"memory.{name}": vector for name, vector in self.memory.items()}
        tensors |= {f"shared.{name}": vector for name, vector in self.shared.items()}
        for name, kept in self.kept.items():
            clients = sorted(kept)
            tensors[f"clients.{name}"] = torch.tensor(clients, dtype=torch.int64)
            tensors[f"kept.{name}"] = torch.stack([kept[client] for client in clients])
            weights = self.kept_weights[name]
            tensors[f"weights.{name}"] = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        numbers = {label: dict(carried) for label, carried in self.numbers.items() if carried}
        counters: dict[str, Any] = {"round": self.round, "totals": asdict(self.totals), "numbers": numbers}
        if self.best is not None:
            counters["best"], point = self.best[0], self.best[1].clone()  # a file cannot hold one vector twice
            tensors |= {f"best.{name}": vector for name, vector in point._asdict().items()}
        return tensors, counters

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> ServerState:
        """Return the state that ``to_tensors`` described; KeyError, TypeError or ValueError where it is not whole."""

        def group(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        point = Point(*(tensors[name] for name in Point._fields))
        for name, vector in (*group("memory.").items(), *group("shared.").items()):
            if vector.shape != point.x.shape:
                raise ValueError(f'the vector "{name}" has the shape {list(vector.shape)}, x has {list(point.x.shape)}')
        clients, vectors, weights = group("clients."), group("kept."), group("weights.")
        if not clients.keys() == vectors.keys() == weights.keys():
            raise ValueError("clients, their vectors and their weights do not belong together")
        for name, matrix in vectors.items():
            if clients[name].ndim != 1 or matrix.shape != (clients[name].numel(), point.x.numel()):
                raise ValueError(f'the clients\' vectors "{name}" have the shape {list(matrix.shape)}')
            if weights[name].shape != clients[name].shape:
                raise ValueError(f'the clients\' weights "{name}" have the shape {list(weights[name].shape)}')
        best = None
        if "best" in counters:
            best = int(counters["best"]), Point(*(tensors[f"best.{name}"] for name in Point._fields))
            if any(own.shape != last.shape for own, last in zip(best[1], point, strict=True)):
                raise ValueError("the best round's model has another shape than the last one's")
        kept = {name: {int(c): vectors[name][row].clone() for row, c in enumerate(clients[name])} for name in clients}
        return cls(
            point=point,
            round=int(counters["round"]),
            memory=group("memory."),
            shared=group("shared."),
            kept=kept,
            kept_weights={
                name: dict(zip(own.tolist(), weights[name].tolist(), strict=True)) for name, own in clients.items()
            },
            totals=Totals(**counters["totals"]),
            numbers=counters.get("numbers", {}),
            best=best,
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
