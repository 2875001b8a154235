"""Schedules that follow the length of a run: in shares of it, or in rounds of a recipe whose rounds are changed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradalign as ga
from conftest import Quadratics
from gradalign.algorithms.schedule import spanning, value_at
from gradalign.recipes import load_recipe
from gradalign.recipes.build import build_algorithm, build_local
from gradalign.runs.metrics import read_metrics
from gradalign.sweep.plan import SweepPlan
from gradalign.sweep.protocol import Search
from test_cli import call

COSINE = """
name = "mine"
rounds = 40
[task]
clients = 5
[algorithm]
name = "fedga"
beta = { kind = "off-until", value = 0.3, round = 10 }
[local]
lr = { kind = "cosine", value = 0.2, rounds = 40 }
steps = 1
[compare.settings.fedavg]
rounds = 80
[compare.settings.own]
rounds = 80
algorithm = { name = "fedavg" }
local = { lr = { kind = "cosine", value = 0.2, rounds = 20 } }
"""


def cosine(position: float) -> float:
    """0.2 falling to 0 along half a cosine."""
    return 0.1 * (1 + math.cos(math.pi * position))


def write(tmp_path, text=COSINE):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def lr_of(spec):
    """Return lr by round, as a run of the spec will have it."""
    local = build_local(spec.local, build_algorithm(spec.algorithm, spec.server))
    return lambda index: value_at(spanning(local.lr, spec.rounds), index)


def beta_of(spec):
    algorithm = build_algorithm(spec.algorithm, spec.server).over(spec.rounds)
    return lambda index: algorithm.at(index).beta


@given(rounds=st.integers(1, 400), share=st.integers(1, 100))
def test_a_share_that_is_a_whole_number_of_rounds_is_that_number(rounds, share):
    """k/n of n rounds is k rounds, for every kind of schedule and in every round."""
    total, length = max(rounds, share), min(rounds, share)
    of_the_run = length / total
    pairs = [
        (ga.Warmup(value=1.0, start=0.2, share=of_the_run), ga.Warmup(value=1.0, start=0.2, rounds=length)),
        (ga.Cosine(value=1.0, end=0.1, share=of_the_run), ga.Cosine(value=1.0, end=0.1, rounds=length)),
        (ga.OffUntil(value=1.0, share=of_the_run), ga.OffUntil(value=1.0, round=length)),
        (ga.Steps(value=1.0, at_shares={of_the_run: 0.5}), ga.Steps(value=1.0, at_rounds={length: 0.5})),
        (ga.Cosine(value=1.0), ga.Cosine(value=1.0, rounds=total)),
    ]
    for shared, counted in pairs:
        for index in {0, max(0, length - 1), length, length + 1, total}:
            assert shared.over(total).at(index) == counted.at(index)
            assert counted.over(total) == counted


def test_values_by_hand_and_mistakes():
    assert [ga.Cosine(value=1.0).over(2).at(i) for i in range(3)] == pytest.approx([1.0, 0.5, 0.0])
    assert [ga.Warmup(value=1.0, share=0.5).over(5).at(i) for i in range(4)] == pytest.approx([0.0, 0.4, 0.8, 1.0])
    assert [ga.OffUntil(value=1.0, share=0.3).over(5).at(i) for i in range(3)] == [0.0, 0.0, 1.0]  # from round 1.5 on
    with pytest.raises(ga.GradalignError, match="needs the run's length"):
        ga.Cosine(value=1.0).at(0)
    with pytest.raises(ga.GradalignError, match="rounds or share, got rounds and share"):
        ga.Warmup(value=1.0, rounds=3, share=0.5)
    with pytest.raises(ga.GradalignError, match="round or share, got neither"):
        ga.OffUntil(value=1.0)
    with pytest.raises(ga.GradalignError, match=r"being off needs a share of the run of at least 0, got -0\.5"):
        ga.OffUntil(value=1.0, share=-0.5)
    with pytest.raises(ga.GradalignError, match=r"a step needs a share of the run of at least 0, got -0\.5"):
        ga.Steps(value=1.0, at_shares={-0.5: 0.1})
    with pytest.raises(ga.GradalignError, match="share of the run above 0, got -1"):
        ga.Cosine(value=1.0, share=-1)


def test_a_run_from_python_spreads_shares_over_its_rounds():
    result = ga.run(
        Quadratics.make(4).task(),
        ga.FedGA(beta=ga.Steps(value=0.1, at_shares={0.5: 0.2})),
        rounds=4,
        local=ga.LocalTraining(lr=ga.Cosine(value=0.2), steps=1),
        workers=0,
    )
    assert result.history["lr"][1:] == pytest.approx([cosine(i / 4) for i in range(4)])
    assert result.history["beta"][1:] == [0.1, 0.1, 0.2, 0.2]


def test_a_recipe_gives_shares(tmp_path):
    text = COSINE.replace('cosine", value = 0.2, rounds = 40', 'cosine", value = 0.2').replace(
        '"off-until", value = 0.3, round = 10', '"steps", value = 0.1, at_shares = { "0.25" = 0.4 }'
    )
    for rounds in (40, 10):
        spec = load_recipe(write(tmp_path, text), [f"rounds={rounds}"]).spec()
        assert lr_of(spec)(rounds) == 0.0
        assert lr_of(spec)(rounds // 2) == pytest.approx(0.1)
        assert [beta_of(spec)(i) for i in (0, math.ceil(rounds / 4) - 1, math.ceil(rounds / 4))] == [0.1, 0.1, 0.4]


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        (["scale.rounds=0.25"], 10),
        (["rounds=80"], 80),
        (["rounds=7"], 7),
        (["rounds=80", "scale.rounds=0.1"], 80),
        (["rounds=80", "scale=0.1"], 80),
        ([], 40),
    ],
)
def test_schedules_in_rounds_follow_the_rounds(tmp_path, settings, rounds):
    """Forty rounds of cosine for forty rounds of training: whatever the rounds become, the cosine ends with them."""
    recipe = load_recipe(write(tmp_path), settings)
    decided = {"seed": 0, "holdout": 0.1, "stop_after": 0.2, "margin": 0.2, "finalists": 1, "seeds": 1}
    plan = SweepPlan(recipe=recipe, search=Search(entry="fedga", baseline=None, lists={}), **decided)
    searched = plan.spec("fedga", {"lr": 0.2})
    for spec in (recipe.spec(), recipe.spec_for("fedga", 0), searched):
        assert spec.rounds == rounds
        assert lr_of(spec)(rounds) == 0.0
        assert lr_of(spec)(rounds - 1) == pytest.approx(cosine((rounds - 1) / rounds))
        first = math.ceil(rounds / 4)  # alignment begins after a quarter
        assert (beta_of(spec)(first - 1), beta_of(spec)(first)) == (0.0, 0.3)


def test_equal_communication_is_fair(tmp_path):
    """FedAvg with more rounds learns to the end; settings that place a schedule themselves are obeyed.

    FedGA's 40 rounds communicate once in the first 10, where β is 0, and twice in the others: 70 times.
    """
    free_path = write(tmp_path, COSINE.replace("[compare.settings.fedavg]\nrounds = 80\n", ""))
    free = load_recipe(free_path)
    assert (free.spec_for("fedga", 0).rounds, free.spec_for("fedavg", 0).rounds) == (40, 70)
    assert free.spec_for("scaffold", 0).rounds == 35
    rests = ["algorithm.beta=0.1", "algorithm.gradient_every=4"]  # 10 aligned rounds of 40: 50 communications
    assert load_recipe(free_path, rests).spec_for("scaffold", 0).rounds == 25
    assert lr_of(free.spec_for("fedavg", 0))(69) > lr_of(free.spec_for("fedavg", 0))(70) == 0.0
    recipe = load_recipe(write(tmp_path))
    fedavg = recipe.spec_for("fedavg", 0)
    assert (fedavg.rounds, fedavg.local.lr.rounds) == (80, 80)
    assert lr_of(fedavg)(60) == pytest.approx(cosine(0.75))
    assert lr_of(recipe.spec_for("own", 0))(20) == 0.0
    short = load_recipe(write(tmp_path), ["rounds=20"]).spec_for("own", 0)  # over everything: 5 + 2 · 15 of FedGA's
    assert (short.rounds, short.local.lr.share) == (35, 0.25)
    short = load_recipe(write(tmp_path), ["rounds=20", "compare.equal=updates"]).spec_for("own", 0)
    assert (short.rounds, short.local.lr.rounds) == (20, 5)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        (["rounds=80", "local.lr.rounds=30"], 30),
        (["rounds=80", "local.lr.share=0.5"], 40),
        (["rounds=80", "local.lr.value=0.4"], 80),
        (["rounds=80", 'local.lr={kind="cosine",value=0.4,rounds=10}'], 10),
        (['local.lr={kind="cosine",value=0.4}'], 40),
    ],
)
def test_an_override_that_places_the_schedule_is_obeyed(tmp_path, settings, ends):
    lr = lr_of(load_recipe(write(tmp_path), settings).spec())
    assert lr(ends - 1) > 0.0
    assert lr(ends) == 0.0


def test_the_command_line_ends_where_the_cosine_says(tmp_path):
    short = ("--set", "scale.rounds=0.1", "--seeds", 1, "--workers", 0)
    call("compare", write(tmp_path), "--algorithms", "fedga,fedavg", *short, "--out", tmp_path / "c")
    for name, rounds in (("fedga", 4), ("fedavg", 8)):
        rows = read_metrics(tmp_path / "c" / name / "seed0")[1:]
        assert [row["lr"] for row in rows] == pytest.approx([cosine(i / rounds) for i in range(rounds)])


def test_a_schedule_given_twice_is_one_sentence(tmp_path):
    text = COSINE.replace("value = 0.2, rounds = 40", "value = 0.2, rounds = 40, share = 1.0")
    done = call("run", write(tmp_path, text), "--out", tmp_path / "r", code=2)
    assert "local.lr: a cosine's length is given by rounds or share, got rounds and share" in done.stderr
    assert not (tmp_path / "r").exists()
