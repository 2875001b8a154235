"""Local steps by other optimizers than SGD: against Adam's formulas written out, and where they may not be used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import Quadratics, blobs, final_point, vector
from gradalign.client.trainer import Setup
from gradalign.fast import Group
from gradalign.recipes.build import build_local
from gradalign.recipes.spec import validate
from gradalign.runs.folder import read_spec
from test_cli import call

ADAM = {"optimizer": "adam", "optimizer_settings": {"betas": [0.8, 0.9], "eps": 1e-3}}


def adam(y, gradient_at, *, lr, steps, decay=0.0, decoupled=0.0, beta1=0.8, beta2=0.9, eps=1e-3):
    """Kingma & Ba's Algorithm 1, with ℓ2 decay in the gradient or, as Loshchilov & Hutter have it, beside it."""
    m = v = np.zeros_like(y)
    for t in range(1, steps + 1):
        g = gradient_at(y) + decay * y
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        y = y - lr * decoupled * y
        y = y - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return y


def run(problem: Quadratics, algorithm, local: dict, **more) -> np.ndarray:
    options = {"rounds": 1, "workers": 0, "weights": "examples"} | more
    return final_point(ga.run(problem.task(), algorithm, local=ga.LocalTraining(lr=0.05, steps=3, **local), **options))


@pytest.mark.parametrize("form", ["start", "step"])
def test_adam_with_everything_that_algorithms_add(form):
    """FedGA's start, SCAFFOLD's correction and FedProx's pull: added to the gradient before the optimizer sees it."""
    problem, beta, mu, decay = Quadratics.make(3, examples=(2, 1, 3)), 0.2, 0.5, 0.1
    x, shares = problem.start, np.array([2, 1, 3]) / 6
    gradients = [problem.gradient(i, x) for i in range(3)]
    mean, wanted = sum(p * g for p, g in zip(shares, gradients, strict=True)), x.copy()
    for i, (p, g) in enumerate(zip(shares, gradients, strict=True)):
        start = x - beta * (mean - g)

        def slope(y, i=i, g=g):
            return problem.gradient(i, y) + (mean - g) + mu * (y - x)

        wanted += p * (adam(start, slope, lr=0.05, steps=3, decay=decay) - start)
    algorithm = ga.FedGA(beta=beta, form=form) + ga.Scaffold() + ga.FedProx(mu=mu)
    assert run(problem, algorithm, ADAM | {"weight_decay": decay}) == pytest.approx(wanted, rel=1e-12)


def test_adamws_decay_is_decoupled_and_clipping_comes_first():
    problem = Quadratics.make(1, examples=(3,))
    settings = ADAM | {"optimizer": "AdamW", "weight_decay": 0.3}
    slope = lambda y: problem.gradient(0, y)  # noqa: E731
    wanted = adam(problem.start, slope, lr=0.05, steps=3, decoupled=0.3)
    assert run(problem, ga.FedAvg(), settings) == pytest.approx(wanted, rel=1e-12)

    def clipped(y):
        g = problem.gradient(0, y)
        return g * min(1.0, 0.01 / np.linalg.norm(g))

    wanted = adam(problem.start, clipped, lr=0.05, steps=3, decoupled=0.3)
    assert run(problem, ga.FedAvg(), settings | {"clip_norm": 0.01}) == pytest.approx(wanted, rel=1e-12)


def test_the_optimizer_begins_anew_in_every_round():
    """(w − 0.15)² from 0: Adam's first step is lr long whatever the gradient; its second one would be 0.087."""

    def model() -> nn.Module:
        one = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(one.weight)
        return one

    data = (torch.ones(1, 1).double(), torch.full((1, 1), 0.15).double())
    task = ga.Task(model=model, clients=[data], loss=nn.functional.mse_loss, accuracy=lambda outputs, targets: None)
    local = ga.LocalTraining(lr=0.1, steps=1, optimizer="adam", optimizer_settings={"eps": 1e-12})
    assert float(vector(ga.run(task, ga.FedAvg(), rounds=1, local=local, workers=0))) == pytest.approx(0.1)
    assert float(vector(ga.run(task, ga.FedAvg(), rounds=2, local=local, workers=0))) == pytest.approx(0.2)


def test_torchs_sgd_is_ours():
    """With momentum as its own setting, torch's SGD is this library's; sgd alone is none but the usual one."""
    problem = Quadratics.make(3, examples=(2, 1, 3))
    own = run(problem, ga.FedGA(beta=0.1), {"momentum": 0.9, "weight_decay": 0.1, "batch_size": 2}, rounds=3)
    theirs = {"optimizer": "sgd", "optimizer_settings": {"momentum": 0.9}, "weight_decay": 0.1, "batch_size": 2}
    assert run(problem, ga.FedGA(beta=0.1), theirs, rounds=3) == pytest.approx(own, rel=1e-12)
    assert ga.LocalTraining(optimizer="SGD") == ga.LocalTraining()


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "adagrad", "nadam", "adadelta", "rprop"])
def test_the_same_bits_for_any_workers_on_flower_and_fast(optimizer):
    """On a model with batch norm and dropout; fast ways that train clients together keep away."""
    local = ga.LocalTraining(lr=0.01, steps=3, batch_size=7, optimizer=optimizer)
    options = {"rounds": 1, "clients_per_round": 4, "local": local, "weights": "examples"}
    task, algorithm = blobs(), ga.FedGA(beta=0.1) + ga.FedProx(mu=0.1)
    alone = vector(ga.run(task, algorithm, workers=0, **options))
    assert torch.isfinite(alone).all()
    assert torch.equal(vector(ga.run(task, algorithm, workers=0, fast=False, **options)), alone)
    if optimizer == "adam":
        pytest.importorskip("flwr")
        for more in ({"workers": 2}, {"engine": "flower"}):
            assert torch.equal(vector(ga.run(task, algorithm, **more, **options)), alone)


def test_many_clients_of_a_small_model_go_one_by_one():
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 0])) for _ in range(30)]
    task = ga.Task(model=lambda: nn.Sequential(nn.Linear(4, 2)), clients=clients)
    for local, together in ((ga.LocalTraining(), True), (ga.LocalTraining(optimizer="adam"), False)):
        assert (Group(Setup(task=task, local=local, clients_per_round=30)).cohort is not None) == together


@pytest.mark.parametrize(
    ("algorithm", "label"),
    [
        (ga.Scaffold(control="kept"), "scaffold"),
        (ga.FedProx(mu=0.1) + ga.FedGA(beta=0.1, mean="running"), "fedga"),
        (ga.FedGA(beta=0.1, mean="kept"), "fedga"),
        (ga.FedCM(), "fedcm"),
    ],
)
def test_algorithms_that_read_gradients_off_updates_refuse(algorithm, label):
    task = Quadratics.make(2).task()
    with pytest.raises(
        ga.GradalignError, match=f"{label} takes the clients' updates for sums of gradients, and adam's"
    ):
        ga.run(task, algorithm, rounds=1, local=ga.LocalTraining(optimizer="adam"), workers=0)
    for fine in (ga.Scaffold(), ga.FedGA(beta=0.1), ga.FedDyn(), ga.FedInit()):
        result = ga.run(task, fine, rounds=2, local=ga.LocalTraining(lr=0.01, optimizer="adam"), workers=0)
        assert math.isfinite(result.summary["final_test_loss"])


MISTAKES = {
    "optimizer": ({"optimizer": "adamm"}, 'local.optimizer: "adamm" is not in torch.optim; known are adadelta'),
    "setting": ({"optimizer": "adam", "optimizer_settings": {"beta": 1}}, "unexpected keyword argument 'beta'"),
    "list": ({"optimizer": "adam", "optimizer_settings": [1]}, "optimizer_settings must be settings by their names"),
    "value": ({"optimizer": "adam", "optimizer_settings": {"betas": [2, 0.9]}}, "Invalid beta parameter"),
    "closure": ({"optimizer": "lbfgs"}, "the optimizer lbfgs cannot take local steps with {}: "),
    "sparse": ({"optimizer": "sparseadam"}, "sparseadam cannot take local steps"),
    "momentum": ({"optimizer": "rmsprop", "momentum": 0.9}, "local.momentum is plain SGD's; give rmsprop its own in"),
    "lr": (
        {"optimizer": "adam", "optimizer_settings": {"lr": 1}},
        "optimizer_settings.lr is not set there; give local.lr",
    ),
    "decay": ({"optimizer": "rprop", "weight_decay": 0.1}, "local.weight_decay is set, but torch's Rprop has none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence(name):
    settings, sentence = MISTAKES[name]
    with pytest.raises(ga.GradalignError) as caught:
        ga.LocalTraining(**settings)
    assert sentence in str(caught.value)


def test_in_a_recipe_and_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = {"lr": 0.003, "optimizer": "adamw", "optimizer_settings": {"betas": [0.9, 0.99]}, "weight_decay": 0.01}
    spec = validate({"algorithm": {"name": "fedavg"}, "local": table}, "r")
    assert build_local(spec.local, ga.FedAvg() + ga.FedProx()) == ga.LocalTraining(**table)
    words = ("--set", "rounds=2", "--set", "clients.per_round=2", "--workers", 0, "--out", "r")
    adam = ("--set", "local.optimizer=adam", "--set", "local.optimizer_settings.betas=[0.9, 0.99]")
    call("run", "digits", *words, *adam)
    assert read_spec(tmp_path / "r")["local"]["optimizer_settings"] == {"betas": [0.9, 0.99]}
    assert "local.optimizer" in call("run", "digits", *words, "--resume", code=2).stderr
    call("run", "digits", *words, *adam, "--resume")
    told = call("run", "digits", "--set", "local.optimizer=adm", "--out", "bad", code=2).stderr
    assert told.startswith('error: local.optimizer: "adm" is not in torch.optim')
    assert not (tmp_path / "bad").exists()
