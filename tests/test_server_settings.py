"""Settings of a server's rule are that rule's: comparing with another one does not hand them over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradalign as ga
from gradalign.recipes import load_recipe
from gradalign.recipes.build import build_algorithm
from test_cli import call

RECIPE = """
rounds = 4
[task]
name = "digits"
clients = 6
[algorithm]
name = "fedga+fedadam"
beta = 0.4
{server}
[local]
lr = 0.2
steps = 5
batch_size = 32
[clients]
per_round = 4
"""
OLD, NEW = "[server]\nlr = 0.02\n", "[server.fedadam]\nlr = 0.02\n"
SMALL = ("--seeds", 1, "--workers", 0, "--set", "rounds=1")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(server: str) -> Path:
    Path("my.toml").write_text(RECIPE.format(server=server))
    return Path("my.toml")


def rule(entry: str | None, *settings: str) -> ga.ServerRule:
    recipe = load_recipe("my.toml", settings)
    spec = recipe.spec() if entry is None else recipe.spec_for(entry, 0)
    return build_algorithm(spec.algorithm, spec.server).server


def test_plain_averaging_is_what_it_is_without_the_table():
    write(OLD)
    words = ("--algorithms", "fedavg,fedadam", "--set", "compare.equal=updates", *SMALL[:4])
    told = call("compare", "my.toml", *words, "--out", "both", "--json").stdout
    compared = {one["name"]: one["final_test_loss"]["mean"] for one in json.loads(told)["algorithms"]}
    write("")
    for name, same in (("fedavg", True), ("fedadam", False)):
        told = call("run", "my.toml", "--set", f"algorithm.name={name}", "--workers", 0, "--out", name, "--json").stdout
        assert (json.loads(told)["final_test_loss"] == compared[name]) == same


def test_whose_a_setting_is():
    write(OLD)
    assert rule(None) == ga.FedAdam(lr=0.02)
    assert rule("fedprox+fedadam") == ga.FedAdam(lr=0.02)
    assert rule("fedyogi") == ga.FedYogi()
    assert rule("fedavg") == rule(None, "algorithm.name=fedavg") == ga.ServerRule()
    assert rule(None, "server.lr=0.5") == ga.FedAdam(lr=0.5)
    assert rule(None, "server.lr=0.5", "algorithm.name=fedavgm") == ga.FedAvgM(lr=0.5)
    assert rule(None, "server.fedavgm.lr=0.5") == ga.FedAdam(lr=0.02)
    write(NEW)
    assert rule(None) == rule("fedadam") == ga.FedAdam(lr=0.02)
    assert rule("fedavg") == ga.ServerRule()
    write(OLD + NEW.replace("0.02", "0.03") + "[server.fed-avg]\nlr = 0.9\n[server.fedyogi]\nbeta2 = 0.9\n")
    assert rule(None) == ga.FedAdam(lr=0.03)
    assert rule("scaffold") == ga.ServerRule(lr=0.9)
    assert rule("fedyogi", "server.fedyogi.lr=0.5") == ga.FedYogi(lr=0.5, beta2=0.9)
    own = '[compare.settings.slow]\nalgorithm.name = "fedadam"\nserver.lr = 0.001\n'
    write(OLD.replace("lr", "tau") + own)  # what only one rule has was written for that one
    assert rule("slow") == ga.FedAdam(lr=0.001, tau=0.02)
    Path("my.toml").write_text(RECIPE.format(server="[server]\nmomentum = 0.5\n").replace("+fedadam", ""))
    assert rule("fedavgm") == ga.FedAvgM(momentum=0.5)
    assert rule("fedavg") == ga.ServerRule()


MISTAKES = {
    "whose": (
        ("server.lr=0.5",),
        "server.lr is for which server rule, fedavg or fedadam? Say --set server.fedadam.lr=0.5",
    ),
    "rule": (("server.fedadm.lr=0.5",), 'server.fedadm: "fedadm" is not a server rule; known are fedavgm'),
    "key": (("server.fedadam.momentum=0.5",), "the server rule fedadam has only beta1, beta2, lr, tau"),
    "nobody": (("server.fedyogi.lr=0.5",), "--set server.fedyogi: none of fedavg, fedadam has such a parameter"),
    "no such": (("server.rate=0.5",), "server.rate is not a known setting"),
    "name": (("server.name=fedadam",), "the server's rule is part of the algorithm's name, for example"),
    "not a table": (("server=3",), "server: must be a table"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence(name):
    write(OLD)
    settings, sentence = MISTAKES[name]
    words = [word for setting in settings for word in ("--set", setting)]
    told = call("compare", "my.toml", "--algorithms", "fedavg,fedadam", *words, *SMALL, "--out", "out", code=2).stderr
    assert sentence in told
    assert told.count("\n") == 1
    assert not Path("out").exists()


def test_the_command_line_may_set_what_one_rule_has():
    write(OLD)
    words = ("--algorithms", "fedavg,fedadam", "--set", "server.tau=0.5", "--set", "server.fedavg.lr=0.7")
    call("compare", "my.toml", *words, *SMALL, "--out", "out")
    assert "[server]\nlr = 0.02\ntau = 0.5\n" in Path("out/fedadam/seed0/spec.toml").read_text()
    assert "[server]\nlr = 0.7\n" in Path("out/fedavg/seed0/spec.toml").read_text()
