"""Very many clients: setting up a run looks at each one's size once, and works with the sampled ones only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.client.exchange import Broadcast, Participant
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup, shuffled_batches
from gradalign.fast.batches import Neighbours, plan_batches
from gradalign.seeding import Purpose, stream_seed, stream_seeds, torch_stream
from gradalign.tasks import task as data
from gradalign.tasks.batches import TensorExamples

CLIENTS = 5000


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, labels = torch.randn(5 * count, 4), torch.randint(3, (5 * count,))
    return list(zip(inputs.split(5), labels.split(5), strict=True))


@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.1)], ids=lambda one: one.label)
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_run_touches_the_sampled_clients_only(monkeypatch, algorithm, weights):
    wrapped, init = [0], data.TensorExamples.__init__

    def counting(self, *arguments, **named):
        wrapped[0] += 1
        init(self, *arguments, **named)

    monkeypatch.setattr(data.TensorExamples, "__init__", counting)
    task = ga.Task(model=lambda: nn.Linear(4, 3), clients=pairs(CLIENTS))
    options = {"clients_per_round": 10, "weights": weights, "measure": ga.Measure(train_every=0)}
    result = ga.run(task, algorithm, rounds=3, workers=0, local=ga.LocalTraining(lr=0.1, steps=1), **options)
    assert result.summary["task"]["train_examples"] == 5 * CLIENTS
    assert result.summary["task"]["examples_per_client"] == [5, 5, 5]
    assert wrapped[0] <= 200, "3 rounds of 10 clients and the 50 whose sizes stand for all"


def test_every_size_is_asked_for_once():
    class Counted(torch.utils.data.Dataset):
        asked = 0

        def __len__(self) -> int:
            type(self).asked += 1
            return 5

        def __getitem__(self, i: int):
            return torch.ones(4), 0

    task = ga.Task(model=lambda: nn.Linear(4, 3), clients=[Counted() for _ in range(2000)])
    ga.run(task, ga.FedAvg(), rounds=1, clients_per_round=2, workers=0, measure=ga.Measure(test_every=0, train_every=0))
    assert Counted.asked <= 2000 + 50


@pytest.mark.parametrize(
    "clients",
    [
        [(torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(0, 1), torch.zeros(0))],
        [(torch.zeros(2, 1), torch.zeros(3))],
        [3],
    ],
)
def test_a_bad_client_is_still_found_at_once(clients):
    with pytest.raises(ga.GradalignError):
        ga.Task(model=nn.Linear(1, 1), clients=clients)


word = st.integers(0, 2**32 - 1)


@given(st.one_of(word, st.integers(0, 2**70)), st.lists(word, max_size=4), st.lists(st.integers(0, 2**34), max_size=5))
def test_seeds_made_together_are_those_made_one_by_one(seed, keys, last):
    expected = [stream_seed(seed, Purpose.SHUFFLE, *keys, k) for k in last]
    assert stream_seeds(seed, Purpose.SHUFFLE, *keys, last=last) == expected


@given(
    st.one_of(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 9).map(lambda size: [size] * 3)),
    st.sampled_from([None, 1, 2, 3, 20]),
    st.sampled_from([{"steps": 1}, {"steps": 5}, {"epochs": 1}, {"epochs": 3}]),
)
def test_batches_laid_side_by_side_are_the_clients_own(sizes, batch_size, length):
    local, clients = ga.LocalTraining(lr=0.1, batch_size=batch_size, **length), range(60, 60 + len(sizes))
    starts = [int(start) for start in np.cumsum([0, *sizes[:-1]])]
    setup = Setup(task=ga.Task(model=nn.Linear(4, 3), clients=pairs(1)), local=local, seed=3)
    told = Broadcast(point=FlatModel(nn.Linear(4, 3)).read(), round=2, algorithm=combine(ga.FedAvg()))
    examples = [TensorExamples((torch.zeros(size, 4), torch.zeros(size))) for size in sizes]
    group = Neighbours(told, [Participant(client=client) for client in clients], examples)
    found = plan_batches(setup, group, starts, torch.float64)
    assert found.steps == [local.steps_for(size) for size in sizes]
    for place, (size, client) in enumerate(zip(sizes, clients, strict=True)):
        own, seen = shuffled_batches(size, local.batch_for(size), torch_stream(3, Purpose.SHUFFLE, 2, client)), 0
        for k, (rows, weights, active) in enumerate(zip(found.rows, found.weights, found.active, strict=True)):
            steps = k < local.steps_for(size)
            expected = next(own).tolist() if steps else []
            shares = torch.full(rows[place].shape, 1 / rows.shape[1]) if weights is None else weights[place]
            assert (rows[place][shares > 0] - starts[place]).tolist() == expected
            assert shares[shares > 0].tolist() == pytest.approx([1 / len(expected)] * len(expected) if steps else [])
            assert active is None or bool(active[place]) == steps
            seen += len(expected)
        assert found.seen[place] == seen


@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.2)], ids=lambda one: one.label)
def test_a_bare_linear_model_trains_in_cohorts_like_one_by_one(algorithm):
    torch.manual_seed(0)
    task = ga.Task(model=lambda: nn.Linear(4, 3).double(), clients=[(x.double(), y) for x, y in pairs(30)])
    local = ga.LocalTraining(lr=0.1, steps=4, batch_size=2, weight_decay=0.01)
    quick, plain = (ga.run(task, algorithm, rounds=3, workers=0, local=local, fast=fast) for fast in (True, False))
    for one, other in zip(quick.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
