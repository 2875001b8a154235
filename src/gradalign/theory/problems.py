"""Small smooth problems in float64: the library's own code runs on them beside independent calculus."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.algorithms.plan import Algorithm, combine
from gradalign.algorithms.view import ClientView
from gradalign.client import LocalTraining
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.errors import GradalignError
from gradalign.seeding import Purpose, torch_stream
from gradalign.server.federation import Federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState
from gradalign.tasks.batches import map_tensors
from gradalign.tasks.task import Task
from gradalign.theory.probe import Probe, mean_gradient


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


class Energy(nn.Module):
    """A function of x alone, with one energy for each example; a client has one example."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def task(self, name: str, *columns: Tensor) -> Task:
        """Return the task of finding x, one client for each row of these columns."""
        clients = list(zip(*(column.split(1) for column in columns), strict=True))
        return Task(
            model=self,
            clients=clients,
            loss=lambda energies, _: energies.mean(),
            predict=lambda model, batch: (model(*batch), batch),
            name=name,
        )


class Quadratic(Energy):
    """f_i(x) = ½ (x − c_i)ᵀ H_i (x − c_i); H_i and c_i are the client's only example."""

    def forward(self, hessians: Tensor, centres: Tensor) -> Tensor:
        gap = self.x - centres
        return 0.5 * torch.einsum("bi,bij,bj->b", gap, hessians, gap)


def quadratic_task(*, seed: int = 0, clients: int = 12, size: int = 6) -> Task:
    """Return clients with random symmetric Hessians, some of them indefinite."""
    random = torch_stream(seed, Purpose.SYNTHETIC, 1)
    matrices = normal(random, clients, size, size)
    hessians = 0.5 * (matrices + matrices.mT) + 2.0 * torch.eye(size, dtype=torch.float64)
    centres, x = normal(random, clients, size), normal(random, size)
    return Quadratic(x).task("quadratic", hessians, centres)


def mlp_task(*, seed: int = 0, clients: int = 12, examples: int = 6) -> Task:
    """Return a tanh network with a cross-entropy loss on random data, another distribution for each client."""
    random = torch_stream(seed, Purpose.SYNTHETIC, 2)
    widths = (5, 7, 3)
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    with torch.no_grad():
        for parameter in (p for layer in layers for p in layer.parameters()):
            parameter.copy_(0.8 * normal(random, *parameter.shape))
    data = []
    for _ in range(clients):
        inputs = normal(random, examples, widths[0]) + normal(random, widths[0])
        data.append((inputs, torch.randint(widths[-1], (examples,), generator=random)))
    return Task(model=nn.Sequential(layers[0], nn.Tanh(), layers[1]), clients=data, name="tanh network")


_AVERAGING = {nn.MaxPool1d: nn.AvgPool1d, nn.MaxPool2d: nn.AvgPool2d, nn.MaxPool3d: nn.AvgPool3d}


def _smooth_twin(module: nn.Module) -> nn.Module | None:
    """Return a twice differentiable layer to stand in for one that is not, None where none is needed."""
    if isinstance(module, nn.ReLU | nn.ReLU6 | nn.LeakyReLU):
        return nn.GELU()
    pooling = next((twin for kind, twin in _AVERAGING.items() if isinstance(module, kind)), None)
    return None if pooling is None else pooling(module.kernel_size, module.stride, module.padding)


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
    data = [probe.examples(client) for client in probe.clients]
    return replace(task, model=model, clients=data, groups=None, name=name)


class _Objective(nn.Module):
    """The loss of a batch as a module, so that its parameters can be exchanged."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(*self.task.predict(self.model, batch))


class Calculus:
    """Exact calculus on the clients' losses in float64, as functions of the flat parameter vector.

    It is plain autograd and shares no code with the trainer: the other side of every comparison. ``members`` are client
    numbers A = (a_1, …, a_K); a client may occur more than once.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._objective = _Objective(task, task.make_model(seed).double())
        self._trained = [(n, p.shape) for n, p in self._objective.named_parameters() if p.requires_grad]
        whole = [client.batch(torch.arange(len(client))) for client in map(task.client, range(len(task.clients)))]
        self._batches = [map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch) for batch in whole]

    def loss(self, x: Tensor, client: int) -> Tensor:
        """Return f_i(x)."""
        pieces = x.split([shape.numel() for _, shape in self._trained])
        parameters = {name: piece.view(shape) for (name, shape), piece in zip(self._trained, pieces, strict=True)}
        value: Tensor = torch.func.functional_call(self._objective, parameters, (self._batches[client],))
        return value

    def gradient(self, x: Tensor, client: int) -> Tensor:
        """Return ∇f_i(x)."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.loss(x, client), x)[0]

    def mean_gradient(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return ∇f_A(x)."""
        return torch.stack([self.gradient(x, client) for client in members]).mean(dim=0)

    def _gradient_graph(self, x: Tensor, client: int) -> Tensor:
        return torch.autograd.grad(self.loss(x, client), x, create_graph=True)[0]

    def hessian_product(self, x: Tensor, client: int, vector: Tensor) -> Tensor:
        """Return ∇²f_i(x)·vector."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self._gradient_graph(x, client) @ vector, x)[0]

    def objective(self, x: Tensor, members: Sequence[int], beta: float) -> float:
        """Return f_A(x) + β r_A(x)."""
        x = x.detach().requires_grad_()
        mean = sum(float(self.loss(x, client).detach()) for client in members) / len(members)
        return mean + beta * float(self._r(x, members).detach())

    def _r(self, x: Tensor, members: Sequence[int]) -> Tensor:
        gradients = torch.stack([self._gradient_graph(x, client) for client in members])
        return 0.5 * (gradients - gradients.mean(dim=0)).square().sum(dim=1).mean()

    def r(self, x: Tensor, members: Sequence[int]) -> float:
        """Return r_A(x)."""
        return float(self._r(x.detach().requires_grad_(), members).detach())

    def r_gradient(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return ∇r_A(x): autograd of r_A itself, not the formula with Hessians."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self._r(x, members), x)[0]

    def bent_spread(self, x: Tensor, members: Sequence[int]) -> Tensor:
        """Return mean_i ∇²(½‖∇f_i‖²)(x)·(g_i − ḡ), the vector of the α²β term of FedGA."""
        mean, total = self.mean_gradient(x, members), torch.zeros_like(x)
        for client in members:
            y = x.detach().requires_grad_()
            gradient = self._gradient_graph(y, client)
            slope = torch.autograd.grad(0.5 * gradient.square().sum(), y, create_graph=True)[0]
            total += torch.autograd.grad(slope @ (gradient.detach() - mean), y)[0]
        return total / len(members)

    def curvature(self, x: Tensor, members: Sequence[int], iterations: int = 12) -> float:
        """Return about max_i ‖∇²f_i(x)‖, by power iteration."""
        largest = 0.0
        for client in members:
            v = self.gradient(x, client) + 1e-3
            for _ in range(iterations):
                v = self.hessian_product(x, client, v / v.norm().clamp_min(1e-300))
            largest = max(largest, float(v.norm()))
        return largest


class Problem:
    """One problem, with the library's engine on one side and independent calculus on the other.

    Attributes:
        quadratic: Whether the gradients are linear, so that Lemma 1 leaves no remainder.
        x: The point at which every claim is checked.
        unit: A step length at which second-order effects are felt: one over the largest client curvature.
    """

    def __init__(self, task: Task, *, seed: int = 0) -> None:
        self.task, self.seed, self.name = task, seed, task.name
        self.clients = tuple(range(len(task.clients)))
        self.quadratic = isinstance(task.model, Quadratic)
        self.calculus = Calculus(task, seed)
        self.point = Probe(task, seed=seed).start()
        self.x = self.point.x.double()
        if self.point.x.dtype != torch.float64:
            raise GradalignError(f"the checks need a float64 model, the task {task.name} makes {self.point.x.dtype}")
        self.scale = float(self.x.norm())
        curvature = self.calculus.curvature(self.x, self.clients[:4])
        if not curvature > 0.0:
            raise GradalignError(f"the task {task.name} has no curvature at its first point, so nothing to check")
        self.unit = 1.0 / curvature
        self._engine = cache(self._make_engine)

    def _make_engine(self, members: tuple[int, ...], steps: int) -> tuple[Task, InProcessEngine]:
        """Return a task with only these clients (one that occurs twice is two clients), and an engine for it."""
        task = replace(self.task, clients=[self.task.client(client) for client in members])
        return task, InProcessEngine(Setup(task=task, local=LocalTraining(steps=steps), seed=self.seed))

    def at(self, x: Tensor) -> Point:
        """Return x as a server's point."""
        return Point(x, self.point.floats, self.point.ints)

    def probe(self, members: Sequence[int]) -> Probe:
        return Probe(self.task, clients=members, seed=self.seed)

    def displacements(self, algorithm: Algorithm, members: Sequence[int], *, lr: float) -> Tensor:
        """Return the displacements v_i that the algorithm plans at x, one row per member."""
        probe, rows = self.probe(members), []
        mean, size = mean_gradient(probe, self.point), len(members)
        for client, share in probe.shares():
            own = probe.gradient(self.point, client)
            view = ClientView(x=self.x, lr=lr, weight=share, participants=size, gradient=own, mean_gradient=mean)
            move = algorithm.plan(view).displaced(own)
            rows.append(torch.zeros_like(mean) if move is None else move)
        return torch.stack(rows)

    def play(
        self, task: Task, engine: InProcessEngine, algorithm: Algorithm, x: Tensor, *, rounds: int = 1, **options: Any
    ) -> Tensor:
        """Return the server's point after rounds with all clients of a task, played as training plays them."""
        combined, everyone = combine(algorithm), len(task.clients)
        made = Federation(task=task, algorithm=combined, per_round=everyone, seed=self.seed, **options)
        state = ServerState(point=self.at(x))
        for _ in range(rounds):
            state, _ = play_round(made, engine, state)
        return state.point.x

    def round(
        self, algorithm: Algorithm, x: Tensor, members: Sequence[int], *, lr: float, steps: int = 1, rounds: int = 1
    ) -> Tensor:
        """Return the server's point after one round with these clients, or after some that share their memory."""
        task, engine = self._engine(tuple(members), steps)
        return self.play(task, engine, algorithm, x, rounds=rounds, local=LocalTraining(lr=lr, steps=steps))

    def sgd(self, sequences: Sequence[Sequence[int]], *, lr: float) -> Tensor:
        """Return the mean of the points that plain SGD reaches from x, taking mini-batches in each of these orders."""
        ends = []
        for sequence in sequences:
            x = self.x
            for client in sequence:
                x = x - lr * self.calculus.gradient(x, client)
            ends.append(x)
        return torch.stack(ends).mean(dim=0)
