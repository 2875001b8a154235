"""Every recipe runs, at a tiny scale, on small files in the original formats; scale and paper's numbers are told."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import gradalign as ga
from gradalign.api import run_spec
from gradalign.errors import GradalignError
from gradalign.recipes import load_recipe, shipped_recipes
from gradalign.recipes.build import build_algorithm
from gradalign.recipes.papers import is_papers_problem, papers_accuracy
from gradalign.recipes.scale import apply_scale, lay_settings
from gradalign.recipes.spec import validate
from gradalign.runs import differing_fields
from gradalign.server.runner import RunOptions
from gradalign.sweep.plan import plan_sweep
from test_cli import call

PAPERS = [name for name in shipped_recipes() if name not in ("digits", "table")]
EXPERIMENTS = {
    "emnist-iid",
    "emnist-heterogeneous",
    "cifar10",
    "cifar10-updates",
    "cifar10-updates-whole",
    "emnist-beta",
    "emnist-local-steps",
    "shakespeare",
    "cifar100",
    "drift-emnist-iid",
    "drift-emnist-heterogeneous",
    "drift-cifar100",
    "training-accuracy-emnist",
    "training-accuracy-cifar100",
}
TINY = ("--set", "scale.rounds=0.0002", "--set", "scale.clients=0.1", "--set", "scale.data=0.5", "--workers", 0)
FAST = ("--set", "local.steps=1")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch, small_data):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_there_is_a_recipe_for_each_experiment():
    assert set(PAPERS) == EXPERIMENTS


@pytest.mark.parametrize("name", PAPERS)
def test_every_recipe_runs_and_says_at_what_scale(name):
    # A path, as in a clone, and the small batches of small clients.
    recipe = shipped_recipes()[name]
    out = call("run", recipe, *TINY, *FAST, "--out", "r").stdout
    assert "paper" in out
    assert "rounds" in out
    summary = json.loads(Path("r/summary.json").read_text())
    full = load_recipe(name).spec()
    assert summary["rounds"] == max(1, round(0.0002 * full.rounds))
    assert summary["scale"].startswith(f"{summary['rounds']:,} of {full.rounds:,} rounds")
    assert "50 % of each client's examples" in summary["scale"]
    assert (summary["paper"]["source"], summary["paper"]["test_accuracy"]) == (full.paper.source, None)
    assert "its numbers are left out" in " ".join(out.split())
    assert summary["task"]["train_examples"] > 0
    assert summary["final_test_accuracy"] is not None
    assert "paper" in call("show", "r").stdout


_FREE = [  # length, what the paper tuned, and what is so without being said
    ["rounds=20", "seed=3", "measure.test_every=5"],
    ["local.lr=0.4", "local.weight_decay=0.0001", "local.steps=40"],
    ['algorithm.beta={kind="off-until", value=0.5, share=0.1}'],
    ["local.batch_size=78", "local.gradient_examples=100"],  # a client may have fewer images than the paper's
    ["local.momentum=0.0", "clients.dropout=0.0", "clients.weights=uniform", "clients.per_round=10"],
    ["sweep.K=[3]"],
]
_OTHER = [
    ["local.steps=3"],
    ["local.steps=3", "sweep.K=[3]"],
    ['local.lr={kind="cosine", value=0.2}'],
    ["local.momentum=0.9"],
    ["local.clip_norm=1.0"],
    ["clients.per_round=47"],
    ["clients.dropout=0.5"],
    ["clients.weights=examples"],
    ["task.partition=dirichlet"],
    ["task.train_limit=1000"],
    ["scale.data=0.5"],
    ["precision=bf16"],
]
_OTHER_FEDGA = [["algorithm.mean=running"], ["algorithm.beta=auto"], ["algorithm.beta=0.0"]]
_OTHER_FEDGA += [
    ['algorithm.beta={kind="cosine", value=0.5}'],
    ['algorithm.beta={kind="warmup", value=0.5, share=0.1}'],
    ['algorithm.beta={kind="off-until", value=0.5, share=0.99}'],
    ['algorithm.beta={kind="off-until", value=0.5, round=99999}'],
]


@pytest.mark.parametrize(
    ("settings", "applies"),
    [*((words, True) for words in [*_FREE, ["algorithm.beta=0.5", "algorithm.mean=fresh"]])]
    + [(words, False) for words in [*_OTHER, *_OTHER_FEDGA]],
)
def test_the_papers_numbers_stand_beside_the_papers_setting_alone_however_another_came_in(settings, applies):
    wanted = [88.66, 0.13] if applies else None
    recipe = load_recipe("emnist-iid", settings)
    for spec in (recipe.spec(), recipe.spec_for("fedga", 0)):
        assert is_papers_problem(spec.to_dict()) is applies
        assert papers_accuracy(spec.to_dict(), "fedga") == wanted
    if not settings[0].startswith(("scale", "sweep")):  # which are no entry's own
        inside = [f"compare.settings.fedga.{word}" for word in settings if not word.startswith(("sweep", "seed"))]
        assert papers_accuracy(load_recipe("emnist-iid", inside).spec_for("fedga", 0).to_dict(), "fedga") == wanted


def test_a_sweeps_point_outside_the_papers_lists_has_no_number_beside_it():
    recipe = load_recipe("emnist-iid")
    for point, number in [({"K": 20, "lr": 0.4}, [88.32, 0.06]), ({"K": 3}, None), ({"clip_norm": 1.0}, None)]:
        lists = {name: [value] for name, value in point.items()}
        plan = plan_sweep(recipe, "fedavg", lists, sampler="grid", trials=None, test_beta=False)
        spec = plan.spec("fedavg", point, test=True)
        assert papers_accuracy(spec.to_dict(), "fedavg") == number


def test_an_algorithm_in_anothers_place_has_no_number_of_the_papers():
    words = ["compare.settings.fedga.algorithm.name=fedga+fedadam"]
    assert papers_accuracy(load_recipe("emnist-iid", words).spec_for("fedga", 0).to_dict(), "fedga") is None
    spec = load_recipe("emnist-iid", ["algorithm.name=fedavg"]).spec()
    assert papers_accuracy(spec.to_dict(), "fedavg") == [88.32, 0.06]


def test_a_correction_of_what_the_paper_says_does_not_make_another_experiment():
    recipe = Path("own.toml")
    text = '{rounds}\n[paper]\nsource = "table 7"\ntest_accuracy.fedga = {number}\n'

    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    recipe.write_text(text.format(rounds="rounds = 4", number=80.0))
    options = RunOptions(out="r", workers=0, progress=False, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        run_spec(load_recipe(str(recipe)).spec(), options, on_row=stop)
    recipe.write_text(text.format(rounds="rounds = 4", number=81.0))
    for _ in ("from the checkpoint", "once it is complete"):
        call("run", recipe, "--workers", 0, "--resume", "--out", "r")
    assert json.loads(Path("r/summary.json").read_text())["rounds"] == 4
    recipe.write_text(text.format(rounds="rounds = 4\nseed = 3", number=81.0))
    assert "seed (0 there, 3 now)" in call("run", recipe, "--resume", "--out", "r", code=2).stderr
    own = [{"task": {"name": "my:task", "paper": size}} for size in ("a4", "a5")]  # a setting, not what a paper says
    assert differing_fields(*own) == ["task.paper ('a4' there, 'a5' now)"]


def test_a_scaled_runs_spec_gives_the_same_run_again():
    call("run", "cifar10", *TINY, *FAST, "--out", "r")
    call("run", "r/spec.toml", "--workers", 0, "--out", "again")
    assert Path("again/model.safetensors").read_bytes() == Path("r/model.safetensors").read_bytes()
    assert Path("again/summary.json").read_text().count('"scale"') == 1


def test_comparisons_show_the_papers_numbers_beside_theirs():
    words = ("compare", "emnist-heterogeneous", *FAST, "--set", "scale.rounds=0.0006", "--seeds", 1, "--workers", 0)
    words = (*words, "--set", "measure.train_every=0")
    table = call(*words, "--out", "c").stdout
    assert "85.95 ± 0.56" in table
    assert "scaled to 1 of 1,500 rounds" in " ".join(table.split())
    assert "85.95" in Path("c/report.html").read_text()
    summary = json.loads(Path("c/summary.json").read_text())
    assert {row["name"]: row["paper_test_accuracy"] for row in summary["algorithms"]} == {
        "fedga": [85.95, 0.56],
        "scaffold": [84.67, 0.78],
        "fedavg": [82.9, 0.58],
        "fedprox": [83.197, 0.19],
    }
    spent = {row["name"]: row["communication_rounds"] for row in summary["algorithms"]}
    assert spent == {"fedga": 2, "scaffold": 2, "fedavg": 2, "fedprox": 2}, "all have the same communication"
    assert "table 1" in call("show", "c").stdout


TRIPS = {"fedga": 2, "scaffold": 2, "gradalign": 2, "fedavg": 1, "fedprox": 1, "largebatchsgd": 1}


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_compare_at_equal_communication(name):
    recipe = load_recipe(name)
    specs = [recipe.spec_for(entry, 0) for entry in recipe.compare.algorithms]
    settings = [spec.algorithm.given() for spec in specs]
    one_trip = [
        given.get("mean", "running" if given.get("beta") == "auto" else None) == "running" for given in settings
    ]
    spent = {
        spec.rounds * (1 if one else TRIPS[spec.algorithm.name]) for spec, one in zip(specs, one_trip, strict=True)
    }
    if name.startswith("cifar10-updates"):  # the paper's figure counts updates
        assert {spec.rounds for spec in specs} == {4000}
    else:
        assert spent == {recipe.spec().rounds * TRIPS[recipe.spec().algorithm.name]}


def test_a_comparison_says_on_what_terms_it_is():
    words = ("compare", "digits", "--algorithms", "fedga,fedavg", "--set", "rounds=2", "--set", "task.clients=5")
    words += ("--set", "clients.per_round=3", "--seeds", 1, "--workers", 0)
    fair = json.loads(call(*words, "--out", "fair", "--json").stdout)
    assert fair["terms"] == "at equal communication (4 rounds of it each)"
    assert "at equal communication" in " ".join(call("show", "fair").stdout.split())
    assert {row["name"]: row["settings"]["rounds"] for row in fair["algorithms"]} == {"fedga": 2, "fedavg": 4}
    same = json.loads(call(*words, "--set", "compare.equal=updates", "--out", "same", "--json").stdout)
    assert same["terms"] == "at equal updates (2 rounds, 2 to 4 rounds of communication)"
    wrong = call(*words, "--set", "compare.equal=money", "--out", "wrong", code=2).stderr
    assert "compare: equal: must be 'communication' or 'updates', got 'money'" in wrong


@pytest.mark.parametrize(
    ("recipe", "settings", "clients", "scaled"),
    [
        ("emnist-heterogeneous", ["scale=0.1"], [47], "scaled to 10 % of each client's examples"),
        (
            "emnist-iid",
            ["scale=0.5"],
            range(24, 47),  # half, and with four examples each a few more to have every class
            "scaled to 5 instead of 10 clients a round, 50 % of the clients, 50 % of each",
        ),
        ("emnist-iid", ["task.train_limit=94", "clients.per_round=2"], [47], ""),
    ],
)
def test_a_smaller_problem_keeps_its_classes_and_has_no_number_of_the_papers_beside_it(
    recipe, settings, clients, scaled
):
    words = [word for setting in (*settings, "rounds=1", "measure.train_every=0") for word in ("--set", setting)]
    once = ("--algorithms", "fedavg", "--seeds", 1, "--workers", 0)
    table = " ".join(call("compare", recipe, *words, *FAST, *once, "--out", "c").stdout.split())
    summary = json.loads(Path("c/summary.json").read_text())
    task = summary["task"]
    assert task["clients"] in clients
    assert (task["test_examples"], "classes" in task) == (47, False)
    held = json.loads(Path("c/fedavg/seed0/holdings.json").read_text())
    assert len(held["names"]) == 47
    assert all(map(sum, zip(*held["counts"], strict=True))), "somebody has each of the 47 classes"
    assert summary["rounds"] == 2, "a given number is meant so: FedAvg's two rounds spend what FedGA's one does"
    assert scaled in table
    assert "its numbers are left out here" in table
    assert "paper, %" not in table
    assert summary["algorithms"][0]["paper_test_accuracy"] is None
    page = Path("c/report.html").read_text()
    assert "its numbers are left out here" in page
    assert "ours − paper" not in page
    # Its spec, run again, is no more the paper's problem than it was.
    call("run", "c/fedavg/seed0/spec.toml", "--workers", 0, "--out", "again")
    assert json.loads(Path("again/summary.json").read_text())["paper"]["test_accuracy"] is None


def test_comparisons_draw_the_curves_a_recipe_asks_for():
    call("compare", "drift-cifar100", *TINY, *FAST, "--seeds", 1, "--algorithms", "fedga", "--out", "c")
    assert Path("c/curves.png").read_bytes().startswith(b"\x89PNG")
    message = call("compare", "digits", "--set", 'compare.curves=["colour"]', code=2).stderr
    assert "curves" in message


def test_every_entry_of_every_comparison_is_valid():
    for name in PAPERS:
        recipe = load_recipe(name)
        for entry in recipe.compare.algorithms:
            recipe.spec_for(entry, 0)
        assert set(recipe.spec().paper.test_accuracy) <= set(recipe.compare.algorithms)


def test_a_scale_works_on_rounds_clients_data_and_batches():
    data = {
        "rounds": 1000,
        "task": {"name": "emnist"},
        "clients": {"per_round": 10},
        "local": {"batch_size": 240},
        "measure": {"train_every": 50, "test_every": 0},
    }
    whole = validate(apply_scale(data | {"scale": 0.1}, "r"), "r")
    assert (whole.clients.per_round, whole.local.batch_size) == (10, 24), "one class each: nobody can go"
    data["task"]["partition"] = "iid"
    spec = validate(apply_scale(data | {"scale": 0.1}, "r"), "r")
    assert (spec.rounds, spec.clients.per_round, spec.local.batch_size) == (100, 2, 24)
    assert spec.task.options() == {"partition": "iid", "client_share": 0.1, "data_share": 0.1}
    assert (spec.measure.train_every, spec.measure.test_every) == (5, 0)
    assert (spec.full_size.rounds, spec.full_size.per_round) == (1000, 10)
    only_rounds = validate(apply_scale(data | {"scale": {"rounds": 0.5}}, "r"), "r")
    assert only_rounds.rounds == 500
    assert only_rounds.task.options() == {"partition": "iid"}
    assert only_rounds.local.batch_size == 240
    assert apply_scale(data, "r") == data
    own = lay_settings(data | {"scale": 0.1}, {"rounds": 30, "clients": {"per_round": 7}, "local": {"batch_size": 99}})
    exact = validate(apply_scale(own, "r"), "r")
    assert (exact.rounds, exact.clients.per_round, exact.local.batch_size) == (30, 7, 99)
    assert (exact.measure.train_every, exact.task.options()["data_share"]) == (50, 0.1)
    table = validate(apply_scale({"rounds": 50, "task": {"name": "table"}, "scale": 0.1}, "r"), "r")
    assert (table.rounds, table.task.options()) == (5, {}), "a table has no shares"
    for rounds in (0, True, 2.5, "many"):
        with pytest.raises(GradalignError, match=r"^r: rounds: must be"):
            apply_scale(data | {"rounds": rounds, "scale": 0.1}, "r")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scale=0", "scale: must be greater than 0"),
        ("scale=2", "scale: must be less than or equal to 1"),
        ("scale.rounds=fast", "scale: rounds: must be a valid number"),
        ("scale.epochs=0.5", "scale: epochs is not a known setting"),
        ("paper.test_accuracy=3", "paper.test_accuracy"),
    ],
)
def test_bad_scales_and_paper_tables(setting, message):
    result = call("run", "emnist-iid", "--set", setting, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_a_users_task_takes_the_place_of_the_recipes_own():
    Path("own_task.py").write_text(
        "import torch, gradalign\n"
        "def make(width=3):\n"
        "    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))\n"
        "    data = [(x[i::10], (x[i::10, 0] > 0).long()) for i in range(10)]\n"
        "    model = lambda: torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))\n"
        "    return gradalign.Task(name='own', model=model, clients=data, test=data[0])\n"
    )
    call("run", "digits", "--task", "own_task:make", "--set", "rounds=2", "--set", "task.width=4", "--out", "a")
    spec = json.loads(call("show", "a", "--json").stdout)["spec"]
    assert spec["task"] == {"name": "own_task:make", "width": 4}
    once = ("--algorithms", "fedavg", "--seeds", 1, "--set", "rounds=1", "--workers", 0)
    call("compare", "emnist-iid", "--task", "own_task:make", *once)
    summary = json.loads(Path("runs/compare-own_task-make/summary.json").read_text())
    assert summary["task"]["name"] == "own"
    assert summary["paper"] is None
    assert "cannot import" in call("run", "digits", "--task", "nowhere:make", code=2).stderr


def test_data_dir_names_the_folder(small_data, monkeypatch):
    monkeypatch.delenv("GRADALIGN_DATA")
    words = ("run", "cifar10", *TINY, *FAST)
    assert "CIFAR-10 is not in" in call(*words, code=2).stderr
    assert not list(Path("runs").glob("*/summary.json"))
    call(*words, "--data-dir", small_data, "--out", "r")
    assert str(small_data) not in Path("r/spec.toml").read_text()
    assert "does not exist" in call(*words, "--data-dir", "nowhere", code=2).stderr


def test_an_unknown_full_size_is_refused():
    with pytest.raises(GradalignError, match="full_size"):
        validate({"full_size": {"rounds": 0}}, "r")


@dataclass(frozen=True, kw_only=True)
class Dozing(ga.FedAvg):
    """An algorithm of one's own: its fields are its keys."""

    gamma: float = 0.5
    depth: int = 1
    deep: bool = False


def test_an_algorithms_fields_are_its_keys():
    table = {"name": "dozing+fedadam", "gamma": 2, "depth": 3, "deep": True}
    spec = validate({"algorithm": table, "server": {"lr": 1}}, "r")
    made = build_algorithm(spec.algorithm, spec.server)
    assert made.parts == (Dozing(gamma=2.0, depth=3, deep=True),)
    assert made.server == ga.FedAdam(lr=1.0)
    for wrong, sentence in (
        ({"depth": 1.5}, "algorithm.depth: must be a valid integer, got 1.5"),
        ({"deep": 1}, "algorithm.deep: must be a valid boolean, got 1.0"),
        ({"gamma": "much"}, "algorithm.gamma: must be a valid number, got 'much'"),
        ({"beta": 0.1}, r"algorithm.beta is set, but dozing\+fedadam has no such parameter"),
    ):
        spec = validate({"algorithm": table | wrong}, "r")
        with pytest.raises(GradalignError, match=sentence):
            build_algorithm(spec.algorithm, spec.server)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.bta=0.1", 'digits.toml: algorithm.bta is not a known setting; did you mean "beta"?'),
        ("server.tao=0.1", 'digits.toml: server.tao is not a known setting; did you mean "tau"?'),
        ("algorithm.parts.fedga.bet=1", 'algorithm.parts.fedga.bet is not a known setting; did you mean "beta"?'),
        ("algorithm.beta=[1]", "algorithm.beta: must be a number, a word, true, false or a schedule's table, got [1]"),
    ],
)
def test_keys_that_no_algorithm_has(setting, message):
    with pytest.raises(GradalignError, match=re.escape(message)):
        load_recipe("digits", [setting]).spec()
