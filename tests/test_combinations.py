"""Plans and shifts add up, whatever is joined and in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradalign as ga
from gradalign.algorithms.plan import ClientView, Combination, Plan, Shift, combine

numbers = st.floats(-10, 10).map(lambda v: round(v, 3))
vectors = st.lists(numbers, min_size=2, max_size=2).map(lambda v: torch.tensor(v, dtype=torch.float64))
plans = st.builds(
    lambda v, c, pull, inside: Plan(displacement=v, correction=c, pull=pull, every_step=inside),
    st.none() | vectors,
    st.none() | vectors,
    numbers,
    st.booleans(),
)


def of(vector: torch.Tensor | None) -> list[float]:
    return [0.0, 0.0] if vector is None else vector.tolist()


@given(plans, plans)
def test_plans_add_up(a, b):
    both = a + b
    assert of(both.displacement) == pytest.approx(
        [x + y for x, y in zip(of(a.displacement), of(b.displacement), strict=True)]
    )
    assert of(both.correction) == pytest.approx(
        [x + y for x, y in zip(of(a.correction), of(b.correction), strict=True)]
    )
    assert both.pull == pytest.approx(a.pull + b.pull)
    assert both.every_step == (a.every_step or b.every_step)


@given(st.none() | vectors, st.none() | vectors, numbers, numbers)
def test_shifts_add_up(a, b, along, more):
    both = Shift(a, along) + Shift(b, more)
    assert of(both.common) == pytest.approx([x + y for x, y in zip(of(a), of(b), strict=True)])
    assert both.along == pytest.approx(along + more)


def view(**more) -> ClientView:
    given = {
        "x": torch.tensor([1.0, 2.0]),
        "lr": 0.3,
        "weight": 0.4,
        "participants": 3,
        "gradient": torch.tensor([5.0, -1.0]),
        "mean_gradient": torch.tensor([2.0, 3.0]),
        "kept": torch.tensor([0.5, 0.25]),
        "shared": torch.tensor([1.5, -1.0]),
    }
    return ClientView(**(given | more))


def plan_of(algorithm) -> Plan:
    joined = combine(algorithm)
    return joined.plan({part.label: view() for part in joined.parts})


@pytest.mark.parametrize(
    ("algorithm", "v", "c", "mu"),
    [
        (ga.FedAvg(), [0, 0], [0, 0], 0),
        (ga.FedProx(mu=0.7), [0, 0], [0, 0], 0.7),
        (ga.FedGA(beta=0.5), [1.5, -2.0], [0, 0], 0),
        (ga.GradAlign(beta=0.5), [1.5, -2.0], [0, 0], 0),
        (ga.Scaffold(), [0, 0], [-3.0, 4.0], 0),
        (ga.Scaffold(control="kept"), [0, 0], [1.0, -1.25], 0),
        (ga.FedDyn(alpha=0.2), [0, 0], [-0.5, -0.25], 0.2),
        # −(α/2)·n·(ḡ − p_i g_i) = −0.45·((2, 3) − 0.4·(5, −1))
        (ga.LinearScaling(), [0.0, -1.53], [0, 0], 0),
        (ga.LinearScaling(aligned=False), [0, 0], [0, 0], 0),
        (ga.FedProx(mu=0.7) + ga.FedDyn(alpha=0.2), [0, 0], [-0.5, -0.25], 0.9),
        (ga.FedGA(beta=0.5) + ga.GradAlign(beta=0.1), [1.8, -2.4], [0, 0], 0),
        (ga.FedGA(beta=0.5) + ga.LinearScaling(), [1.5, -3.53], [0, 0], 0),
        (ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.2), [0, 0], [0.5, -1.5], 0.2),
        (ga.FedGA(beta=0.5) + ga.FedProx(mu=0.7) + ga.Scaffold(), [1.5, -2.0], [-3.0, 4.0], 0.7),
    ],
    ids=lambda value: combine(value).label if isinstance(value, ga.FedAvg.__mro__[1] | Combination) else "",
)
def test_every_plan_by_hand(algorithm, v, c, mu):
    found = plan_of(algorithm)
    assert of(found.displacement) == pytest.approx(v, abs=1e-6)
    assert of(found.correction) == pytest.approx(c, abs=1e-6)
    assert found.pull == pytest.approx(mu)


@pytest.mark.parametrize("other", [ga.FedProx(mu=0.1), ga.Scaffold(), ga.FedAvg(), ga.GradAlign(beta=0.1)])
def test_a_step_form_stays_one_in_every_combination(other):
    inside = ga.FedGA(beta=0.5, form="step")
    assert plan_of(inside).every_step
    assert plan_of(inside + other).every_step
    assert plan_of(other + inside).every_step
    assert not plan_of(ga.FedGA(beta=0.5)).every_step


@pytest.mark.parametrize(
    "algorithm", [ga.FedGA(beta=0.5), ga.FedGA(beta=0.5) + ga.GradAlign(beta=0.1), ga.FedGA(beta=0.0) + ga.FedAvg()]
)
def test_a_shift_is_the_plan_in_another_form(algorithm):
    joined, seen = combine(algorithm), view()
    found = joined.shift(seen.mean_gradient)
    expected = plan_of(algorithm)
    total = torch.tensor(of(found.common)) + found.along * seen.gradient
    assert total.tolist() == pytest.approx(of(expected.displacement), abs=1e-6)


@pytest.mark.parametrize("part", [ga.FedProx(mu=0.1), ga.Scaffold(), ga.FedDyn(), ga.LinearScaling()])
def test_what_is_more_than_a_shift_is_none(part):
    assert combine(part).shift(torch.zeros(2)) is None
    assert (ga.FedGA(beta=0.1) + part).shift(torch.zeros(2)) is None


def test_the_strengths_add_up_and_follow_their_schedules():
    joined = ga.FedGA(beta=ga.Warmup(value=0.4, rounds=4)) + ga.GradAlign(beta=0.1)
    assert joined.at(2).beta == pytest.approx(0.3)
    assert joined.at(9).beta == pytest.approx(0.5)
    assert (ga.FedAvg() + ga.FedProx(mu=0.3)).at(0).beta == 0.0


@pytest.mark.parametrize(
    ("algorithm", "gradients", "keeps", "one_step"),
    [
        (ga.FedAvg(), False, 0, False),
        (ga.FedProx(), False, 0, False),
        (ga.FedGA(beta=0.1), True, 0, False),
        (ga.FedGA(beta=0.0), False, 0, False),
        (ga.GradAlign(beta=0.1), True, 0, True),
        (ga.LargeBatchSGD(), False, 0, True),
        (ga.LinearScaling(), True, 0, True),
        (ga.LinearScaling(aligned=False), False, 0, True),
        (ga.Scaffold(), True, 0, False),
        (ga.Scaffold(control="kept"), False, 1, False),
        (ga.FedDyn(), False, 1, False),
        (ga.FedDyn() + ga.Scaffold(control="kept") + ga.FedGA(beta=0.1), True, 2, False),
        (ga.FedProx() + ga.GradAlign(beta=0.1), True, 0, True),
    ],
    ids=lambda value: combine(value).label if not isinstance(value, int) else "",
)
def test_what_a_round_needs(algorithm, gradients, keeps, one_step):
    joined = combine(algorithm)
    assert joined.needs_gradients is gradients
    assert len(joined.keepers) == keeps
    assert joined.one_step is one_step


def test_beta_zero_in_some_rounds_needs_gradients_in_the_others():
    late = combine(ga.FedGA(beta=ga.OffUntil(value=0.2, round=2)))
    assert late.needs_gradients
    assert [late.at(r).needs_gradients for r in range(4)] == [False, False, True, True]


def test_memory_by_hand():
    seen = view()
    update = torch.tensor([3.0, -6.0])
    # k − s − Δ/total_step_size and h − α·Δ.
    assert ga.Scaffold(control="kept").keep(seen, update, 1.5).tolist() == pytest.approx([-3.0, 5.25])
    assert ga.Scaffold(control="kept").keep(seen, update, 0.0).tolist() == pytest.approx([0.5, 0.25])
    assert ga.FedDyn(alpha=0.2).keep(seen, update, 1.5).tolist() == pytest.approx([-0.1, 1.45])


def test_what_cannot_be_combined():
    with pytest.raises(ga.GradalignError, match="given twice"):
        ga.FedProx(mu=0.1) + ga.FedProx(mu=0.2)
    with pytest.raises(ga.GradalignError, match="one server rule"):
        ga.FedGA(beta=0.1) + ga.FedAdam() + ga.FedYogi()
    with pytest.raises(ga.GradalignError, match="cannot combine"):
        ga.FedGA(beta=0.1) + 3
    assert (ga.FedAvg() + ga.FedAvg()).label == "fedavg"
    assert (ga.FedAvgM() + ga.FedGA(beta=0.1)).label == "fedga+fedavgm"
    assert (ga.FedAvg() + ga.ServerRule(lr=0.5)).server.lr == 0.5


@pytest.mark.parametrize("missing", ["gradient", "mean_gradient"])
def test_half_a_gradient_phase_is_none(missing):
    with pytest.raises(ga.GradalignError, match="needs the clients' gradients"):
        view(**{missing: None}).gradients()


@pytest.mark.parametrize("missing", ["kept", "shared"])
def test_half_a_memory_is_none(missing):
    with pytest.raises(ga.GradalignError, match="kept vector and the server's"):
        view(**{missing: None}).memory()
