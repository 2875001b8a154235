"""One round of each algorithm on quadratics, against the same arithmetic written out in NumPy, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradalign as ga
from conftest import Quadratics, final_point
from gradalign.algorithms import LargeBatchGradAlign
from gradalign.algorithms.plan import combine
from gradalign.algorithms.view import ClientView
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.server.federation import Federation, make_federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState

LR, K, TOLERANCE = 0.05, 5, 1e-12


def train(problem: Quadratics, algorithm: object, **options: object) -> np.ndarray:
    local = ga.LocalTraining(lr=LR, steps=options.pop("steps", K), weight_decay=options.pop("weight_decay", 0.0))
    defaults: dict[str, object] = {"rounds": 1, "workers": 0, "local": local}
    return final_point(ga.run(problem.task(), algorithm, **(defaults | options)))


def walk(problem, client, x, *, v=0.0, c=0.0, mu=0.0, wd=0.0, steps=K, lr=LR):
    """Return Δ = y_K − y_0 by the design's four lines."""
    y = start = x + v
    for _ in range(steps):
        y = y - lr * (problem.gradient(client, y) + wd * y + c + mu * (y - x))
    return y - start


def gradients(problem, x, clients):
    found = {i: problem.gradient(i, x) for i in clients}
    return found, np.mean([found[i] for i in clients], axis=0)


def test_fedavg(quadratics):
    x = quadratics.start
    expected = x + np.mean([walk(quadratics, i, x, wd=0.01) for i in range(4)], axis=0)
    assert np.abs(train(quadratics, ga.FedAvg(), weight_decay=0.01) - expected).max() < TOLERANCE


def test_fedprox(quadratics):
    x = quadratics.start
    expected = x + np.mean([walk(quadratics, i, x, mu=0.7) for i in range(4)], axis=0)
    assert np.abs(train(quadratics, ga.FedProx(mu=0.7)) - expected).max() < TOLERANCE


def test_fedprox_equals_gradient_descent_on_the_proximal_objective(quadratics):
    """The pull is the gradient of (μ/2)‖w − x‖²: check against autograd of that objective, not against our formula."""
    x, mu = torch.as_tensor(quadratics.start), 0.7
    ends = []
    for a, b in zip(quadratics.matrices, quadratics.centres, strict=True):
        w = x.clone().requires_grad_()
        for _ in range(K):
            d = w - torch.as_tensor(b[0])
            objective = 0.5 * d @ torch.as_tensor(a[0]) @ d + 0.5 * mu * (w - x).square().sum()
            (g,) = torch.autograd.grad(objective, w)
            w = (w - LR * g).detach().requires_grad_()
        ends.append(w.detach().numpy())
    assert np.abs(train(quadratics, ga.FedProx(mu=mu)) - np.mean(ends, axis=0)).max() < TOLERANCE


@pytest.mark.parametrize("form", ["start", "step"])
def test_fedga_as_in_the_paper(quadratics, form):
    """Algorithm 2: start from x − β(ḡ − g_i), take K steps, average the end points x_i^(K) themselves."""
    x, beta = quadratics.start, 0.3
    own, mean = gradients(quadratics, x, range(4))
    ends = []
    for i in range(4):
        y = x - beta * (mean - own[i])
        for _ in range(K):
            y = y - LR * quadratics.gradient(i, y)
        ends.append(y)
    assert np.abs(train(quadratics, ga.FedGA(beta=beta, form=form)) - np.mean(ends, axis=0)).max() < TOLERANCE


def test_fedga_second_form_as_in_the_paper(quadratics):
    """Algorithm 3: the gradient of every step is taken at the displaced point, the step from the plain one."""
    x, beta = quadratics.start, 0.3
    own, mean = gradients(quadratics, x, range(4))
    ends = []
    for i in range(4):
        y = x
        for _ in range(K):
            y = y - LR * quadratics.gradient(i, y - beta * (mean - own[i]))
        ends.append(y)
    assert np.abs(train(quadratics, ga.FedGA(beta=beta, form="step")) - np.mean(ends, axis=0)).max() < TOLERANCE


def test_gradalign_as_in_the_paper(quadratics):
    x, beta = quadratics.start, 0.4
    own, mean = gradients(quadratics, x, range(4))
    expected = x - LR * np.mean([quadratics.gradient(i, x - beta * (mean - own[i])) for i in range(4)], axis=0)
    assert np.abs(train(quadratics, LargeBatchGradAlign(beta=beta), steps=None) - expected).max() < TOLERANCE


def test_large_batch_sgd_is_one_step_on_the_mean(quadratics):
    x = quadratics.start
    expected = x - LR * gradients(quadratics, x, range(4))[1]
    assert np.abs(train(quadratics, ga.LargeBatchSGD(), steps=None) - expected).max() < TOLERANCE


@pytest.mark.parametrize("aligned", [True, False])
def test_linear_scaling(quadratics, aligned):
    x = quadratics.start
    own, _ = gradients(quadratics, x, range(4))
    shift = [0.5 * LR * sum(own[j] for j in range(4) if j != i) if aligned else 0.0 for i in range(4)]
    expected = x - LR * sum(quadratics.gradient(i, x - shift[i]) for i in range(4))
    assert np.abs(train(quadratics, ga.LinearScaling(aligned=aligned), steps=None) - expected).max() < TOLERANCE


def test_fresh_scaffold(quadratics):
    x = quadratics.start
    own, mean = gradients(quadratics, x, range(4))
    expected = x + np.mean([walk(quadratics, i, x, c=mean - own[i]) for i in range(4)], axis=0)
    assert np.abs(train(quadratics, ga.Scaffold()) - expected).max() < TOLERANCE


def samples(problem: Quadratics, rounds: int, per_round: int) -> list[list[int]]:
    federation = make_federation(
        problem.task(),
        combine(ga.FedAvg()),
        ga.LocalTraining(),
        per_round=per_round,
        weights="uniform",
        dropout=0.0,
        seed=0,
    )
    return [federation.sample(r) for r in range(rounds)]


def test_kept_scaffold_by_hand_over_three_rounds_with_two_of_four_clients(quadratics):
    """Karimireddy et al., option II: c_i⁺ = c_i − c + (x − y_K)/(Kα);  c ← c + (|S|/N)·mean(c_i⁺ − c_i)."""
    x, c = quadratics.start, np.zeros(3)
    kept = {i: np.zeros(3) for i in range(4)}
    chosen = samples(quadratics, 3, 2)
    assert len({tuple(s) for s in chosen}) > 1, "the calculation should see different clients"
    for sampled in chosen:
        moves, changes = [], []
        for i in sampled:
            y = x
            for _ in range(K):
                y = y - LR * (quadratics.gradient(i, y) - kept[i] + c)
            new = kept[i] - c + (x - y) / (K * LR)
            moves.append(y - x)
            changes.append(new - kept[i])
            kept[i] = new
        x = x + np.mean(moves, axis=0)
        c = c + (2 / 4) * np.mean(changes, axis=0)
    assert np.abs(c - np.mean(list(kept.values()), axis=0)).max() < TOLERANCE
    found = train(quadratics, ga.Scaffold(control="kept"), rounds=3, clients_per_round=2)
    assert np.abs(found - x).max() < TOLERANCE


def test_feddyn_by_hand_over_three_rounds_with_two_of_four_clients(quadratics):
    """Acar et al. 2021, algorithm 1, with K gradient steps on the local objective."""
    theta, h, alpha = quadratics.start, np.zeros(3), 0.2
    last = {i: np.zeros(3) for i in range(4)}
    for sampled in samples(quadratics, 3, 2):
        locals_ = []
        for i in sampled:
            y = theta
            for _ in range(K):
                y = y - LR * (quadratics.gradient(i, y) - last[i] + alpha * (y - theta))
            last[i] = last[i] - alpha * (y - theta)
            locals_.append(y)
        h = h - alpha / 4 * sum(y - theta for y in locals_)
        theta = np.mean(locals_, axis=0) - h / alpha
    found = train(quadratics, ga.FedDyn(alpha=alpha), rounds=3, clients_per_round=2)
    assert np.abs(found - theta).max() < TOLERANCE


def test_weights_by_examples_are_used_for_both_means():
    problem = Quadratics.make(3, examples=(1, 2, 5))
    x, beta, p = problem.start, 0.3, np.array([1, 2, 5]) / 8
    own = [problem.gradient(i, x) for i in range(3)]
    mean = sum(p[i] * own[i] for i in range(3))
    expected = x + sum(p[i] * walk(problem, i, x, v=-beta * (mean - own[i])) for i in range(3))
    found = train(problem, ga.FedGA(beta=beta), weights="examples")
    assert np.abs(found - expected).max() < TOLERANCE


def test_everything_composes(quadratics):
    """FedGA + FedProx + SCAFFOLD's correction + weight decay + server momentum, in one formula."""
    x, beta, mu, wd = quadratics.start, 0.3, 0.5, 0.01
    velocity = np.zeros(3)
    for _ in range(2):
        own, mean = gradients(quadratics, x, range(4))
        moves = [walk(quadratics, i, x, v=-beta * (mean - own[i]), c=mean - own[i], mu=mu, wd=wd) for i in range(4)]
        velocity = 0.8 * velocity + np.mean(moves, axis=0)
        x = x + 0.5 * velocity
    algorithm = ga.FedGA(beta=beta) + ga.FedProx(mu=mu) + ga.Scaffold() + ga.FedAvgM(lr=0.5, momentum=0.8)
    assert algorithm.label == "fedga+fedprox+scaffold+fedavgm"
    assert np.abs(train(quadratics, algorithm, rounds=2, weight_decay=wd) - x).max() < TOLERANCE


def test_clients_silenced_between_the_phases(quadratics):
    """ḡ has all sampled clients, the average only those that report: x + Σ' p_i Δ_i / Σ' p_i."""
    seed = next(s for s in range(100) if 0 < len(_silent(quadratics, s)) < 4)
    silent = _silent(quadratics, seed)
    x, beta = quadratics.start, 0.3
    own, mean = gradients(quadratics, x, range(4))
    answering = [i for i in range(4) if i not in silent]
    expected = x + np.mean([walk(quadratics, i, x, v=-beta * (mean - own[i])) for i in answering], axis=0)
    found = train(quadratics, ga.FedGA(beta=beta), dropout=0.4, seed=seed)
    assert np.abs(found - expected).max() < TOLERANCE


def _silent(problem: Quadratics, seed: int) -> list[int]:
    federation = Federation(
        task=problem.task(),
        algorithm=combine(ga.FedAvg()),
        local=ga.LocalTraining(),
        per_round=4,
        dropout=0.4,
        seed=seed,
    )
    return [i for i in range(4) if federation.silent(0, i)]


def test_a_round_in_which_nobody_reports_changes_nothing(quadratics):
    federation = Federation(
        task=quadratics.task(),
        algorithm=combine(ga.Scaffold(control="kept")),
        local=ga.LocalTraining(lr=LR, steps=K),
        per_round=4,
        dropout=1.0 - 1e-12,
    )
    state = ServerState(point=FlatModel(federation.task.make_model(0)).read())
    with InProcessEngine(Setup(task=federation.task, local=federation.local)) as engine:
        after, facts = play_round(federation, engine, state)
    assert facts.reported == 0
    assert torch.equal(after.point.x, state.point.x)
    assert after.totals.communication_rounds == 1
    assert after.totals.bytes_up == 0


def test_zero_strength_is_fedavg_to_the_bit(quadratics):
    plain = train(quadratics, ga.FedAvg(), rounds=3)
    for algorithm in (ga.FedGA(beta=0.0), ga.FedProx(mu=0.0), ga.FedGA(beta=ga.OffUntil(value=0.5, round=3))):
        assert np.array_equal(train(quadratics, algorithm, rounds=3), plain)


def test_fedga_with_one_step_is_gradalign_to_the_bit(quadratics):
    one = train(quadratics, ga.FedGA(beta=0.2), steps=1, rounds=3)
    assert np.array_equal(one, train(quadratics, LargeBatchGradAlign(beta=0.2), steps=None, rounds=3))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    beta=st.floats(0.0, 1.0),
    mu=st.floats(0.0, 1.0),
    wd=st.floats(0.0, 0.1),
    steps=st.integers(1, 6),
)
def test_both_fedga_forms_are_equal_whatever_they_are_combined_with(seed, beta, mu, wd, steps):
    problem = Quadratics.make(3, seed)
    ends = [
        train(problem, ga.FedGA(beta=beta, form=form) + ga.FedProx(mu=mu), steps=steps, weight_decay=wd)
        for form in ("start", "step")
    ]
    assert np.allclose(ends[0], ends[1], rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8),
    beta=st.floats(0.0, 10.0),
)
def test_displacements_average_to_zero_under_any_weights(seed, weights, beta):
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(len(weights), 5, dtype=torch.float64, generator=generator)
    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    mean = p @ own
    total = torch.zeros(5, dtype=torch.float64)
    for i in range(len(weights)):
        view = ClientView(
            x=torch.zeros(5),
            lr=0.1,
            weight=float(p[i]),
            participants=len(weights),
            gradient=own[i],
            mean_gradient=mean,
        )
        displacement = ga.FedGA(beta=beta).plan(view).displaced(own[i])
        total += p[i] * (torch.zeros(5) if displacement is None else displacement)
    assert float(total.abs().max()) < 1e-12 * max(1.0, beta)


def test_one_step_algorithms_refuse_more_steps(quadratics):
    with pytest.raises(ga.GradalignError, match=r"one local step a round, got local.steps = 5"):
        train(quadratics, LargeBatchGradAlign(beta=0.1), steps=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ga.FedGA(beta=-1.0), "algorithm.beta must be at least 0"),
        (lambda: ga.FedGA(beta=float("nan")), "algorithm.beta must be a finite number"),
        (lambda: ga.FedGA(beta=0.1, form="middle"), 'must be "start" or "step"'),
        (lambda: ga.FedDyn(alpha=0.0), "algorithm.alpha must be greater than 0"),
        (lambda: ga.Scaffold(control="old"), 'must be "fresh" or "kept"'),
        (lambda: ga.FedAdam() + ga.FedGA(beta=0.1) + ga.FedYogi(), "one server rule"),
        (lambda: ga.FedGA(beta=0.1) + ga.FedGA(beta=0.2), "given twice"),
        (lambda: ga.FedGA(beta=0.1) + 3, "cannot combine 3"),
    ],
)
def test_bad_parameters_are_refused_in_one_sentence(make, message):
    with pytest.raises(ga.GradalignError, match=message):
        make()
