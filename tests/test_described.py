"""What a run from Python writes down is what a recipe would have said: read as one, it gives the same objects."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

import gradalign as ga
from conftest import Quadratics
from gradalign.algorithms.plan import combine
from gradalign.recipes.build import build_algorithm, build_local
from gradalign.recipes.spec import validate
from gradalign.server.federation import describe, make_federation

numbers = st.floats(1e-6, 10.0)
rounds = st.integers(1, 500)
shares = st.floats(0.01, 1.0)
schedules = st.one_of(
    st.builds(ga.Steps, value=numbers, at_rounds=st.dictionaries(rounds, numbers, max_size=3)),
    st.builds(ga.Steps, value=numbers, at_shares=st.dictionaries(shares, numbers, min_size=1, max_size=3)),
    st.builds(ga.Warmup, value=numbers, rounds=rounds, start=numbers),
    st.builds(ga.Warmup, value=numbers, share=shares),
    st.builds(ga.OffUntil, value=numbers, round=rounds),
    st.builds(ga.OffUntil, value=numbers, share=shares),
    st.builds(ga.Cosine, value=numbers, rounds=rounds, end=numbers),
    st.builds(ga.Cosine, value=numbers),
)
settings = st.one_of(numbers, schedules)
PARTS = {
    "fedprox": st.builds(ga.FedProx, mu=numbers),
    "scaffold": st.builds(ga.Scaffold, control=st.sampled_from(["fresh", "kept"])),
    "fedga": st.builds(ga.FedGA, beta=settings, form=st.sampled_from(["start", "step"])),
    "gradalign": st.builds(ga.LargeBatchGradAlign, beta=settings),
    "feddyn": st.builds(ga.FedDyn, alpha=numbers),
    "linearscaling": st.builds(ga.LinearScaling, aligned=st.booleans()),
    "largebatchsgd": st.builds(ga.LargeBatchSGD),
    "fedavg": st.builds(ga.FedAvg),
}
share = st.floats(0.0, 0.99)
rules = st.one_of(
    st.none(),
    st.builds(ga.FedAvgM, lr=numbers, momentum=share, nesterov=st.booleans()),
    st.builds(ga.FedAdagrad, lr=numbers, tau=numbers),
    st.builds(ga.FedAdam, lr=numbers, beta1=share, beta2=share, tau=numbers),
    st.builds(ga.FedYogi, lr=numbers, beta1=share, beta2=share, tau=numbers),
)
combinations = st.lists(st.sampled_from(sorted(PARTS)), unique=True, min_size=1, max_size=4).flatmap(
    lambda names: st.tuples(*(PARTS[name] for name in names))
)
TASK = Quadratics.make(4).task()


def described(algorithm, local, **more):
    options = {"per_round": 2, "weights": "examples", "dropout": 0.25, "seed": 3, "min_fraction": 0.5} | more
    federation = make_federation(TASK, algorithm, local, rounds=100, **options)
    written = tomllib.loads(tomli_w.dumps({"rounds": 100, **describe(federation, ga.Measure())}))
    return federation, written


@given(parts=combinations, rule=rules, lr=settings, precision=st.sampled_from([None, "bf16"]))
def test_objects_come_back_from_what_was_written(parts, rule, lr, precision):
    algorithm = combine(*parts, *([] if rule is None else [rule]))
    local = ga.LocalTraining(lr=lr, steps=1, batch_size=3, momentum=0.5, clip_norm=2.0, precision=precision)
    federation, written = described(algorithm, local)
    spec = validate(written, "spec.toml")
    again = build_algorithm(spec.algorithm, spec.server)
    assert (again.parts, again.server) == (algorithm.parts, algorithm.server)
    assert replace(build_local(spec.local, again), precision=spec.precision) == federation.local
    clients = spec.clients
    assert (clients.per_round, clients.weights, clients.dropout, clients.min_fraction) == (2, "examples", 0.25, 0.5)


def test_numbers_of_numpy_are_numbers():
    _, written = described(combine(ga.FedProx(mu=np.float32(0.5))), ga.LocalTraining(lr=np.float64(0.1)))
    assert written["algorithm"] == {"name": "fedprox", "mu": 0.5}


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (
            ga.FedGA(beta=0.1) + ga.LargeBatchGradAlign(beta=0.3),
            ga.FedGA(beta=0.7) + ga.LargeBatchGradAlign(beta=0.3),
            "parts.fedga.beta",
        ),
        (
            ga.FedGA(beta=0.1) + ga.LargeBatchGradAlign(beta=0.3),
            ga.FedGA(beta=0.1) + ga.LargeBatchGradAlign(beta=0.4),
            "gradalign.beta",
        ),
        (ga.FedGA(beta=0.1), ga.FedGA(beta=ga.OffUntil(value=0.1, round=0)), "algorithm.beta"),
    ],
)
def test_resuming_with_other_settings_of_any_part_is_refused(tmp_path, first, second, named):
    options = {"rounds": 2, "local": ga.LocalTraining(lr=0.1, steps=1), "workers": 0, "out": tmp_path / "r"}
    before = ga.run(TASK, first, **options)
    with pytest.raises(ga.GradalignError, match=rf"holds a run with other settings: .*{named} \("):
        ga.run(TASK, second, resume=True, **options)
    assert ga.run(TASK, first, resume=True, **options).history == before.history


@dataclass(frozen=True, kw_only=True)
class First(ga.FedAvg):
    """An algorithm with fields that the table of the algorithm has, too."""

    name: str = "same"
    parts: int = 2


class Second(First):
    """Another one with equal values."""


def test_fields_of_ones_own_do_not_hide_which_algorithm_it_is(tmp_path):
    _, written = described(combine(First(), ga.FedProx(mu=0.5)), ga.LocalTraining())
    assert written["algorithm"] == {
        "name": "test_described:First+fedprox", "mu": 0.5, "parts": {"first": {"name": "same", "parts": 2}}
    }  # fmt: skip
    options = {"rounds": 2, "local": ga.LocalTraining(lr=0.1, steps=1), "workers": 0, "out": tmp_path / "r"}
    before = ga.run(TASK, First(), **options)
    for other, named in ((Second(), "algorithm.name"), (First(name="other"), r"parts\.first\.name")):
        with pytest.raises(ga.GradalignError, match=rf"holds a run with other settings: .*{named} \("):
            ga.run(TASK, other, resume=True, **options)
    assert ga.run(TASK, First(), resume=True, **options).history == before.history


def test_a_recipe_tells_the_parts_apart():
    table = {"name": "fedga+gradalign", "form": "step", "parts": {"fedga": {"beta": 0.7}, "gradalign": {"beta": 0.3}}}
    spec = validate({"algorithm": table}, "x")
    made = build_algorithm(spec.algorithm, spec.server)
    assert made.parts == (ga.FedGA(beta=0.7, form="step"), ga.LargeBatchGradAlign(beta=0.3, form="step"))
    for wrong, sentence in (
        ({"fedprox": {"mu": 0.1}}, r"algorithm\.parts\.fedprox is set, but fedga\+gradalign has no such part"),
        ({"fedga": {"beta": 0.1, "mu": 0.1}}, r"algorithm\.parts\.fedga\.mu is set, but fedga has no such parameter"),
    ):
        spec = validate({"algorithm": table | {"parts": wrong}}, "x")
        with pytest.raises(ga.GradalignError, match=sentence):
            build_algorithm(spec.algorithm, spec.server)


def test_a_class_of_ones_own_is_not_taken_for_the_librarys():
    @dataclass(frozen=True, kw_only=True)
    class FedProx(ga.FedProx):
        """Another algorithm with a name that is taken."""

    class Rule(ga.FedAdam):
        """A rule with its parent's label."""

        label = "fedadam"

    _, written = described(combine(FedProx(mu=0.1), Rule()), ga.LocalTraining())
    assert "FedProx" in written["algorithm"]["name"]
    assert "Rule" in written["algorithm"]["name"]
    spec = validate(written, "x")
    with pytest.raises(ga.GradalignError, match="is not an algorithm"):
        build_algorithm(spec.algorithm, spec.server)
