"""Clients in lockstep: the plain loop's numbers up to rounding, the same bits for any number of workers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradalign as ga
from conftest import vector
from exchanges import group_of, told, who
from gradalign.algorithms.plan import combine
from gradalign.algorithms.view import ClientView
from gradalign.client.exchange import GradientCache
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine
from gradalign.fast.eligible import lockstep_model
from gradalign.fast.linear import GradientFactors, LargeWeight, large_product
from gradalign.server.federation import Federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState

LOCAL = ga.LocalTraining(lr=0.1, epochs=1, batch_size=8)
UNMEASURED = ga.Measure(test_every=0, train_every=0)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 600), nn.Tanh(), nn.Linear(600, 5),
    )  # fmt: skip


def wide() -> nn.Module:
    """A large first layer, whose inputs need no gradient, and a large one without a bias."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(432, 400), nn.ReLU(), nn.Linear(400, 350, bias=False), nn.Linear(350, 5)
    )


def task_of(model, sizes: tuple[int, ...] = (20, 20, 9, 15, 31), clients: int = 33, **more) -> ga.Task:
    generator = torch.Generator().manual_seed(0)
    counts = [sizes[i % len(sizes)] for i in range(clients)]
    data = [
        (torch.randn(n, 3, 12, 12, generator=generator), torch.randint(5, (n,), generator=generator)) for n in counts
    ]
    return ga.Task(model=model, clients=data, test=data[0], **more)


def runs(task: ga.Task, algorithm, local: ga.LocalTraining, **options):
    settings = {"rounds": 1, "local": local, "clients_per_round": 28, "weights": "examples", **options}
    return [ga.run(task, algorithm, workers=0, fast=fast, **settings) for fast in (True, False)]


def close(fast, plain) -> None:
    a, b = vector(fast), vector(plain)
    assert float((a - b).norm()) < 1e-5 * float(b.norm())
    assert not torch.equal(a, b), "both took the same path"
    for name in ("local_updates", "examples", "bytes_up", "communication_rounds"):
        assert fast.history[name] == plain.history[name]
    for name in ("train_loss", "local_loss", "test_loss"):
        expected = [value for value in plain.history[name] if value is not None]
        assert [value for value in fast.history[name] if value is not None] == pytest.approx(expected, rel=1e-4)


ALGORITHMS = [
    ga.FedAvg(),
    ga.FedGA(beta=0.2),
    ga.FedGA(beta=0.2, form="step") + ga.FedAdam(lr=0.05),
    ga.FedGA(beta=0.2) + ga.FedProx(mu=0.3),
    ga.FedGA(beta=0.2, mean="running"),
    ga.Scaffold(),
]


@pytest.mark.parametrize("model", [convolutional, wide])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: combine(a).label)
def test_lockstep_agrees_with_the_per_client_loop(model, algorithm):
    task = task_of(model)
    group = group_of(task, LOCAL, clients_per_round=28)
    assert group.lockstep is not None
    point = group.one.flat.read()
    assert group.room(told(point, ga.FedGA(beta=0.2)), range(28)) < point.x.numel(), "so few examples should fit"
    rounds = 2 if getattr(algorithm, "mean", "") == "running" else 1  # its first round displaces nobody
    close(*runs(task, algorithm, LOCAL, rounds=rounds))


@pytest.mark.parametrize(
    "local",
    [
        ga.LocalTraining(lr=0.1, steps=4, batch_size=7, gradient_examples=6),
        ga.LocalTraining(lr=0.1, epochs=4, batch_size=8),
        ga.LocalTraining(lr=0.1, steps=2, batch_size=5, weight_decay=0.1, momentum=0.5),
    ],
    ids=["limited gradient", "too many rows for factors", "not plain"],
)
def test_other_local_settings_agree_too(local):
    task = task_of(convolutional)
    for algorithm in (ga.FedAvg(), ga.FedGA(beta=0.2)):
        fast, plain = runs(task, algorithm, local)
        a, b = vector(fast), vector(plain)
        assert float((a - b).norm()) < 1e-5 * float(b.norm())


@pytest.mark.parametrize("decay", [0.01, 3.0, 19.5], ids=["a little", "much", "past zero"])
@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.2)], ids=["fedavg", "fedga"])
@pytest.mark.parametrize("model", [convolutional, wide])
def test_weight_decay_goes_in_lockstep_too(model, algorithm, decay):
    """Also where clients take unequally many steps, and where a step's 1 − lr·decay is negative."""
    local = ga.LocalTraining(lr=0.1, epochs=1, batch_size=4, weight_decay=decay)
    task = task_of(model)
    assert group_of(task, local, clients_per_round=28).lockstep is not None
    assert len({local.steps_for(len(task.client(client))) for client in range(28)}) > 1
    close(*runs(task, algorithm, local))


def test_dropout_between_the_phases_leaves_the_others_gradients_where_they_are():
    close(*runs(task_of(convolutional), ga.FedGA(beta=0.2), LOCAL, dropout=0.4, rounds=2))


@pytest.mark.parametrize("algorithm", [ga.FedAvg(), ga.FedGA(beta=0.2)], ids=["fedavg", "fedga"])
def test_bits_do_not_depend_on_the_number_of_workers(algorithm):
    task = task_of(convolutional)
    found = [
        vector(ga.run(task, algorithm, rounds=2, local=LOCAL, clients_per_round=27, workers=n, measure=UNMEASURED))
        for n in (0, 2, 3)
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_spawned_workers_find_the_gradients_too():
    task, algorithm = ga.Task(model=wide, clients=task_of(wide).clients), combine(ga.FedGA(beta=0.2))
    setup = Setup(task=task, local=LOCAL, clients_per_round=28, algorithm=algorithm)
    point = FlatModel(task.make_model(0)).read()
    said = told(point, algorithm, participants=28)
    found = []
    for engine in (InProcessEngine(setup), PoolEngine(setup, 2, method="spawn")):
        with engine:
            sums = [reply.vector.clone() for reply in engine.gradients(said, who(range(28)))]
            trained = engine.train(replace(said, mean=sum(sums) / 28), who(range(28)))
            found.append([*sums, *(reply.vector.clone() for reply in trained)])
    assert len(found[0]) == 2 * math.ceil(28 / 5)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_diverging_client_is_named():
    task = task_of(convolutional)
    task.client(17).tensors[0].fill_(math.inf)
    start = ServerState(point=FlatModel(task.make_model(0)).read())
    for algorithm in (ga.FedAvg(), ga.FedGA(beta=0.2)):
        federation = Federation(task=task, algorithm=combine(algorithm), local=LOCAL, per_round=33)
        with (
            InProcessEngine(Setup(task=task, local=LOCAL, clients_per_round=33)) as engine,
            pytest.raises(ga.GradalignError, match="in round 1 at client 17 "),
        ):
            play_round(federation, engine, start)


def test_what_cannot_go_in_lockstep_takes_the_per_client_path():
    def hooked() -> nn.Module:
        model = wide()
        model[1].weight.register_hook(lambda gradient: 2 * gradient)
        return model

    def model_of(task: ga.Task, local: ga.LocalTraining = LOCAL) -> nn.Module | None:
        return lockstep_model(Setup(task=task, local=local))

    assert model_of(task_of(wide)) is not None
    assert model_of(task_of(wide), ga.LocalTraining(batch_size=100)) is None
    assert model_of(task_of(wide), ga.LocalTraining()) is None
    assert model_of(task_of(hooked)) is None
    assert model_of(task_of(lambda: nn.Sequential(*wide(), nn.Dropout()))) is None
    assert model_of(task_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(432, 5)))) is None
    assert model_of(task_of(wide, loss=nn.CrossEntropyLoss(label_smoothing=0.1))) is None
    assert model_of(task_of(wide, augment=lambda batch: batch)) is None
    assert model_of(task_of(lambda: nn.Sequential(nn.Conv2d(3, 5, 12), nn.Flatten()))) is None, "nothing is a product"
    assert group_of(task_of(wide), LOCAL, clients_per_round=10).lockstep is None, "a few clients train one by one"
    assert group_of(task_of(wide), LOCAL, clients_per_round=28, fast=False).lockstep is None
    large = group_of(task_of(wide, sizes=(1500,)), LOCAL, clients_per_round=28)
    point = large.one.flat.read()
    (reply,) = large.gradients(told(point, ga.FedGA(beta=0.2)), who([0]))
    assert large.cache.get(0).rows is None, "so many examples do not fit"
    assert torch.equal(large.cache.get(0).vector, reply.vector)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_a_large_weight_is_what_its_factors_say(clients, rows, given_rows, shared):
    """Against the matrices written out, for steps of −lr times the gradient of half the outputs' squares."""
    generator = torch.Generator().manual_seed(clients + 10 * rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    start = draw(4, 3) if shared else draw(clients, 4, 3)
    weight = LargeWeight(start, draw(clients, given_rows, 4), draw(clients, given_rows, 3), -0.1)
    written = start + weight.grad_output.mT @ weight.inputs
    before = written.clone()
    for _ in range(3):
        inputs = draw(clients, rows, 3)
        flat = inputs.flatten(0, 1).requires_grad_()
        outputs = large_product(flat, weight)
        expected = inputs @ written.mT
        assert torch.allclose(outputs, expected.flatten(0, 1))
        outputs.square().sum().div(2).backward()
        assert torch.allclose(flat.grad, (expected @ written).flatten(0, 1))
        written = written - 0.1 * expected.mT @ inputs
    shares, out = draw(clients), torch.empty(4, 3, dtype=torch.float64)
    weight.sum_of_steps(shares, out)
    assert torch.allclose(out, torch.einsum("c,coi->oi", shares, written - before))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(-2, 2))
def test_the_cache_gives_back_the_factors_that_were_put(rows, along):
    generator = torch.Generator().manual_seed(len(rows))
    shapes, large = [torch.Size([4, 3]), torch.Size([2])], [True, False]
    count, most = len(rows), max(rows)
    grad_output = torch.randn(count, most, 4, generator=generator)
    for client, own in enumerate(rows):
        grad_output[client, own:] = 0.0
    inputs, bias = torch.randn(count, most, 3, generator=generator), torch.randn(count, 2, generator=generator)
    factors, cache = GradientFactors(shapes, large), GradientCache()
    found = [LargeWeight(torch.zeros(4, 3), grad_output, inputs, 1.0), bias]
    for client, own in enumerate(rows):
        cache.put(client, *factors.parts(found, client, own), rows=own)
        assert len(cache.get(client).vector) == factors.length(own)
        dense = torch.cat([(grad_output[client].mT @ inputs[client]).flatten(), bias[client]])
        assert torch.allclose(factors.dense(cache.get(client)), dense, atol=1e-5)
    at = LargeWeight.at(torch.zeros(4, 3), count, 1.0)
    cached = [cache.get(client) for client in range(count)]
    weight, moved = factors.displace([at, torch.ones(count, 2)], along, cached)
    assert torch.allclose(weight.grad_output.mT @ weight.inputs, along * grad_output.mT @ inputs, atol=1e-5)
    assert torch.allclose(moved, 1.0 + along * bias, atol=1e-6)


@given(st.floats(0, 3), st.integers(1, 6))
def test_a_blend_is_the_formula_and_sums_to_zero(beta, clients):
    generator = torch.Generator().manual_seed(clients)
    gradients = torch.randn(clients, 7, generator=generator, dtype=torch.float64)
    weights = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.1
    shares = weights / weights.sum()
    mean = shares @ gradients
    algorithm = ga.FedGA(beta=beta) + ga.FedAvg() + ga.FedAdam()
    displacements = []
    for own, share in zip(gradients, shares, strict=True):
        view = ClientView(x=mean, lr=0.1, weight=float(share), participants=clients, mean_gradient=mean)
        found = algorithm.plan({"fedga": view}).displaced(own)
        displacements.append(torch.zeros(7, dtype=torch.float64) if found is None else found)
        assert torch.allclose(displacements[-1], -beta * mean + beta * own)
    assert float((shares @ torch.stack(displacements)).norm()) < 1e-12


def test_a_variant_of_fedga_keeps_its_own_plan():
    class Twice(ga.FedGA):
        def plan(self, view):
            return super().plan(view) + super().plan(view)

    assert not Twice(beta=0.1).only_displaces
    close(*runs(task_of(convolutional), Twice(beta=0.1), LOCAL))


@pytest.mark.parametrize("displaced", [(), (1,), (0, 2)])
def test_every_client_starts_at_its_own_point(displaced):
    """x + v_i, of large layers too; x where nobody is displaced stands once."""
    lockstep = group_of(task_of(wide), LOCAL, clients_per_round=28).lockstep
    x = group_of(task_of(wide), LOCAL, clients_per_round=28).one.flat.read().x
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(x.shape, generator=random) if client in displaced else None for client in range(3)]
    own = lockstep._start(x, given, factor=1.0)
    starts = [one.start if isinstance(one, LargeWeight) else one for one in own]
    assert [isinstance(one, LargeWeight) for one in own] == lockstep.large
    for client, v in enumerate(given):
        each = [(start[client] if len(start) == 3 and start.ndim > 1 else start).flatten() for start in starts]
        assert torch.equal(torch.cat(each), x if v is None else x + v)
