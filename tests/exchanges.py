"""Short ways to say what a server says, for tests that talk to a trainer, a group or an engine directly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gradalign as ga
from gradalign.algorithms.plan import Algorithm, Combination, combine
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import Point
from gradalign.client.trainer import ClientTrainer, Setup
from gradalign.fast import Group, client_trainer


def told(point: Point, algorithm: Algorithm | Combination | None = None, **more: Any) -> Broadcast:
    """What the server tells all: round 0 of FedAvg with lr 0.1, unless told otherwise."""
    given = {"round": 0, "lr": 0.1, "participants": 1, **more}
    return Broadcast(point=point, algorithm=combine(algorithm or ga.FedAvg()), **given)


def who(clients: Iterable[int], weight: float = 1.0) -> list[Participant]:
    """What the server knows of these clients: equal weights, no memory."""
    return [Participant(client=client, weight=weight) for client in clients]


def trainer_of(task: ga.Task, local: ga.LocalTraining, **more: Any) -> ClientTrainer:
    """A trainer of single clients."""
    return client_trainer(Setup(task=task, local=local, **more))


def group_of(task: ga.Task, local: ga.LocalTraining, clients_per_round: int = 0, **more: Any) -> Group:
    """A group's work in rounds of so many clients."""
    return Group(Setup(task=task, local=local, clients_per_round=clients_per_round, **more))
