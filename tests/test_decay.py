"""Weight decay in single precision is that of the formula, also where a step's 1 − lr·decay is hardly below 1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga
from exchanges import group_of, told, trainer_of, who
from gradalign.algorithms.view import Plan
from gradalign.client.flat import Point
from gradalign.client.trainer import ClientTrainer
from gradalign.fast import Group
from gradalign.fast.linear import LargeWeight, ProductLinear

STEPS, LR = 200, 0.01
TINY = 3e-8
BETWEEN = 32.5 * 2**-24  # 1 − this lies between two numbers of float32
SHARES = {"tiny": TINY, "between two numbers": BETWEEN, "1e-5": 1e-5}


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 450, bias=False), nn.Tanh(), nn.Linear(450, 3))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 3, bias=False))


def task_of(model, features: int, clients: int = 1) -> ga.Task:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, features, generator=generator), torch.arange(4) % 3) for _ in range(clients)]
    return ga.Task(model=model, clients=data)


def in_double(task: ga.Task, start: Tensor, decay: float) -> Tensor:
    """Return x after STEPS steps of x ← x − lr·(∇f(x) + decay·x) on the whole client, in float64."""
    model = task.make_model(0).double()
    nn.utils.vector_to_parameters(start.double(), model.parameters())
    inputs, targets = task.clients[0]
    for _ in range(STEPS):
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs.double()), targets), list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= LR * (gradient + decay * p)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def lost(end: Tensor, without: Tensor, start: Tensor) -> float:
    """Return what decay has taken of the start: a mean over all weights, which rounding hardly touches."""
    start = start.double()
    return float((without.double() - end.double()) @ start / start.square().sum())


def trained(trainer: ClientTrainer | Group, start: Point, task: ga.Task) -> Tensor:
    said, clients = told(start, lr=LR, one_by_one=True), who(range(len(task.clients)))
    if isinstance(trainer, Group):
        return start.x + trainer.train(said, clients)[0].vector
    return start.x + trainer.train(said, clients[0], Plan(), task.client(0)).vector


@pytest.mark.parametrize(
    ("way", "share"),
    [("products", TINY), ("products", BETWEEN), ("products", 1e-5), ("cohort", TINY), ("cohort", BETWEEN)],
)
def test_decay_over_many_steps_is_that_of_double_precision(way, share):
    task = task_of(small, 60, clients=25) if way == "cohort" else task_of(wide, 300)
    ends = []
    for decay in (share / LR, 0.0):
        local = ga.LocalTraining(steps=STEPS, weight_decay=decay)
        if way == "cohort":
            trainer = group_of(task, local, clients_per_round=25)
            assert trainer.cohort is not None
            start = trainer.one.flat.read()
        else:
            trainer = trainer_of(task, local)
            assert isinstance(trainer.flat.module[0], ProductLinear)
            start = trainer.flat.read()
        ends.append(trained(trainer, start, task))
    expected = lost(in_double(task, start.x, share / LR), in_double(task, start.x, 0.0), start.x)
    assert 0.5 * STEPS * share < expected < 1.5 * STEPS * share
    assert lost(ends[0], ends[1], start.x) == pytest.approx(expected, rel=4e-3, abs=2e-8)


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("given", [0, 2])
def test_decay_of_factors_is_that_of_double_precision(share, given):
    """W ← (1 − lr·decay)·W for 400 steps after a first one that adds rows: a power, times what was there."""
    generator = torch.Generator().manual_seed(given)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    start, grad_output, inputs = draw(5, 4), draw(2, given, 5), draw(2, given, 4)
    weight = LargeWeight(start, grad_output, inputs, -1.0)
    more, rows = draw(6, 5), draw(6, 4)
    weight.shrink = torch.tensor([[1.0 - share], [1.0]], dtype=torch.float64)  # the second client's step does not decay
    weight.step(more, rows)
    for _ in range(400):
        weight.step(torch.zeros(2, 5), torch.zeros(2, 4))
    begun = start.double() + grad_output.double().mT @ inputs.double()
    added = -more.view(2, 3, 5).double().mT @ rows.view(2, 3, 4).double()
    left = torch.tensor([(1.0 - share) ** 400, 1.0], dtype=torch.float64).view(2, 1, 1)
    kept = torch.tensor([(1.0 - share) ** 401, 1.0], dtype=torch.float64).view(2, 1, 1)
    expected = begun * kept + added * left - begun
    shares, out = torch.tensor([0.3, 0.7]), torch.empty(5, 4)
    weight.sum_of_steps(shares, out)
    wanted = (shares.double().view(2, 1, 1) * expected).sum(0)
    assert float((out - wanted).abs().max()) < 5e-7 * float(wanted.abs().max())
    product = weight.times(torch.eye(4).repeat(2, 1), backward=False).view(2, 4, 5)
    assert torch.allclose(product.double().mT, begun + expected, rtol=1e-6, atol=2e-6)
