"""The measuring tools on uneven data: which clients, which rows, which shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from gradalign.theory.diagnose import diagnose
from gradalign.theory.probe import Probe, mean_gradient, regulariser_gradient, spread, within_client
from reference import Problem, record


def measured(clients: int, limit: int, seed: int, rounds: int = 3) -> list[list[int]]:
    """Return the clients that each measurement visits."""
    measure = ga.Measure(test_every=0, train_every=1, train_clients=limit)
    problem = Problem((2,) * clients)
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=1)
    chances, _ = record(problem, ga.FedAvg(), rounds=rounds, measure=measure, seed=seed, local=local)
    return [list(chance.gradients) for chance in chances]


def test_the_same_clients_are_measured_in_all_rounds_client_0_among_them():
    found = measured(9, 4, seed=0)
    assert all(one == found[0] for one in found)
    assert found[0][0] == 0
    assert len(set(found[0])) == 4
    assert found[0] == sorted(found[0])
    assert measured(9, 4, seed=0, rounds=1)[0] == found[0]
    for limit in (9, 10):
        assert measured(9, limit, seed=0, rounds=1)[0] == list(range(9))
    assert measured(9, 1, seed=0, rounds=1)[0] == [0]


def test_the_other_measured_clients_are_a_seeded_choice_of_all():
    chosen = [measured(7, 3, seed, rounds=1)[0] for seed in range(30)]
    others = np.bincount([client for one in chosen for client in one[1:]], minlength=7)
    assert others[0] == 0
    assert all(others[1:] > 0)
    assert len({tuple(one) for one in chosen}) > 5


def test_hessian_products_of_many_examples_are_those_of_their_mean():
    """701 examples do not divide evenly; the loss is the mean over all of them."""
    problem = Problem((701, 3))
    probe = Probe(problem.task())
    point, rows = probe.start(), torch.arange(701)
    vector = torch.randn(len(point.x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = point.x.clone().requires_grad_()
    loss, _ = problem.loss(x, rows, x[:0])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (expected,) = torch.autograd.grad(slope @ vector, x)
    torch.testing.assert_close(probe.hessian_product(point, 0, vector), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(probe.gradient(point, 0), slope.detach(), rtol=1e-10, atol=1e-12)


def linear_task(*clients: list[list[float]]) -> ga.Task:
    """f_i = w·mean of the client's rows: a gradient is that mean, wherever it is taken."""
    data = [(torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows))) for rows in clients]
    model = nn.Linear(2, 1, bias=False).double()
    return ga.Task(model=model, clients=data, loss=lambda outputs, _: outputs.mean(), name="linear")


def test_uneven_halves():
    """Of three examples one half has one and the other two: noise = √(1·2)/3 · ‖g_a − g_b‖, for one of three splits."""
    rows = np.array([[1.0, 0.0], [0.0, 3.0], [-5.0, 2.0]])
    probe = Probe(linear_task(rows.tolist(), rows.tolist()))
    found = within_client(probe, probe.start(), 0)
    allowed = {}
    for one in range(3):
        a, b = rows[one], np.delete(rows, one, axis=0).mean(axis=0)
        noise = math.sqrt(2) / 3 * float(np.linalg.norm(a - b))
        allowed[round(noise, 12)] = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert round(found.noise, 12) in allowed
    assert found.cosine == pytest.approx(allowed[round(found.noise, 12)], rel=1e-12)


def test_two_examples_are_two_halves():
    probe = Probe(linear_task([[1.0, 0.0], [0.0, 3.0]]))
    found = within_client(probe, probe.start(), 0)
    assert found.noise == pytest.approx(math.sqrt(10) / 2, rel=1e-12)
    assert found.cosine == pytest.approx(0.0, abs=1e-12)


def test_a_diagnosis_by_hand():
    """Three clients of two examples: halves are single examples, so nothing is left to chance."""
    rows = [[[1.0, 0.0], [3.0, 2.0]], [[0.0, 4.0], [2.0, 8.0]], [[-1.0, 1.0], [1.0, 3.0]]]
    found = diagnose(linear_task(*rows), lr=0.2, steps=5)
    g = np.array(rows).mean(axis=1)
    mean = g.mean(axis=0)
    away = np.linalg.norm(g - mean, axis=1)
    length, r = float(np.linalg.norm(mean)), float(0.5 * (away**2).mean())
    # ‖a − b‖²/4 estimates the variance of a client's mean; of n clients' spread, (1 − 1/n) is expected.
    noise = np.mean([np.sum(np.subtract(a, b) ** 2) / 4 for a, b in rows])
    d = math.sqrt(2 * r) / length
    units = g / np.linalg.norm(g, axis=1, keepdims=True)
    pairs = [units[i] @ units[j] for i in range(3) for j in range(3) if i != j]
    halves = [np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b) for a, b in rows]
    expected = {
        "mean_norm": length,
        "r": r,
        "relative": d,
        "relative_min": away.min() / length,
        "relative_median": np.median(away) / length,
        "relative_max": away.max() / length,
        "between": np.mean(pairs),
        "within": np.mean(halves),
        "chance": (2 / 3) * noise / (2 * r),
        "beta_scaffold": 0.2 * 4 / 2,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert found.beta_low == pytest.approx(0.25 * 0.2 * 5 / d, rel=1e-12)
    assert found.beta_high == pytest.approx(0.2 * 5 / d, rel=1e-12)
    assert (found.clients, found.examples) == (3, 6)


def test_weighted_measurements_by_hand():
    """Weights 1 and 3 of the gradients (4, 0) and (0, 2): the mean is (1, 1.5)."""
    probe = Probe(linear_task([[4.0, 0.0]], [[0.0, 2.0]]), weights=(1.0, 3.0))
    point = probe.start()
    assert mean_gradient(probe, point).tolist() == pytest.approx([1.0, 1.5])
    found = spread(probe, point)
    assert found.r == pytest.approx(0.5 * (0.25 * (9 + 2.25) + 0.75 * (1 + 0.25)))
    assert found.distances == pytest.approx((math.sqrt(11.25), math.sqrt(1.25)))
    assert found.pairwise == pytest.approx(0.0, abs=1e-12)


def test_the_step_of_a_one_sided_difference_is_counted_out():
    """On quadratics a difference of any step is exact: ∇r = Σ p_i H_i (g_i − ḡ)."""
    matrices = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]]], dtype=torch.float64)
    model = nn.Linear(2, 1, bias=False).double()

    def energy(module: nn.Module, batch):
        w = module.weight[0]
        return torch.einsum("nij,i,j->n", batch[0], w, w) / 2, batch[1]

    clients = [(matrix.unsqueeze(0), torch.zeros(1)) for matrix in matrices]
    task = ga.Task(model=model, clients=clients, predict=energy, loss=lambda outputs, _: outputs.mean())
    probe = Probe(task, weights=(1.0, 3.0))
    point = probe.start()
    g = matrices @ point.x
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    expected = torch.einsum("n,nij,nj->i", p, matrices, g - p @ g)
    for options in ({}, {"exact": False}, {"exact": False, "step": 0.7}):
        torch.testing.assert_close(regulariser_gradient(probe, point, **options), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("limit", [1, 2, 4, 5, None])
def test_a_probe_takes_so_many_rows_of_each_client_and_other_rows_of_others(limit):
    problem = Problem((5,) * 6)
    probe = Probe(problem.task(), examples=limit, clients=(4, 1, 2, 3))
    assert [client for client, _ in probe.shares()] == [4, 1, 2, 3]
    chosen = []
    for client in probe.clients:
        whole = problem.task().client(client).batch(torch.arange(5))[0].tolist()
        rows = [
            whole.index(row)
            for row in probe.examples(client).batch(torch.arange(len(probe.examples(client))))[0].tolist()
        ]
        assert len(set(rows)) == len(rows) == min(limit or 5, 5)
        assert rows == sorted(rows)
        chosen.append(tuple(rows))
    if limit == 2:
        assert len(set(chosen)) > 1
