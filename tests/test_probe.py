"""r and ∇r against autograd of r itself, finite differences and arithmetic done by hand."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from gradalign.client.flat import Point
from gradalign.errors import GradalignError
from gradalign.server.measure import alignment_of
from gradalign.tasks.task import Task
from gradalign.theory.probe import Probe, mean_gradient, regulariser_gradient, spread, within_client
from gradalign.theory.problems import mlp_task, quadratic_task

WEIGHTS = (1.0, 2.0, 3.0)


def r_by_autograd(task, x, weights):
    """Return r(x) with its graph, from the definition."""
    model = copy.deepcopy(task.model)
    names = [(name, p.shape) for name, p in model.named_parameters()]

    def loss(x, batch):
        pieces = x.split([shape.numel() for _, shape in names])
        values = {name: piece.view(shape) for (name, shape), piece in zip(names, pieces, strict=True)}
        return task.loss(functional_call(model, values, (batch[0],)), batch[1])

    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    rows = [torch.autograd.grad(loss(x, task.clients[i]), x, create_graph=True)[0] for i in range(len(weights))]
    g = torch.stack(rows)
    return 0.5 * (p * (g - p @ g).square().sum(dim=1)).sum()


@pytest.fixture(scope="module")
def task():
    return mlp_task(seed=3, clients=3)


def probe_of(task, **options):
    return Probe(task, weights=WEIGHTS, **options)


def test_r_and_its_exact_gradient_agree_with_autograd(task):
    probe = probe_of(task)
    point = probe.start()
    x = point.x.clone().requires_grad_()
    r = r_by_autograd(task, x, WEIGHTS)
    (slope,) = torch.autograd.grad(r, x)
    assert spread(probe, point).r == pytest.approx(float(r.detach()), rel=1e-12)
    torch.testing.assert_close(regulariser_gradient(probe, point), slope, rtol=1e-11, atol=1e-13)


def test_gradient_of_r_agrees_with_finite_differences_of_r(task):
    probe = probe_of(task)
    point = probe.start()
    slope, h = regulariser_gradient(probe, point), 1e-5
    for place in range(0, point.x.numel(), 9):
        ends = []
        for sign in (1.0, -1.0):
            x = point.x.clone()
            x[place] += sign * h
            ends.append(spread(probe, Point(x, point.floats, point.ints)).r)
        assert float(slope[place]) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6, abs=1e-8)


def test_displaced_gradients_give_the_same_direction(task):
    probe = probe_of(task)
    point = probe.start()
    exact = regulariser_gradient(probe, point)
    both = regulariser_gradient(probe, point, exact=False)
    assert float((both - exact).norm() / exact.norm()) < 1e-7
    coarse, fine = (
        float((regulariser_gradient(probe, point, exact=False, step=step) - exact).norm()) for step in (1e-3, 5e-4)
    )
    assert coarse / fine == pytest.approx(2.0, rel=0.02)  # one-sided: the error is of order 1


def test_displaced_gradients_are_good_in_single_precision(task):
    single = Task(model=copy.deepcopy(task.model).float(), clients=task.clients)
    exact = regulariser_gradient(probe_of(task), probe_of(task).start())
    rough = regulariser_gradient(probe_of(single), probe_of(single).start(), exact=False)
    assert float((rough - exact).norm() / exact.norm()) < 1e-2


def test_hessian_products_of_a_quadratic_are_the_matrix():
    task = quadratic_task(seed=1, clients=2)
    probe = Probe(task)
    point = probe.start()
    vector = torch.arange(6, dtype=torch.float64)
    hessian = task.clients[1][0][0]
    torch.testing.assert_close(probe.hessian_product(point, 1, vector), hessian @ vector)


def test_a_loss_without_curvature_has_no_gradient_of_r():
    model = nn.Linear(2, 1, bias=False).double()
    clients = [(torch.tensor([[a, b]]), torch.zeros(1)) for a, b in ((1.0, 2.0), (3.0, 5.0))]
    task = Task(model=model, clients=clients, loss=lambda outputs, _: outputs.mean())
    probe = Probe(task)
    assert float(regulariser_gradient(probe, probe.start()).norm()) == 0.0
    assert spread(probe, probe.start()).r == pytest.approx(0.5 * (1.0 + 1.5**2))


def test_spread_by_hand():
    model = nn.Linear(2, 1, bias=False).double()
    clients = [(torch.tensor([row]), torch.zeros(1)) for row in ([3.0, 0.0], [0.0, 4.0])]
    probe = Probe(Task(model=model, clients=clients, loss=lambda outputs, _: outputs.mean()))
    found = spread(probe, probe.start())  # g = (3, 0) and (0, 4), mean (1.5, 2)
    assert found.distances == pytest.approx((2.5, 2.5))
    assert found.mean_norm == pytest.approx(2.5)
    assert found.r == pytest.approx(0.5 * 2.5**2)
    assert found.pairwise == pytest.approx(0.0, abs=1e-12)


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3).map(lambda v: round(v, 3)), min_size=3, max_size=3), min_size=2, max_size=6)
)
@settings(max_examples=40, deadline=None)
def test_streaming_and_stored_measurements_agree(rows):
    model = nn.Linear(3, 1, bias=False).double()
    clients = [(torch.tensor([row], dtype=torch.float64), torch.zeros(1)) for row in rows]
    probe = Probe(Task(model=model, clients=clients, loss=lambda outputs, _: outputs.mean()))
    point = probe.start()
    stored = alignment_of([torch.tensor(row, dtype=torch.float64) for row in rows], [1.0] * len(rows))
    found = spread(probe, point)
    assert found.r == pytest.approx(stored.r, rel=1e-9, abs=1e-12)
    assert found.distances[0] == pytest.approx(stored.drift, rel=1e-9, abs=1e-9)
    units = [torch.tensor(row, dtype=torch.float64) for row in rows]
    if all(float(u.norm()) > 0 for u in units):
        units = [u / u.norm() for u in units]
        pairs = [float(units[i] @ units[j]) for i in range(len(units)) for j in range(len(units)) if i != j]
        assert found.pairwise == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)


def test_mean_gradient_is_weighted(task):
    probe = probe_of(task)
    point = probe.start()
    expected = sum(w / 6.0 * probe.gradient(point, i) for i, w in enumerate(WEIGHTS))
    torch.testing.assert_close(mean_gradient(probe, point), expected)


def test_dropout_is_the_same_function_at_every_call():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    data = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))) for _ in range(2)]
    probe = Probe(Task(model=model, clients=data))
    point = probe.start()
    torch.testing.assert_close(probe.gradient(point, 0), probe.gradient(point, 0), rtol=0, atol=0)
    exact, rough = (regulariser_gradient(probe, point, exact=exact) for exact in (True, False))
    assert float((exact - rough).norm() / exact.norm()) < 1e-6  # the same masks in both


def test_halves_of_equal_examples_agree_and_have_no_noise(task):
    inputs, labels = task.clients[0]
    same = Task(model=task.model, clients=[(inputs[:1].repeat(5, 1), labels[:1].repeat(5))])
    probe = Probe(same)
    found = within_client(probe, probe.start(), 0)
    assert found.cosine == pytest.approx(1.0)
    assert found.noise == pytest.approx(0.0, abs=1e-14)


def test_noise_estimates_the_standard_deviation_of_a_mean():
    # f is linear, so g_i is the mean of the inputs: with unit-variance inputs in 50 dimensions and 40 examples its
    # standard deviation is √(50/40).
    random = torch.Generator().manual_seed(0)
    clients = [(torch.randn(40, 50, generator=random), torch.zeros(40)) for _ in range(30)]
    task = Task(model=nn.Linear(50, 1, bias=False), clients=clients, loss=lambda outputs, _: outputs.mean())
    probe = Probe(task)
    noises = [within_client(probe, probe.start(), client).noise ** 2 for client in range(30)]
    assert math.sqrt(sum(noises) / 30) == pytest.approx(math.sqrt(50 / 40), rel=0.1)


def test_a_single_example_has_no_halves(task):
    one = Task(model=task.model, clients=[(task.clients[0][0][:1], task.clients[0][1][:1])])
    probe = Probe(one)
    assert within_client(probe, probe.start(), 0) is None


def test_the_limit_cuts_every_client(task):
    probe = Probe(task, examples=4)
    assert [len(probe.examples(client)) for client in probe.clients] == [4, 4, 4]
    point = probe.start()
    torch.testing.assert_close(probe.gradient(point, 1), probe.gradient(point, 1), rtol=0, atol=0)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, -1.0, 1.0), (0.0, 0.0, 0.0)])
def test_weights_must_fit(task, weights):
    with pytest.raises(GradalignError, match="weight"):
        Probe(task, weights=weights)


def test_a_step_must_be_positive(task):
    probe = Probe(task)
    with pytest.raises(GradalignError, match="greater than 0"):
        regulariser_gradient(probe, probe.start(), exact=False, step=0.0)


def layers_that_see_their_batch(first: nn.Module) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 6), first, nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("limit", [None, 650], ids=["whole", "limited"])
@pytest.mark.parametrize("count", [37, 601, 701, 1250])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.Dropout(0.5)], ids=["batch norm", "dropout"])
def test_hessian_products_are_the_derivative_of_the_gradient(layer, count, limit):
    """Against central differences, where the way a client is cut into parts belongs to its function."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    data = [(inputs, torch.randint(3, (count,), generator=generator))]
    probe = Probe(Task(model=layers_that_see_their_batch(layer), clients=data), examples=limit)
    point = probe.start()
    direction = torch.randn(point.x.shape, generator=generator, dtype=torch.float64)
    ahead, behind = (
        probe.gradient(Point(point.x + step * direction, point.floats, point.ints), 0) for step in (1e-5, -1e-5)
    )
    expected = (ahead - behind) / 2e-5
    assert float((probe.hessian_product(point, 0, direction) - expected).norm()) < 1e-7 * float(expected.norm())
