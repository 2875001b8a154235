"""What training several clients at once must not change: who may look inside, errors, weights, unusual clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradalign as ga
from conftest import vector
from exchanges import group_of, told, who
from gradalign.algorithms.plan import combine
from gradalign.algorithms.view import Blend, Plan
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine
from gradalign.server.federation import Federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState
from gradalign.tasks.batches import TensorExamples

LOCAL = ga.LocalTraining(lr=0.1, epochs=1, batch_size=8)
CLIENTS = 27


def wide(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 320, bias=False), nn.ReLU(inplace=True), *more, nn.Linear(320, 5))


def small(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 8), nn.ReLU(), *more, nn.Linear(8, 5))


def examples(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.randn(17, 3, 12, 12, generator=generator), torch.randint(5, (17,), generator=generator)


def task_of(model, change=lambda client, data: data) -> ga.Task:
    clients = [change(client, examples(client)) for client in range(CLIENTS)]
    return ga.Task(model=model, clients=clients, test=examples(0))


def trains_together(task: ga.Task, local: ga.LocalTraining = LOCAL) -> bool:
    group = group_of(task, local, clients_per_round=CLIENTS)
    return group.width(told(group.one.flat.read())) > 1


def agree(task: ga.Task, algorithm=None, local: ga.LocalTraining = LOCAL) -> None:
    """The fast way gives what the plain one gives."""
    for own in [algorithm] if algorithm else [ga.FedAvg(), ga.FedGA(beta=0.3)]:
        settings = {"rounds": 1, "local": local, "workers": 0, "measure": ga.Measure(test_every=0, train_every=0)}
        a, b = (vector(ga.run(task, own, fast=fast, **settings)) for fast in (True, False))
        assert float((a - b).norm()) < 1e-5 * float(b.norm())


BOTH = pytest.mark.parametrize("model", [small, wide], ids=["cohort", "lockstep"])


@BOTH
def test_labels_to_be_ignored_do_not_count(model):
    def ignore(client, data):
        data[1][client % 3 : 4] = -100
        return data

    task = task_of(model, ignore)
    assert trains_together(task)
    agree(task, local=ga.LocalTraining(lr=0.1, epochs=1, batch_size=9))


@BOTH
@pytest.mark.parametrize("label", [-1, 1000])
def test_labels_that_are_no_class_are_told_as_torch_tells_them(model, label):
    def wrong(client, data):
        data[1][2] = label if client == 3 else data[1][2]
        return data

    for fast in (True, False):
        with pytest.raises(ga.GradalignError, match=f"Target {label} is out of bounds"):
            ga.run(task_of(model, wrong), ga.FedAvg(), rounds=1, local=LOCAL, workers=0, fast=fast)


@BOTH
def test_plans_that_differ_from_client_to_client(model):
    class Uneven(ga.FedAvg):
        def plan(self, view):
            return Plan(pull=30.0 * view.weight * float(view.weight > 1 / CLIENTS))

    def uneven(client, data):
        return (data[0][: 9 + client], data[1][: 9 + client])

    task = task_of(model, uneven)
    runs = [
        vector(ga.run(task, Uneven(), rounds=1, local=LOCAL, workers=0, fast=fast, weights="examples"))
        for fast in (True, False)
    ]
    assert float((runs[0] - runs[1]).norm()) < 1e-5 * float(runs[1].norm())


class Doubling(TensorExamples):
    """Examples whose batches are its own affair."""

    def batch(self, index):
        inputs, targets = super().batch(index)
        return len(index) * inputs, targets


class Few(torch.utils.data.Dataset):
    def __init__(self, data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, row):
        return self.data[0][row], self.data[1][row]


UNUSUAL = {
    "its own batches": lambda data: Doubling(data),
    "a dataset": lambda data: Few(data),
    "flat inputs": lambda data: (data[0].flatten(1), data[1]),
    "probabilities": lambda data: (data[0], F.one_hot(data[1], 5).float()),
    "doubles": lambda data: (data[0].double(), data[1]),
}


@BOTH
@pytest.mark.parametrize("kind", UNUSUAL)
def test_one_client_unlike_the_others(model, kind):
    agree(task_of(model, lambda client, data: UNUSUAL[kind](data) if client in (0, 7) else data))
    agree(task_of(model, lambda client, data: UNUSUAL[kind](data) if client == 7 else data))


def with_buffer(model: nn.Module) -> nn.Module:
    model.register_buffer("mean", torch.ones(3))
    return model


def with_parameter(model: nn.Module) -> nn.Module:
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    return model


def with_own_forward(model: nn.Module) -> nn.Module:
    layer = model[-1]
    layer.forward = lambda x: 3 * F.linear(x, layer.weight, layer.bias)
    return model


@BOTH
@pytest.mark.parametrize("change", [with_buffer, with_parameter, with_own_forward])
def test_models_with_something_of_their_own_go_one_by_one(model, change):
    task = task_of(lambda: change(model()))
    assert not trains_together(task)
    agree(task)


def test_linear_layers_along_the_last_of_several_axes_go_one_by_one():
    for width in (8, 400):
        task = task_of(lambda width=width: nn.Sequential(nn.Linear(12, 12), *wide()[:1], nn.Linear(432, width)))
        assert not trains_together(task)
        agree(task)


@BOTH
def test_too_few_answers_are_too_few_in_groups_too(model):
    task = task_of(model)
    federation = Federation(
        task=task, algorithm=combine(ga.FedAvg()), local=LOCAL, per_round=CLIENTS, dropout=0.6, min_fraction=0.9
    )
    with (
        InProcessEngine(Setup(task=task, local=LOCAL, clients_per_round=CLIENTS)) as engine,
        pytest.raises(ga.GradalignError, match=f"of {CLIENTS} clients answered the training phase"),
    ):
        play_round(federation, engine, ServerState(point=FlatModel(task.make_model(0)).read()))


class Breaking(Sequence):
    """Clients on demand, one of whom cannot be had after the first look."""

    def __init__(self) -> None:
        self.broken = False

    def __len__(self) -> int:
        return CLIENTS

    def __getitem__(self, client):
        if self.broken and client == 7:
            raise OSError("the disk is gone")
        return examples(client)


@BOTH
@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.3)], ids=["fedavg", "fedga"])
def test_a_client_that_fails_is_named(model, algorithm):
    clients = Breaking()
    task = ga.Task(model=model, clients=clients)
    federation = Federation(task=task, algorithm=combine(algorithm), local=LOCAL, per_round=CLIENTS)
    with InProcessEngine(Setup(task=task, local=LOCAL, clients_per_round=CLIENTS)) as engine:
        clients.broken = True
        with pytest.raises(ga.GradalignError, match="client 7 failed: OSError: the disk is gone"):
            play_round(federation, engine, ServerState(point=FlatModel(task.make_model(0)).read()))


@BOTH
def test_a_client_with_a_finite_loss_and_an_infinite_update_is_named(model):
    task = task_of(model, lambda client, data: (1e25 * data[0], data[1]) if client == 17 else data)
    local = ga.LocalTraining(lr=1e20, steps=1, batch_size=8)
    federation = Federation(task=task, algorithm=combine(ga.FedAvg()), local=local, per_round=CLIENTS)
    with (
        InProcessEngine(Setup(task=task, local=local, clients_per_round=CLIENTS)) as engine,
        pytest.raises(ga.GradalignError, match="in round 1 at client 17 "),
    ):
        play_round(federation, engine, ServerState(point=FlatModel(task.make_model(0)).read()))


def test_room_for_gradients_is_made_when_they_need_it_and_grows():
    task = task_of(wide, lambda client, data: (data[0][: 5 + client // 3], data[1][: 5 + client // 3]))
    aligned = combine(ga.FedGA(beta=0.3))
    with PoolEngine(Setup(task=task, local=LOCAL, clients_per_round=CLIENTS, algorithm=aligned), 1) as engine:
        point = FlatModel(task.make_model(0)).read()
        list(engine.train(told(point), who([0])))
        assert engine._buffers.gradients.numel() == 0, "FedAvg has no use for it"
        for count in (3, 20, 3):
            said, plain = told(point, aligned, participants=count), told(point, one_by_one=True)
            found = sum(reply.vector.clone() for reply in engine.gradients(said, who(range(count))))
            own = sum(reply.vector.clone() for reply in engine.gradients(plain, who(range(count))))
            assert float((found - own).norm()) < 1e-5 * float(own.norm())
        assert len(engine._buffers.gradients) == 20
    assert math.prod(engine._buffers.gradients.shape) < 20 * point.x.numel() / 2


def test_settings_that_lockstep_cannot_do_leave_it_out():
    for more in ({"momentum": 0.5}, {"clip_norm": 1.0}):
        assert not trains_together(task_of(wide), ga.LocalTraining(lr=0.1, batch_size=8, **more))
    group = group_of(task_of(wide), LOCAL, clients_per_round=CLIENTS)
    point = group.one.flat.read()
    assert group.width(told(point, ga.FedGA(beta=0.1))) > 1
    for algorithm in (ga.FedProx(), ga.Scaffold()):
        assert group.width(told(point, algorithm)) == 1, "FedProx and SCAFFOLD train one by one"


@BOTH
def test_a_client_takes_its_own_gradient_where_nobody_has_asked_for_it(model):
    """As an algorithm needs that displaces by g_i without a gradient phase: what the phase would have left is used."""

    class Ahead(ga.FedGA):
        needs_gradients = False
        uses_own_gradient = True
        only_displaces = True

        def plan(self, view):
            return Plan(displacement=Blend(view.x, self.strength, 0.0))

    task, algorithm = task_of(model), combine(Ahead(beta=0.3))
    group = group_of(task, LOCAL, clients_per_round=CLIENTS)
    said = told(group.one.flat.read(), algorithm, participants=CLIENTS)
    several = who(range(group.width(said)))
    taken = group.gradients(said, several)
    expected = group.train(said, several)
    group.cache.entries.clear()
    found = group.train(said, several)
    assert torch.equal(found[0].vector, expected[0].vector)
    assert found[0].examples == expected[0].examples + taken[0].examples
    one_by_one = group_of(task, LOCAL).train(replace(said, one_by_one=True), several[:1])[0]
    for other in several[1:]:
        one_by_one = replace(
            one_by_one, vector=one_by_one.vector + group_of(task, LOCAL).train(said, [other])[0].vector
        )
    assert float((one_by_one.vector - found[0].vector).norm()) < 1e-5 * float(found[0].vector.norm())


@BOTH
@pytest.mark.parametrize("uneven", [lambda client: client % 3, lambda client: client // 5], ids=["within", "between"])
def test_displacements_that_differ_within_and_between_groups(model, uneven):
    class ByWeight(ga.FedGA):
        only_displaces = True

        def plan(self, view):
            strength = self.strength * CLIENTS * view.weight
            return Plan(displacement=Blend(view.mean(), strength, strength))

    def cut(client, data):
        return (data[0][: 9 + uneven(client)], data[1][: 9 + uneven(client)])

    ends = [
        vector(ga.run(task_of(model, cut), ByWeight(beta=0.3), rounds=1, local=LOCAL, workers=0, fast=fast,
                      weights="examples"))
        for fast in (True, False)
    ]  # fmt: skip
    assert float((ends[0] - ends[1]).norm()) < 1e-5 * float(ends[1].norm())
