"""How often a run is measured by default: measuring stays within its budget, and small runs have whole curves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.server.federation import make_federation
from gradalign.server.measure import FREE, SHARE, settle, spacing

counts = st.integers(1, 5000)


def times_measured(rounds: int, every: int) -> int:
    return len({*range(0, rounds + 1, every), rounds})


@pytest.mark.parametrize(("affordable", "every"), [(2, 100), (3, 50), (4, 34), (11, 10), (1000, 5)])
def test_what_is_affordable_is_spread_over_the_run_with_its_start_and_end(affordable, every):
    """Three measurements of 100 rounds are 0, 50 and 100; twenty points are the most that is wanted."""
    assert spacing(100, 20, cost=2.0, budget=2.0 * affordable + 1.0) == every


@given(rounds=counts, points=st.integers(1, 60), cost=st.floats(0.01, 1e6), budget=st.floats(0.0, 1e8))
def test_a_spacing_keeps_to_its_budget_unless_only_start_and_end_are_left(rounds, points, cost, budget):
    times = times_measured(rounds, spacing(rounds, points, cost, budget))
    affordable = math.floor(budget / cost)
    if affordable <= 2 or rounds == 1:
        assert times == 2  # the start and the end, whatever they cost
    else:
        assert times <= affordable
        assert times > 2 or points == 1  # what can be paid for is used
    assert times <= 2 * points + 1


@given(rounds=counts, points=st.integers(1, 60))
def test_what_costs_nothing_is_measured_at_about_all_points(rounds, points):
    times = times_measured(rounds, spacing(rounds, points, 0.0, 0.0))
    assert min(rounds, points) < times <= 2 * points + 1


def federation(clients: int, size: int, tests: int, algorithm, *, per_round: int):
    data = (torch.zeros(clients * size, 4), torch.zeros(clients * size, dtype=torch.int64))
    parts = torch.arange(clients * size).view(clients, size)
    test = (torch.zeros(tests, 4), torch.zeros(tests, dtype=torch.int64))
    task = ga.Task(model=lambda: nn.Linear(4, 2), clients=ga.PartitionedClients(data, parts), test=test)
    local = ga.LocalTraining(steps=10, batch_size=78)
    return make_federation(task, combine(algorithm), local, per_round=per_round, weights="uniform", dropout=0.0, seed=0)


def test_emnist_sized_runs_by_hand():
    """A round trains on 10 · 10 · 78 = 7,800 examples, an evaluation counts 6,110 / 3, a probe 47 · 780 = 36,660."""
    big = federation(47, 780, 6110, ga.FedAvg(), per_round=10)
    found = settle(ga.Measure(), big, 1000)
    budget = SHARE * 1000 * 7800 + FREE  # 317,000
    assert found.test_every == 1000 // 50  # 51 evaluations cost 103,870, less than half of it
    assert found.train_every == math.ceil(1000 / (math.floor(budget / 2 / 36660) - 1))  # four passes
    # 20 rounds may spend (0.04 · 20 · 7,800 + 5,000) / 2 = 5,620 on each: two evaluations of 2,036.7, and no pass more
    # than the two that are always made. 60 rounds may spend 11,860: five evaluations, so every 60 / 4 rounds.
    for rounds, test_every in ((20, 20), (60, 15)):
        short = settle(ga.Measure(), big, rounds)
        assert (short.test_every, short.train_every) == (test_every, rounds)


def test_gradients_that_a_round_needs_anyway_cost_nothing():
    all_of_them = federation(10, 100, 50, ga.FedGA(beta=0.1), per_round=10)
    assert settle(ga.Measure(), all_of_them, 100).train_every == 5


def test_small_runs_are_measured_in_every_round():
    small = federation(5, 20, 30, ga.FedAvg(), per_round=2)
    found = settle(ga.Measure(), small, 10)
    assert (found.test_every, found.train_every) == (1, 1)


def test_what_was_asked_for_stays():
    big = federation(47, 780, 6110, ga.FedAvg(), per_round=10)
    found = settle(ga.Measure(test_every=1, train_every=0), big, 5)
    assert (found.test_every, found.train_every) == (1, 0)


def test_clients_elsewhere_are_not_looked_at():
    from gradalign.flower.strategy import RemoteClients

    here = federation(47, 780, 6110, ga.FedAvg(), per_round=10)
    away = replace(here, task=replace(here.task, clients=RemoteClients(47, {})))
    assert settle(ga.Measure(train_every=0), away, 100).test_every == 2
