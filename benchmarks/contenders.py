"""Who is timed: the plain loop everyone writes, the same loop tuned, and this library. Each plays rounds of FedAvg."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import Workload

if TYPE_CHECKING:  # at run time only this_library imports it: the plain loop's memory is measured without it
    from gradalign.algorithms.plan import Algorithm

Round = Callable[[], None]


def _sample(workload: Workload, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return sorted(torch.randperm(workload.clients, generator=generator)[: workload.sampled].tolist())


def train_plainly(model: nn.Module, dataset: TensorDataset, workload: Workload) -> None:
    """Train a client's model the way everyone writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
    loader = DataLoader(dataset, batch_size=workload.batch, shuffle=True)
    left = workload.local_steps()
    while left:
        for batch, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels).backward()
            optimizer.step()
            left -= 1
            if not left:
                break


@contextmanager
def plain_loop(workload: Workload, data: tuple[Tensor, Tensor]) -> Iterator[Round]:
    """The loop everyone writes: load_state_dict, DataLoader, torch.optim.SGD, two threads."""
    inputs, targets = data
    size = workload.size
    datasets = [
        TensorDataset(inputs[i * size : (i + 1) * size], targets[i * size : (i + 1) * size])
        for i in range(workload.clients)
    ]
    server, model = workload.model(), workload.model()
    number = 0

    def play() -> None:
        nonlocal number
        number += 1
        states = []
        for client in _sample(workload, number):
            model.load_state_dict(server.state_dict())
            train_plainly(model, datasets[client], workload)
            states.append(copy.deepcopy(model.state_dict()))
        mean = {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}
        server.load_state_dict(mean)

    yield play


@contextmanager
def tuned_loop(workload: Workload, data: tuple[Tensor, Tensor]) -> Iterator[Round]:
    """The same loop tuned: channels_last, batches indexed in memory, a running mean."""
    inputs, targets = data
    server, model = workload.model(), workload.model()
    if inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        server.to(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)
    number = 0

    def play() -> None:
        nonlocal number
        number += 1
        mean = [torch.zeros_like(p) for p in server.parameters()]
        for client in _sample(workload, number):
            model.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
            left = workload.local_steps()
            while left:
                for rows in torch.randperm(workload.size).split(workload.batch)[:left]:
                    rows = rows + client * workload.size
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
                    optimizer.step()
                    left -= 1
            with torch.no_grad():
                torch._foreach_add_(mean, list(model.parameters()), alpha=1.0 / workload.sampled)
        with torch.no_grad():
            torch._foreach_copy_(list(server.parameters()), mean)

    yield play


@contextmanager
def this_library(
    workload: Workload, data: tuple[Tensor, Tensor], algorithm: Algorithm | None = None, workers: int | None = None
) -> Iterator[Round]:
    """Rounds of this library's local engine, with its default number of workers."""
    import gradalign as ga
    from gradalign.algorithms.plan import combine
    from gradalign.client.flat import FlatModel
    from gradalign.client.trainer import Setup
    from gradalign.engines.local import local_engine
    from gradalign.server.federation import make_federation
    from gradalign.server.rounds import play_round
    from gradalign.server.state import ServerState

    task, local = workload.task(data), workload.local()
    federation = make_federation(
        task,
        combine(algorithm or ga.FedAvg()),
        local,
        per_round=workload.sampled,
        weights="uniform",
        dropout=0.0,
        seed=0,
    )
    state = ServerState(point=FlatModel(task.make_model(0)).read())
    setup = Setup(task=task, local=local, clients_per_round=workload.sampled, algorithm=federation.algorithm)
    with local_engine(setup, workers) as engine:

        def play() -> None:
            nonlocal state
            state, _ = play_round(federation, engine, state)

        yield play
