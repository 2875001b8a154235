"""Plans and blends add up, whatever is joined and in which order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradalign as ga
from gradalign.algorithms import LargeBatchGradAlign, known_algorithms
from gradalign.algorithms.plan import Combination, combine
from gradalign.algorithms.view import Blend, ClientView, Plan, SharedSums

FRESH = {"mean": "fresh", "decay": 0.9, "gradient_every": 1, "form": "start", "length": None}
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


@given(vectors, vectors, vectors, st.lists(numbers, min_size=4, max_size=4), st.booleans())
def test_blends_add_up(first, second, gradient, strengths, same):
    one, other = Blend(first, *strengths[:2]), Blend(first if same else second, *strengths[2:])
    expected = [x + y for x, y in zip(of(one.of(gradient)), of(other.of(gradient)), strict=True)]
    assert of((one + other).of(gradient)) == pytest.approx(expected, abs=1e-9)


def test_a_blend_is_the_formula_and_asks_for_a_gradient_only_where_it_uses_one():
    mean, own = torch.tensor([2.0, 3.0]), torch.tensor([5.0, -1.0])
    assert torch.equal(Blend(mean, 0.3, 0.3).of(own), -0.3 * (mean - own))
    assert torch.equal(Blend(mean, 0.0, 0.3).of(None), -0.3 * mean)
    with pytest.raises(ga.GradalignError, match="needs the clients' gradients"):
        Blend(mean, 0.3, 0.3).of(None)


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
    return joined.plan({part.label: view() for part in joined.parts}).written_out(view().gradient)


@pytest.mark.parametrize(
    ("algorithm", "v", "c", "mu"),
    [
        (ga.FedAvg(), [0, 0], [0, 0], 0),
        (ga.FedProx(mu=0.7), [0, 0], [0, 0], 0.7),
        (ga.FedGA(beta=0.5), [1.5, -2.0], [0, 0], 0),
        (LargeBatchGradAlign(beta=0.5), [1.5, -2.0], [0, 0], 0),
        (ga.Scaffold(), [0, 0], [-3.0, 4.0], 0),
        (ga.Scaffold(control="kept"), [0, 0], [1.0, -1.25], 0),
        (ga.FedDyn(alpha=0.2), [0, 0], [-0.5, -0.25], 0.2),
        # −(α/2)·n·(ḡ − p_i g_i) = −0.45·((2, 3) − 0.4·(5, −1))
        (ga.LinearScaling(), [0.0, -1.53], [0, 0], 0),
        (ga.LinearScaling(aligned=False), [0, 0], [0, 0], 0),
        (ga.FedProx(mu=0.7) + ga.FedDyn(alpha=0.2), [0, 0], [-0.5, -0.25], 0.9),
        (ga.FedGA(beta=0.5) + LargeBatchGradAlign(beta=0.1), [1.8, -2.4], [0, 0], 0),
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


@pytest.mark.parametrize("other", [ga.FedProx(mu=0.1), ga.Scaffold(), ga.FedAvg(), LargeBatchGradAlign(beta=0.1)])
def test_a_step_form_stays_one_in_every_combination(other):
    inside = ga.FedGA(beta=0.5, form="step")
    assert plan_of(inside).every_step
    assert plan_of(inside + other).every_step
    assert plan_of(other + inside).every_step
    assert not plan_of(ga.FedGA(beta=0.5)).every_step


@pytest.mark.parametrize(
    "algorithm",
    [ga.FedGA(beta=0.5), ga.FedGA(beta=0.5) + LargeBatchGradAlign(beta=0.1), ga.FedGA(beta=0.0) + ga.FedAvg()],
)
def test_what_only_displaces_is_planned_without_the_client_s_own_gradient(algorithm):
    joined, seen = combine(algorithm), view()
    assert joined.only_displaces
    found = joined.plan({part.label: view(gradient=None) for part in joined.parts})
    assert of(found.displaced(seen.gradient)) == pytest.approx(of(plan_of(algorithm).displacement), abs=1e-6)


@pytest.mark.parametrize("part", [ga.FedProx(mu=0.1), ga.Scaffold(), ga.FedDyn(), ga.LinearScaling()])
def test_what_does_more_than_displace_says_so(part):
    assert not combine(part).only_displaces
    assert not (ga.FedGA(beta=0.1) + part).only_displaces


def test_a_variant_of_one_s_own_does_not_claim_to_only_displace():
    class Twice(ga.FedGA):
        def plan(self, view):
            return super().plan(view) + super().plan(view)

    assert not Twice(beta=0.1).only_displaces


def test_a_round_s_algorithm_as_plain_values_and_back():
    joined = ga.FedGA(beta=ga.Warmup(value=0.4, rounds=4)) + ga.FedProx(mu=0.3) + ga.FedAdam(lr=0.03)
    values = joined.at(2).values()
    assert values == {"fedga": {**FRESH, "beta": 0.2}, "fedprox": {"mu": 0.3}}
    assert joined.with_values(values) == joined.at(2)
    assert joined.with_values(joined.values()).parts[0] is joined.parts[0]
    assert Combination.from_values(values, known_algorithms()).parts == joined.at(2).parts


def test_an_algorithm_is_known_as_soon_as_it_is_defined():
    class FedHalf(ga.FedAvg):
        pass

    class FedGA(ga.FedGA):
        """Somebody's own with the name of ours."""

    known = known_algorithms()
    assert known["fedhalf"] is FedHalf
    assert known["fedga"] is ga.FedGA
    ours = "fedavg fedprox scaffold fedga gradalign largebatchsgd linearscaling feddyn fedinit fedsam fedlesam fedcm"
    assert set(list(known)[:12]) == set(ours.split())
    assert known["gradalign"] is LargeBatchGradAlign


def test_the_server_s_vector_after_a_round():
    sums = {"update": torch.zeros(2), "total_step_size": 0.3, "reported": 3, "clients": 12}
    sums |= {"x": torch.zeros(2), "lr": 0.1, "weight": 3.0, "known": (6, 8), "known_weight": (6.0, 8.0)}
    change = torch.tensor([4.0, -8.0])
    kept, nothing = SharedSums(kept_change=change, **sums), SharedSums(kept_change=None, **sums)
    for algorithm in (ga.Scaffold(control="kept"), ga.FedDyn()):
        assert algorithm.next_shared(None, kept).tolist() == [1.0, -2.0]
        assert algorithm.next_shared(torch.ones(2), kept).tolist() == [2.0, -1.0]
    assert ga.FedGA(beta=0.1).next_shared(None, nothing) is None


def test_the_strengths_add_up_and_follow_their_schedules():
    joined = ga.FedGA(beta=ga.Warmup(value=0.4, rounds=4)) + LargeBatchGradAlign(beta=0.1)
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
        (LargeBatchGradAlign(beta=0.1), True, 0, True),
        (ga.LargeBatchSGD(), False, 0, True),
        (ga.LinearScaling(), True, 0, True),
        (ga.LinearScaling(aligned=False), False, 0, True),
        (ga.Scaffold(), True, 0, False),
        (ga.Scaffold(control="kept"), False, 1, False),
        (ga.FedDyn(), False, 1, False),
        (ga.FedDyn() + ga.Scaffold(control="kept") + ga.FedGA(beta=0.1), True, 2, False),
        (ga.FedProx() + LargeBatchGradAlign(beta=0.1), True, 0, True),
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


def test_a_memory_without_the_server_s_vector_is_none():
    with pytest.raises(ga.GradalignError, match="kept vector and the server's"):
        view(shared=None).memory()


def test_a_client_never_seen_has_kept_zeros():
    own, shared = view(kept=None).memory()
    assert own.tolist() == [0.0, 0.0]
    assert torch.equal(shared, view().shared)
