"""Server rules against their papers' formulas, worked out with plain floats."""

from __future__ import annotations

import math

import pytest
import torch

import gradalign as ga

UPDATES = [[0.5, -2.0], [0.1, 1.0], [-0.3, 0.0]]


def play(rule: ga.ServerRule) -> list[float]:
    x, memory = torch.tensor([1.0, -1.0], dtype=torch.float64), {}
    for update in UPDATES:
        x, memory = rule.step(x, torch.tensor(update, dtype=torch.float64), memory)
    return x.tolist()


def test_average():
    assert play(ga.ServerRule(lr=0.5)) == pytest.approx([1 + 0.5 * 0.3, -1 - 0.5 * 1.0], abs=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm(nesterov):
    expected = []
    for j, x in enumerate((1.0, -1.0)):
        m = 0.0
        for update in UPDATES:
            m = 0.9 * m + update[j]
            x += 0.7 * (update[j] + 0.9 * m if nesterov else m)
        expected.append(x)
    assert play(ga.FedAvgM(lr=0.7, momentum=0.9, nesterov=nesterov)) == pytest.approx(expected, abs=1e-14)


SECOND_MOMENTS = {
    ga.FedAdagrad: lambda v, u: v + u * u,
    ga.FedAdam: lambda v, u: 0.99 * v + 0.01 * u * u,
    ga.FedYogi: lambda v, u: v - 0.01 * u * u * (0.0 if v == u * u else math.copysign(1.0, v - u * u)),
}


@pytest.mark.parametrize("kind", SECOND_MOMENTS)
def test_adaptive_rules(kind):
    """Reddi et al. 2021, algorithm 2, from m = 0 and v = τ²."""
    expected = []
    for j, x in enumerate((1.0, -1.0)):
        m, v = 0.0, 1e-2**2
        for update in UPDATES:
            u = update[j]
            m = 0.9 * m + 0.1 * u
            v = SECOND_MOMENTS[kind](v, u)
            x += 0.3 * m / (math.sqrt(v) + 1e-2)
        expected.append(x)
    assert play(kind(lr=0.3, beta1=0.9, tau=1e-2)) == pytest.approx(expected, abs=1e-13)


def test_rules_do_not_change_what_they_are_given():
    rule, x = ga.FedAdam(), torch.ones(2, dtype=torch.float64)
    _, memory = rule.step(x, x.clone(), {})
    before = {name: tensor.clone() for name, tensor in memory.items()}
    rule.step(x, x.clone(), memory)
    assert torch.equal(x, torch.ones(2, dtype=torch.float64))
    assert all(torch.equal(memory[name], before[name]) for name in memory)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ga.ServerRule(lr=0.0), "server.lr must be greater than 0"),
        (lambda: ga.FedAvgM(momentum=1.0), r"server.momentum must be in \[0, 1\)"),
        (lambda: ga.FedAdam(beta2=1.5), r"server.beta2 must be in \[0, 1\)"),
        (lambda: ga.FedYogi(tau=0.0), "server.tau must be greater than 0"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ga.GradalignError, match=message):
        make()
