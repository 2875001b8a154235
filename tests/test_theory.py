"""The checks pass on the library as it is, and fail on a library that is broken on purpose."""

import json
import math

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import gradalign.theory
from gradalign.algorithms import FedAvg, FedCM, FedGA, FedInit, FedLESAM, FedSAM, LinearScaling, Scaffold
from gradalign.algorithms.view import Plan
from gradalign.errors import GradalignError
from gradalign.tasks.task import Task
from gradalign.theory.check import Check, limit, order, plot_checks, slope_of
from gradalign.theory.claims import (
    fedga,
    forms,
    lemma_1,
    linear_scaling,
    measuring_tools,
    mirrored_draws,
    scaffold,
    surrogate,
    theorem_1,
)
from gradalign.theory.claims import gradalign as gradalign_claim
from gradalign.theory.descent import constants_of, descent, wavy_bowl
from gradalign.theory.probe import Probe
from gradalign.theory.problems import Problem, mlp_task, quadratic_task, users_task
from gradalign.theory.rounds import against_descent, family


@pytest.fixture(scope="module")
def mlp():
    return Problem(mlp_task(seed=0, clients=4), seed=0)


@pytest.fixture(scope="module")
def quadratic():
    return Problem(quadratic_task(seed=0, clients=4), seed=0)


def failures(checks):
    return {check.number for check in checks if not check.passed}


# --- measuring a slope


@given(st.floats(0.5, 5.0), st.floats(1e-3, 1e3))
def test_the_slope_of_a_power_law_is_its_power(power, factor):
    grid = tuple(0.1 * 0.5**k for k in range(8))
    slope, fit = slope_of(grid, tuple(factor * value**power for value in grid))
    assert slope == pytest.approx(power, abs=1e-9)
    assert fit == pytest.approx(1.0)


def claim_of(predicted):
    return Check("1", "p", "c", "α", predicted=predicted)


def test_a_slope_off_by_more_than_a_tenth_fails():
    def remainder(value):
        return torch.tensor([value**2.08])

    assert order(claim_of(2), 0.1, remainder, scale=1.0).passed
    assert not order(claim_of(1.95), 0.1, remainder, scale=1.0).passed


def test_rounding_noise_is_left_out_and_too_much_of_it_fails():
    noisy = order(claim_of(3), 1e-3, lambda v: torch.tensor([v**3], dtype=torch.float64), scale=10.0)
    assert len(noisy.grid) == 8
    hopeless = order(claim_of(3), 1e-6, lambda v: torch.tensor([v**3], dtype=torch.float64), scale=10.0)
    assert not hopeless.passed
    assert "above rounding" in hopeless.note
    assert not order(claim_of(3), 1e-3, lambda v: torch.tensor([math.nan]), scale=10.0).passed


def test_draws_come_with_their_reverse():
    drawn = mirrored_draws(range(12), 12, 3, seed=0)
    assert len(drawn) == 6
    assert all(drawn[k][::-1] == drawn[k + 1] for k in (0, 2, 4))
    assert sorted(drawn[0]) == list(range(12))  # without replacement where there are enough


# --- the independent side


def test_calculus_of_the_quadratic_by_hand(quadratic):
    x, members = quadratic.x, quadratic.clients
    hessians = torch.stack([quadratic.task.clients[i][0][0] for i in members])
    centres = torch.stack([quadratic.task.clients[i][1][0] for i in members])
    gradients = torch.einsum("nij,nj->ni", hessians, x - centres)
    apart = gradients - gradients.mean(dim=0)
    torch.testing.assert_close(quadratic.calculus.gradient(x, 2), gradients[2])
    slope = torch.einsum("nij,nj->i", hessians, apart) / len(members)
    torch.testing.assert_close(quadratic.calculus.r_gradient(x, members), slope)
    bent = torch.einsum("nij,njk,nk->i", hessians, hessians, apart) / len(members)
    torch.testing.assert_close(quadratic.calculus.bent_spread(x, members), bent)
    largest = float(torch.linalg.matrix_norm(hessians, ord=2).max())
    assert quadratic.calculus.curvature(x, members, iterations=60) == pytest.approx(largest, rel=0.05)


# --- the claims hold


@pytest.mark.parametrize(
    "claim",
    [
        *(lemma_1, theorem_1, surrogate, gradalign_claim, fedga, scaffold, linear_scaling, forms, measuring_tools),
        *(against_descent, family),
    ],
    ids=lambda claim: claim.__name__,
)
def test_claims_hold_on_the_tanh_network(mlp, claim):
    assert failures(claim(mlp)) == set()


@pytest.mark.parametrize("claim", [lemma_1, gradalign_claim, fedga, scaffold, forms, family], ids=lambda c: c.__name__)
def test_claims_hold_on_the_quadratic(quadratic, claim):
    assert failures(claim(quadratic)) == set()


def test_the_finding_about_fedga_is_explained(mlp):
    (finding,) = [check for check in fedga(mlp) if check.finding]
    assert finding.number == "5b"
    assert finding.predicted == 1
    assert "α²β" in finding.note


def test_a_check_carries_its_measurement(mlp):
    (check,) = gradalign_claim(mlp)
    assert len(check.grid) == len(check.remainders) >= 7  # six halvings
    assert np.allclose(np.diff(np.log2(check.grid)), -1.0)
    assert check.fit > 0.999


# --- the checks can fail


def test_fedga_with_the_wrong_sign_fails(mlp, monkeypatch):
    right = FedGA.plan

    def wrong(self, view):
        plan = right(self, view)
        return Plan(displacement=-plan.displaced(view.gradient), every_step=plan.every_step)

    monkeypatch.setattr(FedGA, "plan", wrong)
    assert failures(gradalign_claim(mlp)) == {"4"}
    assert failures(fedga(mlp)) >= {"5a", "5c"}
    assert "10" in failures(scaffold(mlp))
    assert "3b" in failures(surrogate(mlp))


def test_fedga_that_forgets_the_mean_fails(mlp, monkeypatch):
    monkeypatch.setattr(FedGA, "plan", lambda self, view: Plan(displacement=self.beta * view.gradient))
    assert failures(forms(mlp)) == {"8b"}
    assert "4" in failures(gradalign_claim(mlp))


def test_a_form_inside_the_steps_that_differs_fails(mlp, monkeypatch):
    right = FedGA.plan

    def wrong(self, view):
        plan = right(self, view)
        longer = 1.001 if plan.every_step else 1.0
        return Plan(displacement=longer * plan.displaced(view.gradient), every_step=plan.every_step)

    monkeypatch.setattr(FedGA, "plan", wrong)
    assert failures(forms(mlp)) == {"8a"}


def test_half_a_correction_fails(mlp, monkeypatch):
    right = Scaffold.plan
    monkeypatch.setattr(Scaffold, "plan", lambda self, view: Plan(correction=0.5 * right(self, view).correction))
    assert failures(scaffold(mlp)) == {"6", "10"}


def test_linear_scaling_without_its_displacement_fails(mlp, monkeypatch):
    monkeypatch.setattr(LinearScaling, "plan", lambda self, view: Plan())
    assert failures(linear_scaling(mlp)) == {"7b"}
    monkeypatch.setattr(LinearScaling, "multiple", lambda self, participants: 1.0)
    assert failures(linear_scaling(mlp)) == {"7a", "7b"}


@pytest.mark.parametrize(
    ("kind", "caught"),
    [(FedGA, {"14a", "14b"}), (FedInit, {"14c"}), (FedSAM, {"14d"}), (FedLESAM, {"14e"}), (FedCM, {"14f"})],
    ids=lambda value: getattr(value, "label", ""),
)
def test_a_neighbour_with_the_wrong_sign_or_a_tenth_too_much_fails(mlp, monkeypatch, kind, caught):
    right = kind.plan
    for factor in (-1.0, 1.1):

        def wrong(self, view, factor=factor):
            plan, parts = right(self, view), {}
            moved = plan.displaced(view.gradient)
            parts["displacement"] = None if moved is None else factor * moved
            parts["correction"] = None if plan.correction is None else factor * plan.correction
            return Plan(**parts)

        monkeypatch.setattr(kind, "plan", wrong)
        assert failures(family(mlp)) == caught


def test_fedavg_that_goes_further_than_it_should_fails(mlp, monkeypatch):
    monkeypatch.setattr(FedAvg, "plan", lambda self, view: Plan(pull=0.1 / mlp.unit))
    assert failures(against_descent(mlp)) >= {"13a"}


def test_a_wrong_hessian_fails(mlp, monkeypatch):
    right = Probe.hessian_product
    monkeypatch.setattr(Probe, "hessian_product", lambda self, *given: 1.01 * right(self, *given))
    assert failures(measuring_tools(mlp)) == {"11a"}


# --- the descent condition


def test_the_wavy_bowl_s_constants_are_bounds():
    task, known = wavy_bowl(seed=0)
    calculus = Problem(task, seed=0).calculus
    centres = torch.cat([client[0] for client in task.clients])
    assert constants_of(centres) == known
    random = torch.Generator().manual_seed(0)
    members = range(len(task.clients))

    def hessian(function, x):
        rows = [torch.eye(5, dtype=torch.float64)[j] for j in range(5)]
        step = 1e-5
        return torch.stack([(function(x + step * row) - function(x - step * row)) / (2 * step) for row in rows])

    for _ in range(10):
        x, y = 4 * torch.randn(2, 5, generator=random, dtype=torch.float64)
        f_bend = hessian(lambda z: calculus.mean_gradient(z, members), x)
        r_bend = hessian(lambda z: calculus.r_gradient(z, members), x)
        assert float(torch.linalg.matrix_norm(f_bend, ord=2)) <= known.l1 + 1e-6
        assert float(torch.linalg.matrix_norm(r_bend, ord=2)) <= known.l2 + 1e-6
        bends = [hessian(lambda z: calculus.gradient(z, 0), point) for point in (x, y)]
        assert float(torch.linalg.matrix_norm(bends[0] - bends[1], ord=2)) <= known.rho * float((x - y).norm()) + 1e-6


def test_the_descent_condition_holds_and_has_an_end():
    below, above = descent(seed=0, points=20, searched=4)
    assert below.passed
    assert below.measured == 0
    assert above.passed
    assert above.measured > 0.0
    known, told = wavy_bowl(0)[1], float(above.note.split()[0])
    # The bound lies below L1/L2 everywhere, so β is more times the bound than that; the search doubles from there.
    assert told > max(1.0, above.measured * known.l2 / known.l1)


# --- the user's own task


def users_own_task(clients=3):
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))
    data = [(torch.randn(40, 4, generator=random), torch.randint(3, (40,), generator=random)) for _ in range(clients)]
    return Task(model=model, clients=data, name="own")


def test_a_user_s_task_is_made_smooth_and_small():
    problem = Problem(users_task(users_own_task(clients=6)), seed=0)
    assert problem.x.dtype == torch.float64
    assert len(problem.clients) == 4
    assert all(len(problem.task.client(client)) == 32 for client in problem.clients)
    for claim in (lemma_1, gradalign_claim, scaffold, forms):
        assert failures(claim(problem)) == set()


def test_kinks_are_smoothed_and_named():
    inputs = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))
    task = Task(model=model, clients=[(inputs[:3], torch.arange(3)), (inputs[3:], torch.arange(3))], name="own")
    problem = Problem(users_task(task), seed=0)
    assert problem.name == "own, MaxPool2d as AvgPool2d, ReLU as GELU"
    assert isinstance(model[1], nn.ReLU)  # the user's model is left alone
    assert failures(gradalign_claim(problem)) == set()


def test_one_client_cannot_be_checked():
    with pytest.raises(GradalignError, match="at least 2"):
        users_task(users_own_task(clients=1))


def test_single_precision_is_refused():
    with pytest.raises(GradalignError, match="float64"):
        Problem(users_own_task(), seed=0)


# --- the command


def some_checks(passed):
    ordered = Check(
        number="4",
        problem="p",
        claim="x − y",
        symbol="β",
        predicted=2,
        measured=2.0 if passed else math.nan,
        passed=passed,
        grid=(0.1, 0.05),
        remainders=(0.01, 0.0025),
        note="why",
    )
    return [ordered, limit("8a", "p", "a = b", "gap", 0.0, 1e-13)]


@pytest.fixture
def run_cli(monkeypatch):
    from gradalign.cli.app import app

    def run(*arguments, passed=True):
        monkeypatch.setattr(gradalign.theory, "verify", lambda **_: some_checks(passed))
        return CliRunner().invoke(app, ["verify", *arguments])

    return run


def test_verify_exits_0_when_all_pass_and_1_when_one_fails(run_cli):
    assert run_cli().exit_code == 0
    failed = run_cli(passed=False)
    assert failed.exit_code == 1
    assert "FAIL" in failed.stdout
    assert "1 failed" in failed.stdout


def test_verify_writes_json(run_cli):
    data = json.loads(run_cli("--json", passed=False).stdout)
    assert data["passed"] is False
    assert data["checks"][0]["measured"] is None  # not a number is null in JSON
    assert data["checks"][1]["bound"] == 1e-13


def test_the_wavy_bowls_constants_by_hand():
    """h = 1, A = 2, deviations 1 and 0: L1 = h + A, L2 = A² + A(h·1 + A), ρ = A."""
    found = constants_of(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    assert (found.l1, found.l2, found.rho) == (3.0, 10.0, 2.0)


def test_verify_draws(run_cli, tmp_path):
    path = tmp_path / "theory.png"
    assert run_cli("--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_checks(some_checks(False), tmp_path / "failed.svg")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_checks(some_checks(False), tmp_path / "named.svg")
    drawn = (tmp_path / "named.svg").read_text()
    assert ">predicted slope<" in drawn
    assert drawn.count('id="axes_') == 4, "one row of four panels is enough for two claims"


@pytest.mark.parametrize("name", ["theory.xyz", "nowhere/theory.png"])
def test_verify_refuses_a_picture_it_cannot_write(run_cli, tmp_path, name):
    result = run_cli("--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_verify_refuses_an_unknown_task(run_cli):
    result = run_cli("--task", "nosuchtask")
    assert result.exit_code == 2
    assert "nosuchtask" in result.stderr
