"""What a recipe, one of its entries or the command line states is what every command runs."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from gradalign.cli.app import app
from gradalign.comparison import plan_comparison
from gradalign.errors import GradalignError
from gradalign.recipes import load_recipe, merge
from gradalign.recipes.names import require_used
from gradalign.reproduce.plan import Experiment
from gradalign.sweep.grid import parse_grid
from gradalign.sweep.plan import SweepPlan, plan_sweep
from gradalign.sweep.results import best_recipe
from gradalign.tasks.task import Task
from gradalign.theory.diagnose import diagnose

BARE = {
    "rounds": 8,
    "task": {"name": "digits", "clients": 6},
    "algorithm": {"name": "fedga"},
    "local": {"lr": 0.1, "steps": 2, "batch_size": 32},
}


class Zero(torch.nn.Linear):
    """A line through 0 that starts flat: the gradient of a squared error is −2 times its target."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        torch.nn.init.zeros_(self.weight)


WARMUP = {"kind": "warmup", "value": 0.1, "rounds": 4}


@pytest.fixture
def recipe(tmp_path):
    """A recipe of the tables above with changes over them, and with words of the command line."""

    def made(changes: dict, *words: str):
        file = tmp_path / "mine.toml"
        file.write_bytes(tomli_w.dumps(merge(BARE, changes)).encode())
        return load_recipe(str(file), words)

    return made


def planned(recipe, entry: str | None = None, *words: str) -> SweepPlan:
    return plan_sweep(recipe, entry, parse_grid(words), sampler="grid", trials=None, test_beta=False)


def test_a_comparison_counts_the_trips_of_the_default_beta(recipe):
    """FedGA() has one trip a round, so FedAvg has as many rounds, and fresh SCAFFOLD, with two, half of them."""
    mine = recipe({})
    assert [mine.spec_for(entry, 0).rounds for entry in ("fedga", "fedavg", "scaffold")] == [8, 8, 4]
    mine = recipe({"algorithm": {"beta": 0.1}})
    assert [mine.spec_for(entry, 0).rounds for entry in ("fedga", "fedavg", "scaffold")] == [8, 16, 8]


def test_the_default_beta_is_searched_where_the_recipe_has_values_of_it(recipe):
    assert "beta" not in planned(recipe({})).search.lists
    assert planned(recipe({"sweep": {"beta": [0.1, 1.0]}})).search.lists["beta"] == [0.1, 1.0]
    assert "beta" not in planned(recipe({"algorithm": {"beta": "auto"}, "sweep": {"beta": [0.1]}})).search.lists
    assert planned(recipe({}), None, "beta=.3").search.lists["beta"] == [0.3]
    assert 0.4 in planned(recipe({"algorithm": {"beta": 0.4}})).search.lists["beta"], (
        "the recipe's own beside the paper's"
    )


def test_a_sweeps_baseline_is_the_entry_without_its_alignment(recipe):
    local = {"optimizer": "adamw", "clip_norm": 5.0}
    entry = {
        "algorithm": {"name": "fedga", "beta": 0.2},
        "local": local,
        "clients": {"weights": "examples"},
        "rounds": 3,
    }
    mine = recipe({"compare": {"settings": {"mine": entry, "fedavg": {"local": {"clip_norm": 3.0}}}}})
    plan = planned(mine, "mine", "lr=.01", "batch=32", "K=2", "weight_decay=0", "beta=.1")
    ours, theirs = plan.spec("mine", {}), plan.spec("fedavg", {})
    assert theirs.algorithm.given() == {}
    assert theirs.clients.weights == "examples"
    assert theirs.local == ours.local.model_copy(update={"clip_norm": 3.0}), "what FedAvg states itself stands"
    assert (ours.rounds, theirs.rounds) == (3, 8), "rounds are not shared: the recipe's FedGA() has eight trips"
    rule = {"algorithm": {"name": "fedga+fedadam", "beta": 0.2}, "server": {"lr": 0.007}}
    plan = planned(recipe({"compare": {"settings": {"adam": rule}}}), "adam")
    assert plan.spec("fedadam", {}).server.given() == {"lr": 0.007}


def test_the_best_values_compare_what_the_trials_ran(recipe, tmp_path):
    """Schedules, what the command line set, and what other entries state."""
    settings = {"fedavg": {"local": {"clip_norm": 5.0}, "rounds": 3}, "fedprox": {"algorithm": {"mu": 0.7}}}
    tables = {"algorithm": {"beta": 0.2}, "local": {"lr": WARMUP}, "compare": {"settings": settings}}
    for words in ((), ("local.clip_norm=3.0", "rounds=6")):
        mine = recipe(tables, *words)
        plan = planned(mine)
        values, theirs = {"lr": 0.4, "K": 5, "beta": 0.3}, {"lr": 0.2, "K": 3}
        (tmp_path / "best.toml").write_bytes(tomli_w.dumps(best_recipe(plan, values, theirs)).encode())
        best = load_recipe(str(tmp_path / "best.toml"))
        for entry, point in (("fedga", values), ("fedavg", theirs)):
            trial, again = plan.spec(entry, point, test=True), best.spec_for(entry, 0)
            assert again.local == trial.local
            assert (again.algorithm, again.rounds) == (trial.algorithm, trial.rounds)
        assert again.local.lr.kind == "warmup"
        assert again.local.clip_norm == (3.0 if words else 5.0)
        assert again.rounds == (12 if words else 3)
        assert best.spec_for("fedprox", 0).algorithm.given() == {"mu": 0.7}


def test_parts_have_the_last_word_and_keep_it(recipe):
    parts = {"algorithm": {"name": "fedga+fedinit", "parts": {"fedga": {"beta": 0.4}, "fedinit": {"beta": 0.03}}}}
    mine = recipe(parts)
    for entry, beta in (("fedga", 0.4), ("fedinit", 0.03)):
        assert mine.spec_for(entry, 0).algorithm.parts[entry].given() == {"beta": beta}
    assert mine.spec_for("fedavg", 0).algorithm.parts is None
    plan = planned(mine, None, "beta=.1,.2")
    tried = plan.spec("fedga+fedinit", {"beta": 0.1}).algorithm
    assert {name: part.given()["beta"] for name, part in tried.parts.items()} == {"fedga": 0.1, "fedinit": 0.03}
    assert plan.spec("fedinit", {}).algorithm.parts["fedinit"].given() == {"beta": 0.03}, "the baseline's, too"
    auto = recipe(merge(parts, {"algorithm": {"parts": {"fedga": {"beta": "auto"}}}}))
    assert "beta" not in planned(auto).search.lists
    with pytest.raises(GradalignError, match=r"say --set algorithm\.parts\.fedga\.beta"):
        recipe(parts, "algorithm.beta=5").spec()
    changed = recipe(parts, "algorithm.parts.fedga.beta=5").spec().algorithm
    assert changed.parts["fedga"].given() == {"beta": 5}
    with pytest.raises(GradalignError, match="has no such part"):
        planned(recipe({"algorithm": {"parts": {"fedgo": {"beta": 1.0}}}}))


def test_only_the_aligned_parts_beta_is_searched(recipe):
    """FedInit's has the same name and is another thing."""
    mine = recipe({"algorithm": {"name": "fedga+fedinit", "beta": 0.4, "parts": {"fedinit": {"beta": 0.03}}}})
    tried = planned(mine, None, "beta=.1").spec("fedga+fedinit", {"beta": 0.1}).algorithm
    assert (tried.given()["beta"], tried.parts["fedinit"].given()["beta"]) == (0.1, 0.03)
    changed = recipe(mine.data, "algorithm.beta=0.1").spec().algorithm
    assert (changed.given()["beta"], changed.parts["fedinit"].given()["beta"]) == (0.1, 0.03)
    auto = recipe({"algorithm": {"name": "fedga+fedinit", "parts": {"fedinit": {"beta": 0.03}}}})
    assert "beta" not in planned(auto).search.lists
    alone = recipe({"algorithm": {"name": "fedinit", "parts": {"fedinit": {"beta": 0.03}}}})
    assert planned(alone).search.lists["beta"] == [0.01, 0.03, 0.1, 1.0, 5.0]
    assert planned(alone).spec("fedinit", {"beta": 0.1}).algorithm.parts["fedinit"].given() == {"beta": 0.1}


def test_the_best_values_stand_whatever_the_entries_are_called(recipe, tmp_path):
    settings = {"FedGA": {"local": {"lr": 0.01}}, "fedavg": {"precision": "bf16"}}
    plan = planned(recipe({"algorithm": {"beta": 0.2}, "compare": {"settings": settings}}))
    (tmp_path / "best.toml").write_bytes(
        tomli_w.dumps(best_recipe(plan, {"lr": 0.3, "beta": 0.1}, {"lr": 0.4})).encode()
    )
    best = load_recipe(str(tmp_path / "best.toml"))
    assert [best.spec_for(entry, 0).local.lr for entry in ("fedga", "fedavg")] == [0.3, 0.4]
    assert best.spec_for("fedavg", 0).precision == "bf16"


def test_schedules_of_a_sweeps_baseline_take_the_same_share_of_its_run(recipe, tmp_path):
    """In rounds, 4 of 8: whatever the entry's own rounds are, and again when its best values are compared."""
    entries = {
        "running": {"algorithm": {"name": "fedga", "mean": "running", "beta": 0.1}},
        "short": {"algorithm": {"name": "fedga", "beta": 0.1}, "rounds": 4, "local": {"lr": WARMUP | {"rounds": 2}}},
    }
    mine = recipe({"algorithm": {"beta": 0.2}, "local": {"lr": WARMUP}, "compare": {"settings": entries}})
    for entry in entries:
        plan = planned(mine, entry)
        trial = plan.spec("fedavg", {}, test=True)
        assert (trial.local.lr.rounds, trial.rounds) == (8, 16), entry
        (tmp_path / "best.toml").write_bytes(tomli_w.dumps(best_recipe(plan, {"lr": 0.3}, {"lr": 0.4})).encode())
        again = load_recipe(str(tmp_path / "best.toml")).spec_for("fedavg", 0)
        assert 2 * again.local.lr.rounds == again.rounds, entry


def test_a_baselines_own_rule_and_schedule_stand_over_the_entrys(recipe):
    cosine = {"kind": "cosine", "value": 0.1, "end": 0.01}
    entry = {
        "algorithm": {"name": "fedga+fedadam", "beta": 0.1},
        "server": {"fedadam": {"lr": 0.01}},
        "local": {"lr": cosine},
    }
    theirs = {"server": {"lr": 0.5}, "local": {"lr": WARMUP}}
    plan = planned(recipe({"compare": {"settings": {"mine": entry, "fedadam": theirs}}}), "mine")
    spec = plan.spec("fedadam", {})
    assert spec.server.given() == {"lr": 0.5}
    assert spec.local.lr.kind == "warmup"


def test_values_are_listed_in_the_same_order_in_every_process(recipe):
    lists = planned(recipe({"algorithm": {"name": "fedprox+fedsam"}})).search.lists
    assert list(lists)[-2:] == ["mu", "rho"]


def test_a_number_on_the_command_line_is_not_for_an_entry_that_is_auto():
    digits = load_recipe("digits", ["algorithm.beta=0.1"])
    assert digits.spec_for("fedga-auto", 0).algorithm.given()["beta"] == "auto"
    assert digits.spec_for("fedga-running", 0).algorithm.given()["beta"] == 0.1
    require_used(digits, ["fedga-auto", "fedga"])
    require_used(load_recipe("digits", ["algorithm.beta=auto"]), ["fedga-auto"])
    with pytest.raises(GradalignError, match=r"--set algorithm\.beta: none of fedga-auto has a beta but \"auto\""):
        require_used(digits, ["fedga-auto"])


def test_what_is_set_is_not_searched_unasked(recipe):
    sweep = {"sweep": {"lr": [0.1, 0.2], "K": [5], "beta": [0.1], "beta_schedule": ["constant", "cosine"]}}
    entries = {
        "one step": {"algorithm": {"name": "fedavg"}, "local": {"steps": 1}},
        "late": {"algorithm": {"name": "fedga", "beta": {"kind": "off-until", "value": 0.1, "share": 0.5}}},
    }
    mine = recipe(sweep | {"compare": {"settings": entries}})
    assert planned(mine, "one step").search.lists["K"] == [1]
    assert planned(mine, "one step", "K=3,4").search.lists["K"] == [3, 4]
    assert planned(mine, "one step", "epochs=1").search.lists["epochs"] == [1]
    assert "beta_schedule" not in planned(mine, "late").search.lists
    lists = planned(recipe(sweep, "local.lr=0.07", "local.steps=3", "algorithm.beta=0.4")).search.lists
    assert [lists[name] for name in ("lr", "K", "beta", "beta_fine")] == [[0.07], [3], [0.4], [0.4]]
    assert "beta_fine" not in planned(recipe(sweep, "algorithm.beta=0.4"), None, "beta=.01,.02").search.lists
    entry = {"algorithm": {"name": "fedavg"}, "clients": {"holdout": 0.3}}
    assert planned(recipe({"compare": {"settings": {"mine": entry}}}), "mine").holdout == 0.3


def test_trials_have_batches_of_the_recipes_scale(recipe):
    mine = recipe({"scale": {"data": 0.5}})
    plan = planned(mine, "fedavg")
    assert plan.search.lists["batch"] == [32, "whole"]
    assert plan.spec("fedavg", {"batch": 32}).local.batch_size == mine.spec_for("fedavg", 0).local.batch_size == 16


def test_a_recipes_holdout_is_that_of_its_sweep(recipe):
    assert planned(recipe({})).holdout == 0.1
    assert planned(recipe({"clients": {"holdout": 0.3}})).holdout == 0.3
    assert planned(recipe({"clients": {"holdout": 0.3}, "sweep": {"holdout": 0.2}})).holdout == 0.2


@pytest.mark.parametrize("name", ["fedprox", "FedProx", "Fed-Prox"])
def test_an_entrys_settings_are_found_however_its_name_is_spelled(name):
    assert load_recipe("digits").spec_for(name, 0).algorithm.given() == {"mu": 0.1}


def test_a_reproduction_keeps_the_schedules_of_its_recipe(recipe, tmp_path):
    beta = {"kind": "off-until", "value": 0.1, "share": 0.5}
    recipe({"local": {"lr": WARMUP}, "algorithm": {"beta": beta}})
    plan = {"name": "x", "title": "x", "recipe": str(tmp_path / "mine.toml"), "algorithms": [["fedga", "fedavg"]]}
    one = Experiment.model_validate(plan | {"scales": {"small": {"budget": 24}}})
    chosen = {"fedga": {"lr": 0.2, "beta": 0.3}, "fedavg": {"lr": 0.4}}
    made = one.recipe_at("small", chosen)
    ours, theirs = made.spec_for("fedga", 0), made.spec_for("fedavg", 0)
    assert (ours.algorithm.given()["beta"].kind, ours.algorithm.given()["beta"].value) == ("off-until", 0.3)
    assert (ours.local.lr.kind, ours.local.lr.value) == ("warmup", 0.2)
    assert (theirs.local.lr.kind, theirs.local.lr.value) == ("warmup", 0.4)
    assert theirs.local.lr.rounds == 12, "half of the run, as in the recipe"


def test_the_shipped_recipes_are_as_they_were():
    """None of them is without a β where its algorithm has one, so that none's rounds have changed."""
    for path in Path(load_recipe.__code__.co_filename).parent.glob("*.toml"):
        algorithm = tomllib.loads(path.read_text()).get("algorithm", {})
        assert algorithm.get("name", "fedga") not in ("fedga", "gradalign") or "beta" in algorithm, path.name


def test_a_parameter_is_shared_by_those_who_mean_the_same_by_it(recipe):
    """FedInit's β and FedCM's α have other meanings than FedGA's and FedDyn's; GradAlign's β is FedGA's."""
    mine = recipe({"algorithm": {"beta": 0.2}})
    given = {entry: mine.spec_for(entry, 0).algorithm.given() for entry in ("fedga", "fedga+fedprox", "fedinit")}
    assert given == {"fedga": {"beta": 0.2}, "fedga+fedprox": {"beta": 0.2}, "fedinit": {}}
    assert recipe({"algorithm": {"beta": 0.2}, "local": {"steps": 1}}).spec_for("gradalign", 0).algorithm.given() == {
        "beta": 0.2
    }
    dyn = recipe({"algorithm": {"name": "feddyn", "alpha": 0.03}})
    assert [dyn.spec_for(entry, 0).algorithm.given() for entry in ("feddyn", "fedcm")] == [{"alpha": 0.03}, {}]
    said = recipe({}, "algorithm.beta=0.3")
    assert said.spec_for("fedinit", 0).algorithm.given() == {"beta": 0.3}, "who says it on the command line means all"
    own = recipe({"compare": {"settings": {"fedinit": {"algorithm": {"beta": 0.05}}}}})
    assert own.spec_for("fedinit", 0).algorithm.given() == {"beta": 0.05}


def test_a_servers_step_size_of_the_command_line_is_held(recipe):
    words = "server.fedadam.lr=0.02"
    changes = {"algorithm": {"name": "fedadam"}, "sweep": {"server_lr": [0.1, 1.0]}}
    assert planned(recipe(changes)).search.lists["server_lr"] == [0.1, 1.0]
    assert planned(recipe(changes, words)).search.lists["server_lr"] == [0.02]
    assert planned(recipe(changes, words), None, "server_lr=.5").search.lists["server_lr"] == [0.5]


def test_one_entry_in_two_spellings_is_refused(recipe, tmp_path):
    with pytest.raises(GradalignError, match="names the same algorithm twice"):
        plan_comparison(recipe({}), ["fedavg", "Fed-Avg"], 1, tmp_path, check=False)
    two = recipe({"compare": {"settings": {"lr 1": {"algorithm": {"name": "fedavg"}}, "lr-1": {"local": {"lr": 1.0}}}}})
    two.compare.settings["lr-1"]["algorithm"] = {"name": "fedavg"}
    assert len(plan_comparison(two, ["lr 1", "lr-1"], 1, tmp_path, check=False)) == 2, "names of two variants"


@pytest.mark.parametrize(
    "stated",
    [
        {"entries": {"fedavg": {"rounds": 3}}},
        {"entries": {"fedavg": {"measure": {"test_every": 1}}}},
        {"settings": {"rounds": 3}},
        {"scales": {"small": {"budget": 4, "settings": {"measure": {"train_every": 2}}}}},
    ],
)
def test_a_list_of_experiments_states_lengths_once(stated):
    plain = {"name": "mine", "title": "", "recipe": "digits", "algorithms": [["fedavg"]]}
    tables = plain | {"scales": {"small": {"budget": 4}}} | stated
    with pytest.raises(GradalignError, match=r"mine: .* sets rounds, test_every or train_every, which the budget"):
        Experiment(**tables).recipe_at("small", {})


def test_a_diagnosis_takes_the_recipes_device_and_weights(monkeypatch, tmp_path):
    """By hand: of gradients (1, 3) with shares ¼ and ¾ the mean is 2.5, r = ½(¼·1.5² + ¾·0.5²) = 0.375."""
    seen = {}

    def measure(task, **how):
        seen.update(how)
        raise GradalignError("seen")

    monkeypatch.setattr("gradalign.theory.diagnose.diagnose", measure)
    file = tmp_path / "mine.toml"
    file.write_bytes(tomli_w.dumps(BARE | {"device": "meta", "clients": {"weights": "examples"}}).encode())
    monkeypatch.setattr("gradalign.client.trainer.check_device", lambda device: device)
    for words, device in (([], "meta"), (["--device", "cpu"], "cpu")):
        CliRunner().invoke(app, ["diagnose", str(file), *words])
        assert (seen["device"], seen["weights"]) == (device, "examples")
    monkeypatch.undo()
    data = [torch.full((n, 1), 1.0) for n in (2, 6)]
    targets = [torch.full((2, 1), -0.5), torch.full((6, 1), -1.5)]
    task = Task(model=Zero(), clients=list(zip(data, targets, strict=True)), loss=torch.nn.functional.mse_loss)
    assert diagnose(task, weights="examples").r == pytest.approx(0.375)
    assert diagnose(task).r == pytest.approx(0.5), "½·1², both one away from 2"
