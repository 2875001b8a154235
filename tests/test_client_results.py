"""How every client fares: on its own test examples, before and after tuning at home, in every engine alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine

LOCAL = ga.LocalTraining(lr=0.2, steps=3, weight_decay=0.01)


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=random)


def task_of(sizes=(30, 12, 7, 20), tests=(1203, None, 4, 11), **more) -> ga.Task:
    """Uneven clients; the first one's tests are more than one piece, the second one has none."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Linear(5, 3).double()
    own = [None if count is None else data(count, 50 + i) for i, count in enumerate(tests)]
    clients = [data(count, i) for i, count in enumerate(sizes)]
    return ga.Task(**({"model": model, "clients": clients, "client_tests": own, "test": data(40, 99)} | more))


def by_hand(task: ga.Task, client: int, *, tuned: bool) -> tuple[float, float]:
    """Score a client with torch's own optimizer and nothing of ours."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.lr, weight_decay=LOCAL.weight_decay)
    for _ in range(LOCAL.steps if tuned else 0):
        optimizer.zero_grad()
        F.cross_entropy(model(task.clients[client][0]), task.clients[client][1]).backward()
        optimizer.step()
    inputs, labels = task.client_tests[client]
    with torch.no_grad():
        outputs = model(inputs)
    return float(F.cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).double().mean())


@pytest.mark.parametrize("tuned", [False, True], ids=["as it is", "tuned"])
def test_every_client_is_scored_on_its_own_examples(tuned):
    task = task_of()
    setup = Setup(task=task, local=LOCAL, algorithm=combine(ga.FedAvg()))
    point = FlatModel(task.make_model(0)).read()
    told = Broadcast(point=point, round=4, algorithm=setup.algorithm, lr=LOCAL.lr)
    who, before = [Participant(client=client) for client in (0, 1, 3, 2)], point.x.clone()
    with InProcessEngine(setup) as here, PoolEngine(setup, 2) as pool:
        scores = list(here.evaluate_clients(told, who, tuned=tuned))
        assert list(pool.evaluate_clients(told, who, tuned=tuned)) == scores, "to the last bit"
    assert [(one.client, one.examples) for one in scores] == [(0, 1203), (3, 11), (2, 4)]
    for one in scores:
        assert (one.loss, one.accuracy) == pytest.approx(by_hand(task, one.client, tuned=tuned), rel=1e-12)
    assert torch.equal(point.x, before), "what is tuned is thrown away"
