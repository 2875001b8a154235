"""Small smooth problems in float64, and the arena in which the library's own code runs on them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm, ClientView, combine
from gradalign.client import LocalTraining
from gradalign.client.flat import Point
from gradalign.engines.local import InProcessEngine
from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, torch_stream
from gradalign.server.alignment import Probe, mean_gradient
from gradalign.server.federation import Federation, ServerState
from gradalign.server.rounds import play_round
from gradalign.tasks.task import Task
from gradalign.theory.calculus import Calculus


def mean_energy(outputs: Tensor, _: Any) -> Tensor:
    """Return the mean of per-example energies."""
    return outputs.mean()


def predict_energy(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Hand the whole batch to a model that gives one energy per example."""
    return model(*batch), batch


class Quadratic(nn.Module):
    """f_i(x) = ½ (x − c_i)ᵀ H_i (x − c_i); H_i and c_i are the client's only example."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def forward(self, hessians: Tensor, centres: Tensor) -> Tensor:
        """Return the energy of each example."""
        gap = self.x - centres
        return 0.5 * torch.einsum("bi,bij,bj->b", gap, hessians, gap)


def quadratic_task(*, seed: int = 0, clients: int = 12, size: int = 6) -> Task:
    """Return clients with random symmetric Hessians, some of them indefinite."""
    random = torch_stream(seed, Purpose.SYNTHETIC, 1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    matrices = draw(clients, size, size)
    hessians = 0.5 * (matrices + matrices.mT) + 2.0 * torch.eye(size, dtype=torch.float64)
    centres, x = draw(clients, size), draw(size)
    return Task(
        model=Quadratic(x),
        clients=[(hessians[i : i + 1], centres[i : i + 1]) for i in range(clients)],
        loss=mean_energy,
        predict=predict_energy,
        name="quadratic",
    )


def mlp_task(*, seed: int = 0, clients: int = 12, examples: int = 6) -> Task:
    """Return a tanh network with a cross-entropy loss on random data, another distribution for each client."""
    random = torch_stream(seed, Purpose.SYNTHETIC, 2)
    widths = (5, 7, 3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.copy_(0.8 * draw(*parameter.shape))
    data = []
    for _ in range(clients):
        inputs = draw(examples, widths[0]) + draw(widths[0])
        data.append((inputs, torch.randint(widths[-1], (examples,), generator=random)))
    return Task(model=nn.Sequential(layers[0], nn.Tanh(), layers[1]), clients=data, name="tanh network")


def _smooth_twin(module: nn.Module) -> nn.Module | None:
    """Return a twice differentiable layer to stand in for one that is not, None where none is needed."""
    match module:
        case nn.ReLU() | nn.ReLU6() | nn.LeakyReLU():
            return nn.GELU()
        case nn.MaxPool1d():
            return nn.AvgPool1d(module.kernel_size, module.stride, module.padding)
        case nn.MaxPool2d():
            return nn.AvgPool2d(module.kernel_size, module.stride, module.padding)
        case nn.MaxPool3d():
            return nn.AvgPool3d(module.kernel_size, module.stride, module.padding)
        case _:
            return None


def _make_smooth(model: nn.Module) -> set[str]:
    """Turn off dropout and replace layers with kinks, in place; return what was replaced by what."""
    changes = set()
    for parent in list(model.modules()):
        if "Dropout" in type(parent).__name__:
            vars(parent)["p"] = 0.0
        if isinstance(parent, nn.RNNBase):
            parent.dropout = 0.0
        for name, child in list(parent.named_children()):
            twin = _smooth_twin(child)
            if twin is not None:
                setattr(parent, name, twin)
                changes.add(f"{type(child).__name__} as {type(twin).__name__}")
    return changes


def users_task(task: Task, *, seed: int = 0, clients: int = 4, examples: int = 32) -> Task:
    """Return the first clients of a task, cut to a few examples, with a smooth float64 model.

    The claims are about fixed, twice differentiable functions f_i. So dropout is turned off, ReLU layers become GELU
    and max-pooling becomes average-pooling, where they are modules; the task's name says what was replaced.
    """
    if len(task.clients) < 2:
        raise GradalignError(f"the task {task.name} has one client; alignment needs at least 2")
    probe = Probe(task, clients=range(min(clients, len(task.clients))), examples=examples, seed=seed)
    model = copy.deepcopy(task.make_model(seed)).double()
    name = ", ".join([task.name, *sorted(_make_smooth(model))])
    return replace(
        task, model=model, clients=[probe.examples(client) for client in probe.clients], groups=None, name=name
    )


class Problem:
    """One problem, with the library's engine on one side and independent calculus on the other.

    Attributes:
        x: The point at which every claim is checked.
        unit: A step length at which second-order effects are felt: one over the largest client curvature.
    """

    def __init__(self, task: Task, *, seed: int = 0) -> None:
        self.task, self.seed, self.name = task, seed, task.name
        self.calculus = Calculus(task, seed)
        self.point = Probe(task, seed=seed).start()
        self.x = self.point.x.double()
        if self.point.x.dtype != torch.float64:
            raise GradalignError(f"the checks need a float64 model, the task {task.name} makes {self.point.x.dtype}")
        self.scale = float(self.x.norm())
        curvature = self.calculus.curvature(self.x, range(min(4, len(task.clients))))
        if not curvature > 0.0:
            raise GradalignError(f"the task {task.name} has no curvature at its first point, so nothing to check")
        self.unit = 1.0 / curvature
        self._engine = cache(self._make_engine)

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients."""
        return tuple(range(len(self.task.clients)))

    @property
    def quadratic(self) -> bool:
        """Whether the gradients are linear, so that Lemma 1 leaves no remainder."""
        return isinstance(self.task.model, Quadratic)

    def _make_engine(self, members: tuple[int, ...], steps: int) -> tuple[Task, InProcessEngine]:
        """Return a task with only these clients (one that occurs twice is two clients), and an engine for it."""
        task = replace(self.task, clients=[self.task.client(client) for client in members])
        return task, InProcessEngine(task, LocalTraining(steps=steps), self.seed)

    def at(self, x: Tensor) -> Point:
        """Return x as a server's point."""
        return Point(x, self.point.floats, self.point.ints)

    def probe(self, members: Sequence[int]) -> Probe:
        """Return the library's measuring tool for some clients."""
        return Probe(self.task, clients=members, seed=self.seed)

    def displacements(self, algorithm: Algorithm, members: Sequence[int], *, lr: float) -> Tensor:
        """Return the displacements v_i that the algorithm plans at x, one row per member."""
        probe, point, size = self.probe(members), self.point, len(members)
        mean = mean_gradient(probe, point)
        rows = []
        for client, share in probe.shares():
            own = probe.gradient(point, client)
            view = ClientView(x=self.x, lr=lr, weight=share, participants=size, gradient=own, mean_gradient=mean)
            move = algorithm.plan(view).displacement
            rows.append(torch.zeros_like(mean) if move is None else move)
        return torch.stack(rows)

    def round(self, algorithm: Algorithm, x: Tensor, members: Sequence[int], *, lr: float, steps: int = 1) -> Tensor:
        """Return the server's point after one round, played as an experiment plays it."""
        task, engine = self._engine(tuple(members), steps)
        federation = Federation(
            task=task,
            algorithm=combine(algorithm),
            local=LocalTraining(lr=lr, steps=steps),
            per_round=len(members),
            seed=self.seed,
        )
        state, _ = play_round(federation, engine, ServerState(point=self.at(x)))
        return state.point.x

    def rounds(self, algorithm: Algorithm, members: Sequence[int], *, lr: float, count: int) -> Tensor:
        """Return the server's point after ``count`` one-step rounds from x."""
        x = self.x
        for _ in range(count):
            x = self.round(algorithm, x, members, lr=lr)
        return x

    def sgd(self, sequence: Sequence[int], *, lr: float) -> Tensor:
        """Return the point that plain SGD reaches from x when it takes the mini-batches in this order."""
        x = self.x
        for client in sequence:
            x = x - lr * self.calculus.gradient(x, client)
        return x
