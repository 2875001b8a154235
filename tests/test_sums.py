"""Algorithms joined by ``+`` in any order are one algorithm, and what a run spent is what its clients computed."""

from __future__ import annotations

import itertools
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import Quadratics, final_point, vector
from gradalign.algorithms import LargeBatchGradAlign

SIZES = (1, 2, 3, 5)
MANY_STEPS = [
    ga.FedAvg(),
    ga.FedProx(mu=0.3),
    ga.Scaffold(),
    ga.Scaffold(control="kept"),
    ga.FedGA(beta=0.2),
    ga.FedGA(beta=0.2, form="step"),
    ga.FedDyn(alpha=0.4),
]
ONE_STEP = [ga.LargeBatchSGD(), LargeBatchGradAlign(beta=0.3), ga.LinearScaling(), ga.LinearScaling(aligned=False)]
EVERYTHING = [*MANY_STEPS, *ONE_STEP, ga.FedAvgM(), ga.FedAdagrad(), ga.FedAdam(), ga.FedYogi()]


def may_be_joined(things) -> bool:
    names = [thing.label for thing in things]
    servers = sum(isinstance(thing, ga.FedAvgM | ga.FedAdagrad | ga.FedAdam | ga.FedYogi) for thing in things)
    return len(set(names)) == len(names) and servers <= 1


def end_of(things) -> np.ndarray:
    """Two rounds of clients with unequal weights, of whom some fall silent in each, from an odd starting point."""
    algorithm = things[0]
    for thing in things[1:]:
        algorithm = algorithm + thing
    steps = None if any(thing in ONE_STEP for thing in things) else 2
    local = ga.LocalTraining(lr=0.07, steps=steps, weight_decay=0.01)
    options = {"weights": "examples", "dropout": 0.4, "seed": 2, "rounds": 2, "workers": 0, "measure": UNMEASURED}
    result = ga.run(Quadratics.make(4, examples=SIZES).task(), algorithm, local=local, **options)
    assert result.history["reported"][1:] == [2, 3]  # partial answers
    return final_point(result)


UNMEASURED = ga.Measure(test_every=0, train_every=0)


def test_a_sum_of_two_is_the_same_both_ways_round():
    for pair in itertools.combinations(EVERYTHING, 2):
        if may_be_joined(pair):
            assert np.array_equal(end_of(pair), end_of(pair[::-1])), pair


def test_a_sum_of_many_is_the_same_in_every_order():
    many = (ga.LinearScaling(), ga.FedDyn(alpha=0.4), LargeBatchGradAlign(beta=0.3), ga.FedProx(mu=0.3), ga.Scaffold())
    ends = [end_of(order) for order in itertools.islice(itertools.permutations(many), 0, 120, 7)]
    assert all(np.array_equal(end, ends[0]) for end in ends)


def test_linear_scaling_and_feddyn_by_hand():
    """u = n Σ p_i Δ_i − h/alpha: the sum first, then FedDyn's correction, which is of the mean."""
    problem, lr, alpha = Quadratics.make(4, examples=SIZES), 0.05, 0.4
    p, n, x = np.array(SIZES) / sum(SIZES), 4, problem.start
    gradients = [problem.gradient(i, x) for i in range(n)]
    mean = sum(p[i] * gradients[i] for i in range(n))
    average = 0.0
    for i in range(n):
        v = -lr / 2 * n * (mean - p[i] * gradients[i])
        average = average - p[i] * lr * (problem.gradient(i, x + v) + alpha * v)
    h = -alpha * average  # h_i = −alpha Δ_i, all four answered
    expected = x + n * average - h / alpha
    algorithm = ga.LinearScaling() + ga.FedDyn(alpha=alpha)
    options = {"rounds": 1, "weights": "examples", "workers": 0, "local": ga.LocalTraining(lr=lr)}
    np.testing.assert_allclose(final_point(ga.run(problem.task(), algorithm, **options)), expected, rtol=1e-12)


def test_a_server_rule_alone_is_fedavg_with_it_in_every_engine():
    task, options = Quadratics.make(4, examples=SIZES).task(), {"rounds": 2, "local": ga.LocalTraining(lr=0.1)}
    expected = ga.run(task, ga.FedAvg() + ga.FedAdam(lr=0.05), workers=0, **options)
    pytest.importorskip("flwr")
    for engine in ({"workers": 0}, {"engine": "flower"}):
        found = ga.run(task, ga.FedAdam(lr=0.05), **engine, **options)
        assert torch.equal(vector(found), vector(expected))
        assert found.summary["algorithm"] == "fedadam"


# What was spent

UNEVEN = [3, 5, 9, 10] * 7
BATCH, STEPS = 4, 2
TRAINED = 7 * (3 + 3 + 4 + 1 + 4 + 4 + 4 + 4)  # a client of 5 has a batch of 4 and one of 1, a client of 3 begins anew
WHOLE = sum(UNEVEN)
LIMITED = sum(min(6, size) for size in UNEVEN)


def crowd() -> ga.Task:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)) for size in UNEVEN
    ]
    return ga.Task(model=lambda: nn.Sequential(nn.Linear(4, 3)), clients=clients, test=clients[0])


@pytest.mark.parametrize("where", ["alone", "cohorts", "flower", "ranks"])
@pytest.mark.parametrize(
    ("algorithm", "limit", "gradients"),
    [
        (ga.FedAvg(), None, 0),
        (ga.Scaffold(control="kept"), None, 0),
        (ga.FedGA(beta=0.1), None, WHOLE),
        (ga.FedGA(beta=0.1), 6, LIMITED),
        (ga.Scaffold(), None, WHOLE),
        (ga.Scaffold(), 6, LIMITED),
    ],
)
def test_examples_are_counted_as_they_were_spent(where, algorithm, limit, gradients, monkeypatch):
    """28 clients of 3, 5, 9 and 10 examples, two steps of at most 4, and a gradient phase over all or over at most 6.

    Whether a measured gradient was taken over (train_every = 1) or taken anew makes no difference.
    """
    if where == "flower":
        pytest.importorskip("flwr")
    options = {"alone": {"fast": False, "workers": 0}, "cohorts": {"workers": 0}, "flower": {"engine": "flower"}}
    local = ga.LocalTraining(lr=0.1, steps=STEPS, batch_size=BATCH, gradient_examples=limit)
    if where == "ranks":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (ranks | {"TORCHELASTIC_RUN_ID": "alone"}).items():
            monkeypatch.setenv(name, value)
    for every in (0, 1):
        measure = replace(UNMEASURED, train_every=every)
        result = ga.run(
            crowd(), algorithm, rounds=3, local=local, measure=measure, **options.get(where, {"engine": "distributed"})
        )
        assert result.summary["examples"] == 3 * (TRAINED + gradients)
        assert result.history["examples"] == [i * (TRAINED + gradients) for i in range(4)]


def test_a_silent_client_has_spent_its_gradient():
    """Of four clients some fall silent after the gradient phase: their gradients count, their steps do not."""
    task = Quadratics.make(4, examples=SIZES).task()
    local = ga.LocalTraining(lr=0.05, steps=3)
    result = ga.run(task, ga.FedGA(beta=0.1), rounds=1, local=local, dropout=0.4, seed=2, workers=0, measure=UNMEASURED)
    assert result.history["reported"] == [None, 2]
    stepped = result.summary["examples"] - sum(SIZES)
    assert stepped in {3 * (a + b) for a, b in itertools.combinations(SIZES, 2)}  # three steps on all that they have


# min_fraction and device


def test_run_takes_the_least_fraction_of_answers():
    task = Quadratics.make(4).task()
    options = {"rounds": 2, "local": ga.LocalTraining(lr=0.1), "dropout": 0.4, "seed": 2, "workers": 0}
    assert ga.run(task, ga.FedAvg(), min_fraction=0.5, **options).history["reported"][1:] == [2, 3]
    with pytest.raises(ga.GradalignError, match="only 2 of 4 clients answered the training phase of round 1, and 3"):
        ga.run(task, ga.FedAvg(), min_fraction=0.75, **options)
    with pytest.raises(ga.GradalignError, match=r"clients\.min_fraction must be a number in \[0, 1\], got 1.5"):
        ga.run(task, ga.FedAvg(), min_fraction=1.5, **options)
