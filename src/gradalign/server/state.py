"""What a run carries from one round to the next, and how a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradalign.algorithms.rules import Memory
from gradalign.client.flat import Point


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
        # Copies, since a file cannot hold one vector twice.
        tensors |= {f"memory.{name}": vector.clone() for name, vector in self.memory.items()}
        tensors |= {f"shared.{name}": vector.clone() for name, vector in self.shared.items()}
        for name, kept in self.kept.items():
            clients = sorted(kept)
            tensors[f"clients.{name}"] = torch.tensor(clients, dtype=torch.int64)
            tensors[f"kept.{name}"] = torch.stack([kept[client] for client in clients])
            weights = self.kept_weights[name]
            tensors[f"weights.{name}"] = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        own = ((label, carried) for label, carried in self.numbers.items() if carried)
        numbers = {label: {name: float(number) for name, number in carried.items()} for label, carried in own}
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
        if clients.keys() != vectors.keys():
            raise ValueError("clients and their vectors do not belong together")
        if clients.keys() != weights.keys():
            raise ValueError("the clients' vectors have no weights, as in a checkpoint of an earlier version")
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
