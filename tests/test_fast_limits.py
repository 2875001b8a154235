"""Where the fast ways end: what they must not take, and the edges of what they do take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import vector
from gradalign.tasks.task import PartitionedClients
from reference import UNMEASURED, Problem, Settings, play, record
from test_reference import gap

CROWD = {"rounds": 2, "clients_per_round": 26, "weights": "examples", "measure": UNMEASURED, "workers": 0}
SIZES = tuple(3 + (5 * i) % 9 for i in range(27))
SMALL, WIDE = Problem(SIZES, inputs=3, hidden=4), Problem(SIZES, inputs=182, hidden=721)
BOTH = pytest.mark.parametrize("problem", [SMALL, WIDE], ids=["cohort", "lockstep"])


def same(task: ga.Task, algorithm=None, local: ga.LocalTraining | None = None, **more) -> None:
    """Fast or not, the numbers are the same, and they are not what training starts from."""
    local = local or ga.LocalTraining(lr=0.1, epochs=1, batch_size=4)
    options = CROWD | {"rounds": 1} | more
    runs = [vector(ga.run(task, algorithm or ga.FedAvg(), local=local, fast=fast, **options)) for fast in (True, False)]
    assert float((runs[0] - runs[1]).abs().max()) < 1e-9


class Darker:
    """A transform of batches: cohorts would see the tensors as they lie."""

    def __call__(self, batch):
        return batch[0] * 0.5 - 1.0, batch[1]


def partitioned(problem: Problem, transform=None) -> PartitionedClients:
    inputs, labels, owners = problem.data
    parts = [torch.nonzero(owners == i)[:, 0] for i in range(len(problem.sizes))]
    return PartitionedClients((inputs, labels), parts, transform)


LOSSES = {
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)),
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
    "summed": lambda: lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum") / 3,
}


@pytest.mark.parametrize(
    ("problem", "name"),
    [(SMALL, "weighted"), (SMALL, "smoothed"), (SMALL, "summed"), (WIDE, "weighted")],
    ids=["weighted", "smoothed", "summed", "lockstep-weighted"],
)
def test_other_losses_are_the_user_s(problem, name):
    plain = vector(ga.run(problem.task(), ga.FedAvg(), **CROWD | {"rounds": 1}))
    task = problem.task(loss=LOSSES[name]())
    same(task)
    other = vector(ga.run(task, ga.FedAvg(), **CROWD | {"rounds": 1}))
    assert float((plain - other).abs().max()) > 1e-4, "the loss makes a difference"


@BOTH
def test_transforms_and_lists_of_rows_are_kept(problem):
    whole, cut = problem.task(), problem.task(clients=partitioned(problem))
    darker = problem.task(clients=partitioned(problem, Darker()))
    for task in (cut, darker):
        same(task, ga.FedGA(beta=0.2))
    ends = [vector(ga.run(task, ga.FedAvg(), **CROWD | {"rounds": 1})) for task in (whole, cut, darker)]
    assert float((ends[0] - ends[1]).abs().max()) < 1e-9
    assert float((ends[0] - ends[2]).abs().max()) > 1e-4


@pytest.mark.parametrize("clip", [1e-3, 0.9, 1e6], ids=["all", "some", "nobody"])
@pytest.mark.parametrize("crowd", [True, False], ids=["cohort", "one by one"])
def test_clipping_never_lengthens(clip, crowd):
    problem = SMALL if crowd else Problem((9, 4, 6))
    local = ga.LocalTraining(lr=0.2, epochs=1, batch_size=4, clip_norm=clip)
    options = CROWD if crowd else CROWD | {"clients_per_round": 3}
    rounds, _ = record(problem, ga.FedGA(beta=0.2), local=local, **options)
    expected = play(problem, rounds, Settings(beta=0.2), local, by_examples=True)
    assert gap(ga.run(problem.task(), ga.FedGA(beta=0.2), local=local, **options), expected.x) < 1e-11


def test_a_later_piece_of_a_large_client_adds_to_the_earlier_ones():
    """A gradient phase over 700 examples of a large layer, and over a large layer without a bias."""
    problem = Problem((700, 20, 310), inputs=182, hidden=721)
    local = ga.LocalTraining(lr=0.1, steps=1, batch_size=4)
    options = CROWD | {"rounds": 1, "clients_per_round": 3}
    rounds, _ = record(problem, ga.FedGA(beta=0.3), local=local, **options)
    assert len(rounds[0].gradients[0]) > 1, "in pieces"
    expected = play(problem, rounds, Settings(beta=0.3), local, by_examples=True)
    assert gap(ga.run(problem.task(), ga.FedGA(beta=0.3), local=local, **options), expected.x) < 1e-11


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("algorithm", [ga.FedGA(beta=0.3), ga.Scaffold() + ga.FedProx(mu=0.3)], ids=["shift", "other"])
def test_layers_with_and_without_biases(problem, bias, algorithm):
    middle = nn.Linear(problem.inputs, problem.hidden, bias=bias)
    layers = [nn.Flatten(), middle, nn.ReLU(inplace=True), nn.Linear(problem.hidden, 3, bias=not bias)]
    task = problem.task(model=nn.Sequential(*layers).double())
    same(task, algorithm, ga.LocalTraining(lr=0.1, epochs=2, batch_size=4, weight_decay=0.1))


@pytest.mark.parametrize(
    ("problem", "size"), [(SMALL, 1), (SMALL, 2), (SMALL, 5), (WIDE, 5)], ids=["1", "2", "5", "lockstep-5"]
)
def test_clients_of_one_size(problem, size):
    """Equal clients are laid out in one go; passes with and without a rest."""
    inputs, labels, _ = problem.data
    clients = [(inputs[i * size : i * size + size], labels[i * size : i * size + size]) for i in range(26)]
    task = problem.task(clients=clients)
    for local in (
        ga.LocalTraining(lr=0.1, steps=5, batch_size=2),
        ga.LocalTraining(lr=0.1, epochs=2, batch_size=3, gradient_examples=2, weight_decay=0.2),
    ):
        same(task, ga.FedGA(beta=0.3), local)


def test_labels_to_be_ignored():
    inputs, labels, owners = SMALL.data
    labels = labels.clone()
    labels[::4] = -100
    clients = [(inputs[owners == i], labels[owners == i]) for i in range(27)]
    same(SMALL.task(clients=clients), ga.FedGA(beta=0.2), ga.LocalTraining(lr=0.1, epochs=2))


def test_a_large_layer_that_is_used_twice():
    """Both uses count: the weight's gradient is their sum."""
    inputs, labels, owners = WIDE.data
    clients = [(inputs[owners == i], labels[owners == i]) for i in range(3)]
    twice = nn.Linear(363, 363)
    model = nn.Sequential(nn.Linear(182, 363), nn.Tanh(), twice, nn.Tanh(), twice, nn.Linear(363, 3)).double()
    same(ga.Task(model=model, clients=clients), ga.FedGA(beta=0.2), clients_per_round=3)
