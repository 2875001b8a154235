"""The checks of ``verify`` that only pass: made to fail, by a claim that is a little wrong."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from gradalign.algorithms import Scaffold
from gradalign.fast.cohort import CohortTrainer
from gradalign.server.federation import Federation
from gradalign.theory.check import Check, limit, order, slope_of
from gradalign.theory.claims import fedga
from gradalign.theory.descent import beta_bound, descent, wavy_bowl
from gradalign.theory.problems import Calculus, Problem, mlp_task, quadratic_task
from gradalign.theory.rounds import whole_rounds


@pytest.fixture(scope="module")
def problem():
    return Problem(quadratic_task(seed=0, clients=4), seed=0)


def named(checks, number):
    (found,) = [check for check in checks if check.number == number]
    return found


def test_the_hidden_term_is_measured(problem, monkeypatch):
    """5d allows 5 %: a term that is 10 % too long fails by about as much."""
    right = Calculus.bent_spread
    check = named(fedga(problem), "5d")
    assert (check.bound, check.passed) == (0.05, check.measured <= 0.05)
    monkeypatch.setattr(Calculus, "bent_spread", lambda self, *given: 1.1 * right(self, *given))
    check = named(fedga(problem), "5d")
    assert not check.passed
    assert check.measured == pytest.approx(0.1, abs=0.05)


def test_the_descent_condition_is_measured(monkeypatch):
    """9a allows no point at all: with a β far above the bound, f + βr rises at many."""
    check = named(descent(seed=0, points=10, searched=0), "9a")
    assert (check.bound, check.measured, check.passed) == (0.0, 0.0, True)
    right = beta_bound
    monkeypatch.setattr(sys.modules["gradalign.theory.descent"], "beta_bound", lambda *given: 4096.0 * right(*given))
    check = named(descent(seed=0, points=10, searched=0), "9a")
    assert check.measured >= 3
    assert not check.passed


def test_the_bound_on_beta_by_its_own_inequality():
    """ρβ²r(1 + αL1) < αL1‖∇f + β∇r‖ and β < L1/L2 hold for β, and one of them fails for a β not much larger."""
    task, known = wavy_bowl(seed=0)
    problem, lr = Problem(task, seed=0), 0.1
    random = torch.Generator().manual_seed(0)
    halved = 0
    for _ in range(8):
        x = 3 * torch.randn(5, generator=random, dtype=torch.float64)
        beta = beta_bound(problem, x, known, lr)
        r, slope = problem.calculus.r(x, problem.clients), problem.calculus.r_gradient(x, problem.clients)
        mean = problem.calculus.mean_gradient(x, problem.clients)

        def holds(b, r=r, slope=slope, mean=mean):
            left = known.rho * b**2 * r * (1 + lr * known.l1)
            return b < known.l1 / known.l2 and left < lr * known.l1 * float((mean + b * slope).norm())

        assert holds(beta)
        assert not holds(2.1 * beta)
        halved += beta < 0.5 * known.l1 / known.l2
    assert halved, "the second inequality decides somewhere"


def test_a_limit_is_kept_at_equality_and_not_above():
    assert limit("1", "p", "c", "s", 0.5, 0.5).passed
    assert not limit("1", "p", "c", "s", math.nextafter(0.5, 1), 0.5).passed
    assert not limit("1", "p", "c", "s", math.nan, 0.5).passed


def test_a_grid_of_halvings():
    check = order(Check("1", "p", "c", "α", predicted=1), 0.8, lambda value: torch.tensor([value]), scale=1e-9)
    assert check.grid == pytest.approx((0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625))


@pytest.mark.parametrize(("power", "passes"), [(1.91, True), (2.09, True), (1.89, False), (2.11, False)])
def test_an_order_may_be_off_by_a_tenth(power, passes):
    def remainder(value):
        return torch.tensor([value**power], dtype=torch.float64)

    check = order(Check("1", "p", "c", "α", predicted=2), 0.1, remainder, scale=1e-9)
    assert check.measured == pytest.approx(power, abs=1e-9)
    assert check.passed is passes


def test_the_slope_of_uneven_points_is_the_least_squares_line():
    """y = 1, 2, 8 over x = 1, 2, 4: logarithms 0, 1, 3 over 0, 1, 2, so slope 3/2 and R² = 1 − (1/6)/(14/3)."""
    slope, fit = slope_of((1.0, 2.0, 4.0), (1.0, 2.0, 8.0))
    assert slope == pytest.approx(1.5)
    assert fit == pytest.approx(1 - (1 / 6) / (14 / 3))
    assert slope_of((1.0, 2.0, 4.0), (4.0, 4.0, 4.0)) == pytest.approx((0.0, 1.0)), "a level line fits level points"


def failed(checks):
    return {check.number for check in checks if not check.passed}


def test_whole_rounds_see_weights_memory_and_cohorts(monkeypatch):
    network = Problem(mlp_task(seed=0, clients=4), seed=0)
    assert failed(whole_rounds(network)) == set()
    assert all(check.measured < 1e-12 for check in whole_rounds(network)), "rounding, far below what is allowed"
    with monkeypatch.context() as broken:
        broken.setattr(Federation, "weight", lambda self, client: 1.0)
        assert failed(whole_rounds(network)) == {"12a", "12b", "12c"}
    with monkeypatch.context() as broken:
        right = Scaffold.keep
        broken.setattr(Scaffold, "keep", lambda self, *given: 0.99 * right(self, *given))
        assert failed(whole_rounds(network)) == {"12b"}
    with monkeypatch.context() as broken:
        train = CohortTrainer.train

        def shorter(self, *given, **more):
            replies = train(self, *given, **more)
            for reply in replies:
                reply.vector.mul_(0.99)
            return replies

        broken.setattr(CohortTrainer, "train", shorter)
        assert failed(whole_rounds(network)) == {"12c"}
