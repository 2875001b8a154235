"""Randomness: a stream of its own for every purpose, round and client, and every draw as likely as it should be."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from gradalign.seeding import Purpose, global_stream, numpy_stream, stream_seed, torch_stream
from reference import UNMEASURED, Problem, record

PROBLEM = Problem((12, 12, 12))


def test_gradient_rows_are_the_first_that_the_same_round_trains_on():
    local = ga.LocalTraining(lr=0.1, steps=3, batch_size=3, gradient_examples=5)
    rounds, _ = record(PROBLEM, ga.FedGA(beta=0.1), rounds=3, local=local)
    seen = set()
    for chance in rounds:
        for client, (rows,) in chance.gradients.items():
            assert rows.tolist() == torch.cat(chance.steps[client])[:5].tolist()
            seen.add(tuple((rows - 12 * client).tolist()))
    assert len(seen) == 9, "other rows for every round and client"


@pytest.mark.parametrize("limit", [11, 12, 13, None])
def test_the_limit_of_the_gradient_phase(limit):
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=3, gradient_examples=limit)
    rounds, _ = record(PROBLEM, ga.FedGA(beta=0.1), rounds=1, local=local)
    for client, (rows,) in rounds[0].gradients.items():
        assert len(rows) == min(12, limit or 12)
        assert set(rows.tolist()) <= set(range(12 * client, 12 * client + 12))
        if len(rows) == 12:
            assert rows.tolist() == list(range(12 * client, 12 * client + 12)), "the whole client, as it lies"


class Drawing(nn.Module):
    """Writes down a number of the stream that dropout would draw from."""

    drawn: list[tuple[float, float, float]] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.drawn.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
        return inputs[:, :2] * self.w


def draws(seed: int = 0, rounds: int = 2) -> list[tuple[float, float, float]]:
    Drawing.drawn.clear()
    clients = [(torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)) for _ in range(3)]
    task = ga.Task(model=Drawing, clients=clients, test=clients[0])
    local = ga.LocalTraining(lr=0.1, steps=1)
    ga.run(task, ga.FedGA(beta=0.1), rounds=rounds, local=local, workers=0, seed=seed, measure=UNMEASURED, fast=False)
    return list(Drawing.drawn)


def test_every_client_phase_and_round_has_its_own_noise():
    found = draws()
    assert len(found) == 12, "three clients, two phases, two rounds"
    for generator in range(3):
        assert len({one[generator] for one in found}) == 12
    assert found == draws()
    assert not set(found) & set(draws(seed=1))


def test_silent_clients_change_from_round_to_round_and_are_as_many_as_asked_for():
    problem, share = Problem((1,) * 40), 0.3
    rounds, _ = record(problem, ga.FedGA(beta=0.1), rounds=20, dropout=share, local=ga.LocalTraining(steps=1), seed=1)
    silent = np.array([[client not in chance.steps for client in range(40)] for chance in rounds])
    assert all(len(chance.gradients) == 40 for chance in rounds), "they fall silent after the gradient phase"
    assert len({tuple(one) for one in silent}) == 20
    # 800 draws of probability 0.3, 20 of each client: five standard deviations.
    assert silent.mean() == pytest.approx(share, abs=5 * np.sqrt(share * 0.7 / 800))
    assert 0 < silent.mean(axis=0).std() < 0.25


def test_clients_are_sampled_evenly_and_never_twice():
    problem = Problem((1,) * 12)
    rounds, _ = record(problem, ga.FedAvg(), rounds=60, clients_per_round=4, local=ga.LocalTraining(steps=1))
    assert all(len(chance.steps) == 4 for chance in rounds)
    assert all(list(chance.steps) == sorted(chance.steps) for chance in rounds)
    counts = np.bincount([client for chance in rounds for client in chance.steps], minlength=12)
    assert counts == pytest.approx([20] * 12, abs=5 * np.sqrt(60 / 3 * 2 / 3))


def test_passes_are_shuffled_without_replacement_and_anew():
    local = ga.LocalTraining(lr=0.1, epochs=2, batch_size=5)
    rounds, _ = record(PROBLEM, ga.FedAvg(), rounds=2, local=local)
    orders = set()
    for chance, (client, steps) in itertools.product(rounds, rounds[0].steps.items()):
        steps = chance.steps[client]
        assert [len(rows) for rows in steps] == [5, 5, 2, 5, 5, 2]
        for one_pass in (steps[:3], steps[3:]):
            rows = torch.cat(one_pass).tolist()
            assert sorted(rows) == list(range(12 * client, 12 * client + 12))
            orders.add(tuple(row - 12 * client for row in rows))
    assert len(orders) == 12


def test_a_stream_is_numpys_seed_sequence_of_seed_purpose_and_keys():
    """The numbers behind every published result: NumPy's documented generator, and purposes that never change."""
    names = (
        "INIT SAMPLE_CLIENTS SHUFFLE TRAIN GRADIENT DROPOUT_OF_CLIENTS PARTITION SPLIT PROBE SYNTHETIC EVALUATE CLIENT "
        "HOLDOUT SWEEP"
    )
    assert [(p.name, p.value) for p in Purpose][:14] == [(n, i + 1) for i, n in enumerate(names.split())]
    expected = int(np.random.SeedSequence([5, 4, 7, 9]).generate_state(1, np.uint64)[0])
    assert stream_seed(5, Purpose.TRAIN, 7, 9) == expected
    assert numpy_stream(5, Purpose.TRAIN, 7, 9).random() == np.random.default_rng(expected).random()
    other = torch.Generator().manual_seed(expected)
    assert torch.equal(torch.rand(3, generator=torch_stream(5, Purpose.TRAIN, 7, 9)), torch.rand(3, generator=other))


def test_the_global_generators_follow_the_stream_and_are_put_back():
    def three():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random(), random.random()]

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected_after = three()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    number = stream_seed(5, Purpose.TRAIN, 7)
    with global_stream(5, Purpose.TRAIN, 7):
        inside = three()
    assert three() == expected_after
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    assert three() == inside
    with pytest.raises(KeyError), global_stream(5, Purpose.TRAIN, 7):
        raise KeyError
    after_error = three()
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    three()
    assert three() == after_error, "put back after an error too"
