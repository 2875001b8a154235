"""Whole runs of every algorithm against the independent reference: unequal weights, uneven batches, silent clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradalign as ga
from conftest import vector
from gradalign.algorithms import LargeBatchGradAlign
from reference import UNMEASURED, Problem, Settings, play, record

# 6 of 7 clients a round, of which some fall silent; batches of 4 leave rests of 1, 2 and 3.
FEW = Problem((9, 3, 14, 6, 5, 11, 2))
PART = {"rounds": 3, "clients_per_round": 6, "dropout": 0.3, "weights": "examples", "seed": 2}
LOCAL = ga.LocalTraining(lr=0.2, epochs=2, batch_size=4, weight_decay=0.03)
ONE = ga.LocalTraining(lr=0.2, steps=1, batch_size=4, gradient_examples=5)
CLOSE = 1e-11

ALGORITHMS = {
    "fedavg": (ga.FedAvg(), Settings()),
    "fedprox": (ga.FedProx(mu=0.7), Settings(mu=0.7)),
    "scaffold": (ga.Scaffold(), Settings(scaffold="fresh")),
    "scaffold kept": (ga.Scaffold(control="kept"), Settings(scaffold="kept")),
    "fedga": (ga.FedGA(beta=0.3), Settings(beta=0.3)),
    "fedga step": (ga.FedGA(beta=0.3, form="step"), Settings(beta=0.3, inside=True)),
    "fedga running": (ga.FedGA(beta=0.3, mean="running"), Settings(beta=0.3, mean="running")),
    "fedga last": (ga.FedGA(beta=0.3, mean="running", decay=0), Settings(beta=0.3, mean="running", decay=0.0)),
    "fedga kept": (ga.FedGA(beta=0.3, mean="kept"), Settings(beta=0.3, mean="kept")),
    "fedga running step": (
        ga.FedGA(beta=0.3, mean="running", form="step"),
        Settings(beta=0.3, mean="running", inside=True),
    ),
    "fedga at times": (
        ga.FedGA(beta=0.3, mean="running", gradient_every=2),
        Settings(beta=0.3, mean="running", every=2),
    ),
    "fedinit": (ga.FedInit(beta=0.2), Settings(init=0.2)),
    "fedsam": (ga.FedSAM(rho=0.2), Settings(sam=0.2)),
    "fedlesam": (ga.FedLESAM(rho=0.2), Settings(lesam=0.2)),
    "fedcm": (ga.FedCM(alpha=0.4), Settings(cm=0.4)),
    "running and kept": (
        ga.FedGA(beta=0.3, mean="running") + ga.Scaffold(control="kept") + ga.FedProx(mu=0.7) + ga.FedAvgM(lr=0.8),
        Settings(beta=0.3, mean="running", mu=0.7, scaffold="kept", server="momentum", server_lr=0.8),
    ),
    "kept and a correction": (
        ga.FedGA(beta=0.3, mean="kept") + ga.Scaffold(),
        Settings(beta=0.3, mean="kept", scaffold="fresh"),
    ),
    "feddyn": (ga.FedDyn(alpha=0.4), Settings(dyn=0.4)),
    "server lr": (ga.FedAvg() + ga.ServerRule(lr=0.6), Settings(server_lr=0.6)),
    "fedavgm": (ga.FedAvgM(lr=0.6, momentum=0.8), Settings(server="momentum", server_lr=0.6, momentum=0.8)),
    "nesterov": (ga.FedAvgM(lr=0.6, nesterov=True), Settings(server="nesterov", server_lr=0.6)),
    "fedadagrad": (ga.FedAdagrad(lr=0.1), Settings(server="adagrad", server_lr=0.1, beta1=0.0)),
    "fedadam": (ga.FedAdam(lr=0.1, beta1=0.7), Settings(server="adam", server_lr=0.1, beta1=0.7)),
    "fedyogi": (ga.FedYogi(lr=0.1, beta2=0.9), Settings(server="yogi", server_lr=0.1, beta2=0.9)),
    "two pulls": (ga.FedProx(mu=0.5) + ga.FedDyn(alpha=0.4), Settings(mu=0.5, dyn=0.4)),
    "two displacements": (ga.FedGA(beta=0.2) + LargeBatchGradAlign(beta=0.1), Settings(beta=0.3)),
    "step and a pull": (ga.FedGA(beta=0.3, form="step") + ga.FedProx(mu=0.7), Settings(beta=0.3, inside=True, mu=0.7)),
    "a pull and step": (ga.FedProx(mu=0.7) + ga.FedGA(beta=0.3, form="step"), Settings(beta=0.3, inside=True, mu=0.7)),
    "fresh and displaced": (ga.Scaffold() + ga.FedGA(beta=0.3), Settings(beta=0.3, scaffold="fresh")),
    "kept and displaced": (ga.Scaffold(control="kept") + ga.FedGA(beta=0.3), Settings(beta=0.3, scaffold="kept")),
    "two memories": (ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.4), Settings(scaffold="kept", dyn=0.4)),
    "everything": (
        ga.FedGA(beta=0.3) + ga.FedProx(mu=0.7) + ga.Scaffold(control="kept") + ga.FedAvgM(lr=0.8),
        Settings(beta=0.3, mu=0.7, scaffold="kept", server="momentum", server_lr=0.8),
    ),
}
ONE_STEP = {
    "large batches": (ga.LargeBatchSGD(), Settings()),
    "gradalign": (LargeBatchGradAlign(beta=0.5), Settings(beta=0.5)),
    "linear scaling": (ga.LinearScaling(aligned=False), Settings(linear=False)),
    "aligned scaling": (ga.LinearScaling(), Settings(linear=True)),
    "scaling and a pull": (ga.LinearScaling() + ga.FedProx(mu=0.7), Settings(linear=True, mu=0.7)),
}


def local_for(case, usual: ga.LocalTraining = LOCAL) -> ga.LocalTraining:
    return ONE if "gradalign" in getattr(case[0], "label", "") else usual


def cases(named):
    return pytest.mark.parametrize("case", named.values(), ids=[name.replace(" ", "-") for name in named])


def parameters(result: ga.Result) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


def gap(result: ga.Result, expected: torch.Tensor) -> float:
    return float((parameters(result) - expected).abs().max())


def compare(problem: Problem, case, local: ga.LocalTraining, **settings) -> None:
    algorithm, given = case
    settings = PART | settings
    rounds, result = record(problem, algorithm, local=local, **settings)
    expected = play(problem, rounds, given, local, by_examples=settings["weights"] == "examples")
    assert gap(result, expected.x) < CLOSE
    assert result.history["local_loss"][1:] == pytest.approx(expected.losses, rel=1e-11)
    assert result.history["reported"][1:] == [len(chance.steps) for chance in rounds]
    assert result.history["local_updates"][-1] == sum(len(s) for c in rounds for s in c.steps.values())
    trained = [sum(len(rows) for steps in c.steps.values() for rows in steps) for c in rounds]
    asked = [sum(len(rows) for parts in c.gradients.values() for rows in parts) for c in rounds]
    assert np.diff(result.history["examples"]).tolist() == [a + b for a, b in zip(asked, trained, strict=True)]
    assert result.history["examples"][0] == 0
    assert result.history["communication_rounds"] == [given.trips * r for r in range(settings["rounds"] + 1)]


@cases(ALGORITHMS)
def test_three_rounds_of_every_algorithm(case):
    compare(FEW, case, local_for(case))


def test_the_trial_has_silent_and_missing_clients():
    rounds, _ = record(FEW, ga.FedGA(beta=0.3), local=LOCAL, **PART)
    assert [len(chance.gradients) for chance in rounds] == [6, 6, 6]
    assert len({tuple(chance.gradients) for chance in rounds}) > 1
    answering = [tuple(chance.steps) for chance in rounds]
    assert len(set(answering)) > 1, "the same clients are not silent every round"
    assert all(0 < len(some) < 6 for some in answering)
    lengths = {len(rows) for chance in rounds for steps in chance.steps.values() for rows in steps}
    assert lengths == {1, 2, 3, 4}


@cases(ONE_STEP)
def test_one_step_a_round_on_mini_batches(case):
    compare(FEW, case, ONE)


@cases(
    {name: ALGORITHMS[name] for name in ("scaffold kept", "fedga step", "everything", "fedga running", "fedga kept")}
)
@pytest.mark.parametrize(
    "local",
    [
        ga.LocalTraining(lr=0.2, steps=3, batch_size=4, momentum=0.6, weight_decay=0.03),
        ga.LocalTraining(lr=0.2, steps=3, clip_norm=0.4, weight_decay=0.03),
        ga.LocalTraining(lr=ga.Cosine(value=0.3, rounds=4), epochs=1, batch_size=3, momentum=0.6, clip_norm=0.4),
    ],
    ids=["momentum", "clipping", "both"],
)
def test_momentum_clipping_and_schedules(case, local):
    compare(FEW, case, local)


@cases({name: ALGORITHMS[name] for name in ("fedavg", "fedga", "fedga step", "fedga running")})
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_batch_norm(case, weights):
    """Float buffers are averaged with the updates' weights, integer ones are the first client's."""
    problem = Problem((9, 3, 14, 7, 5, 12), norm=True)  # no batch of one
    local = ga.LocalTraining(lr=0.2, steps=3, batch_size=5)
    settings = {**PART, "clients_per_round": 5, "weights": weights}
    rounds, result = record(problem, case[0], local=local, **settings)
    expected = play(problem, rounds, case[1], local, by_examples=weights == "examples")
    assert gap(result, expected.x) < CLOSE
    norm = result.model[1]
    assert float((torch.cat([norm.running_mean, norm.running_var]) - expected.floats).abs().max()) < CLOSE
    assert int(norm.num_batches_tracked) == 9, "three steps of the first client in each of three rounds"


# --- the other ways of computing the same

MANY = Problem(tuple(3 + (7 * i) % 11 for i in range(31)), inputs=3, hidden=4)
CROWD = {**PART, "clients_per_round": 28}
COHORTS = {
    **{n: ALGORITHMS[n] for n in ("fedavg", "fedprox", "scaffold", "scaffold kept", "fedga", "fedga step", "feddyn")},
    **{n: ALGORITHMS[n] for n in ("fedga running", "fedga kept", "fedinit", "fedsam", "fedlesam", "fedcm")},
    **{n: ALGORITHMS[n] for n in ("step and a pull", "a pull and step", "kept and displaced", "two displacements")},
}
LOCALS = {
    "plain": ga.LocalTraining(lr=0.2, epochs=1, batch_size=4),
    "decay": ga.LocalTraining(lr=0.2, epochs=2, batch_size=4, weight_decay=0.2),
    "momentum and clipping": ga.LocalTraining(lr=0.2, epochs=1, batch_size=4, momentum=0.6, clip_norm=0.4),
    "some examples": ga.LocalTraining(lr=0.2, steps=2, batch_size=3, gradient_examples=4),
}


def other_way(problem: Problem, case, local: ga.LocalTraining, workers: int = 0) -> None:
    algorithm, given = case
    rounds, _ = record(problem, algorithm, local=local, **CROWD)
    expected = play(problem, rounds, given, local, by_examples=True)
    fast = ga.run(problem.task(), algorithm, local=local, workers=workers, measure=UNMEASURED, **CROWD)
    assert gap(fast, expected.x) < CLOSE
    assert fast.history["local_loss"][1:] == pytest.approx(expected.losses, rel=1e-9)
    assert fast.history["local_updates"][-1] == sum(len(s) for c in rounds for s in c.steps.values())


@cases(COHORTS)
def test_cohorts(case):
    other_way(MANY, case, local_for(case, LOCALS["decay"]))


@cases({name: ALGORITHMS[name] for name in ("fedga", "scaffold kept", "fedga running", "running and kept")})
def test_cohorts_in_two_workers(case):
    other_way(MANY, case, LOCALS["decay"], workers=2)


@pytest.mark.parametrize("local", LOCALS.values(), ids=[name.replace(" ", "-") for name in LOCALS])
@cases({name: ALGORITHMS[name] for name in ("fedga", "everything")})
def test_cohorts_with_other_local_steps(case, local):
    other_way(MANY, case, local)


WIDE = Problem(tuple(3 + (7 * i) % 11 for i in range(28)), inputs=182, hidden=721)


@pytest.mark.parametrize(("name", "decay"), [("fedga", 0.0), ("fedga", 0.3), ("fedavg", 0.3)])
def test_lockstep(name, decay):
    """A layer of 2¹⁷ numbers and batches of at most 32: one large weight for five clients."""
    local = ga.LocalTraining(lr=0.05, epochs=2, batch_size=4, weight_decay=decay)
    settings, case = {**CROWD, "clients_per_round": 26, "rounds": 1}, ALGORITHMS[name]
    rounds, _ = record(WIDE, case[0], local=local, **settings)
    expected = play(WIDE, rounds, case[1], local, by_examples=True)
    fast = ga.run(WIDE.task(), case[0], local=local, workers=0, measure=UNMEASURED, **settings)
    assert gap(fast, expected.x) < CLOSE
    assert fast.history["local_loss"][1:] == pytest.approx(expected.losses, rel=1e-9)


@cases({name: ALGORITHMS[name] for name in ("fedga step", "everything")})
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_large_layer_of_few_clients(case, momentum):
    """The weight's gradient stays a product of thin matrices until the step."""
    problem = Problem((9, 3, 14, 6), inputs=182, hidden=721)
    local = ga.LocalTraining(lr=0.05, epochs=1, batch_size=4, weight_decay=0.3, momentum=momentum)
    settings = {**PART, "clients_per_round": 3, "rounds": 2}
    rounds, _ = record(problem, case[0], local=local, **settings)
    expected = play(problem, rounds, case[1], local, by_examples=True)
    fast = ga.run(problem.task(), case[0], local=local, workers=0, measure=UNMEASURED, **settings)
    assert gap(fast, expected.x) < CLOSE


def test_the_pool_gives_the_bits_of_one_process():
    algorithm = ALGORITHMS["everything"][0]
    runs = [
        ga.run(FEW.task(), algorithm, local=LOCAL, workers=workers, measure=UNMEASURED, **PART) for workers in (0, 2)
    ]
    assert torch.equal(vector(runs[0]), vector(runs[1]))
