"""The paper's experiments as one list: the plan, what is left of it, and a small list from beginning to end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

import pytest
import tomli_w
from scipy import stats

from gradalign.comparison import Planned
from gradalign.errors import GradalignError
from gradalign.recipes import load_recipe
from gradalign.recipes.build import build_algorithm
from gradalign.recipes.papers import papers_accuracy
from gradalign.report.statistics import difference
from gradalign.reproduce.conduct import Reproduction
from gradalign.reproduce.outcome import time_left, verdict_table, verdict_words
from gradalign.reproduce.plan import SEARCH_SEED, Chosen, Experiment, read_plan
from gradalign.reproduce.verdicts import Claim, beside_baseline, judge
from gradalign.runs import is_shorter
from gradalign.runs.locks import locked
from gradalign.runs.metrics import read_metrics
from gradalign.runs.untrusted import read_table
from gradalign.server.runner import RunOptions
from gradalign.sweep.protocol import Search
from run_folders import rows_of, write_run
from test_cli import call

# The plan


@pytest.mark.parametrize("scale", ["small", "medium", "paper"])
def test_every_experiment_has_its_runs_at_equal_cost(scale, tmp_path):
    experiments = read_plan()
    work = Reproduction(experiments=experiments, scale=scale, folder=tmp_path, options=RunOptions(), say=print)
    for one in experiments:
        own = one.at(scale)
        planned = work.planned(one, {}, check=False)
        assert len(planned) == own.seeds * len(one.entry_names())
        assert SEARCH_SEED not in {run.seed for run in planned}
        lengths = {run.entry: run.spec.rounds for run in planned}
        for spec in (run.spec for run in planned if run.seed == 0):
            algorithm = build_algorithm(spec.algorithm, spec.server).over(spec.rounds)
            aligned = sum(algorithm.at(index).needs_gradients for index in range(spec.rounds))
            each = {"communication": 2, "rounds": 1, "steps": spec.local.steps}[one.equal]
            cost = spec.rounds + aligned if one.equal == "communication" else spec.rounds * each
            assert own.budget - each < cost <= own.budget
        for run in planned:
            assert run.spec.rounds == lengths[run.entry]
            assert (run.spec.paper is not None) == one.papers_setting
            # Its column has the numbers of the paper's own algorithms, and of no other.
            number = papers_accuracy(run.spec.to_dict(), run.entry)
            assert (number is not None) == (one.papers_setting and run.entry != "fedga-auto")
        assert one.provenance
        assert one.claims
    assert list(tmp_path.iterdir()) == []


def test_the_waves_come_in_the_order_of_their_worth(tmp_path):
    one = next(one for one in read_plan() if one.name == "emnist-one-class-k10")
    work = Reproduction(experiments=[one], scale="small", folder=tmp_path, options=RunOptions(), say=print)
    order = [(run.entry, run.seed) for run in work.planned(one, {}, check=False)]
    assert order[:4] == [("fedga", 0), ("fedavg", 0), ("fedga", 1), ("fedavg", 1)]
    assert [entry for entry, _ in order[6:]] == ["scaffold", "fedprox"] * 3 + ["fedga-auto"] * 3


def test_claims_say_whose_they_are():
    claims = [(one.name, claim) for one in read_plan() for claim in one.claims]
    assert not any(claim.papers for _, claim in claims if "not in the paper" in claim.text)
    for _, claim in claims:  # what is said of ends waits for them; speed does not
        of_ends = " ends " in claim.text or " end " in claim.text or "keeps the accuracy" in claim.text
        of_ends = of_ends or claim.metric in ("test_loss", "train_accuracy")  # of the same runs at the same moment
        assert claim.settled == of_ends, claim.text
    # The paper compares accuracies at equal communication, but on Shakespeare, of K and of large batches.
    updates = {name for name, claim in claims if claim.papers and claim.at in ("updates", "rounds")}
    assert updates == {"shakespeare", "emnist-local-steps", "cifar10-updates"}


def with_late_alignment() -> Experiment:
    """Return the forms on CIFAR-100 with one more: the paper's FedGA in the second half of the rounds."""
    forms = next(one for one in read_plan() if one.name == "forms-cifar100")
    late = {"algorithm": {"name": "fedga", "beta": {"kind": "off-until", "value": 0.05, "share": 0.5}}}
    entries, names = {**forms.entries, "fedga-late": late}, [*forms.algorithms, ["fedga-late"]]
    return forms.model_copy(update={"entries": entries, "algorithms": names})


def test_chosen_values_go_where_they_belong():
    one = next(one for one in read_plan() if one.name == "emnist-one-class")
    recipe = one.recipe_at("small", {"fedprox": {"lr": 0.3, "mu": 0.7, "K": 4}})
    spec = recipe.spec_for("fedprox", 1)
    assert (spec.local.lr, spec.local.steps, spec.algorithm.given()) == (0.3, 4, {"mu": 0.7})
    assert recipe.spec_for("fedavg", 1).local.lr == 0.05
    late = (
        with_late_alignment()
        .recipe_at("small", {"fedga-late": {"beta": 0.7}})
        .spec_for("fedga-late", 0)
        .algorithm.given()["beta"]
    )
    assert (late.kind, late.value, late.share) == ("off-until", 0.7, 0.5)  # a schedule keeps its form


def test_what_is_not_searched_has_the_bases_values():
    plan = {one.name: one for one in read_plan()}
    recipe = plan["digits-iid"].recipe_at("small", {"fedavg": {"lr": 0.7, "K": 3}, "fedga": {"lr": 0.6}})
    lrs = [recipe.spec_for(entry, 0).local.lr for entry in ("fedavg", "fedga-auto", "fedga-fresh-auto", "fedga")]
    assert lrs == [0.7, 0.7, 0.7, 0.6]
    assert recipe.spec_for("fedga-auto", 0).local.steps == 3
    known = {"largebatchsgd": {"lr": 0.7, "K": 1, "batch": 60}}
    small = plan["large-batch-emnist"].recipe_at("small", known).spec_for("small-batch", 0).local
    assert (small.lr, small.steps, small.batch_size) == (0.7, 8, 125)  # what an entry fixes stays its own


TUNED = [(one, scale) for one in read_plan() for scale in one.scales if one.at(scale).tune]


@pytest.mark.parametrize(("experiment", "scale"), TUNED, ids=lambda part: getattr(part, "name", part))
def test_what_an_entry_fixes_is_not_the_baselines_choice(experiment, scale):
    """In the recipe's comparison or in the plan: K = 20 stays 20 when 10 was chosen for the entry others follow."""
    base = experiment.at(scale).tune.base
    recipe = experiment.recipe_at(scale, {base: {"K": 7, "lr": 0.123, "weight_decay": 0.321}})
    theirs = load_recipe(experiment.recipe).compare.settings
    for entry in experiment.entry_names():
        local = recipe.spec_for(entry, 0).local
        given = [theirs.get(entry, {}), experiment.entries.get(entry, {})]
        steps = [7, *(table["local"]["steps"] for table in given if "steps" in table.get("local", {}))]
        assert local.steps == (7 if entry == base else steps[-1]), entry
        assert (local.lr, local.weight_decay) == (0.123, 0.321)


def test_the_curve_over_local_steps_has_four_lengths():
    """One round is K steps of every client, and all entries have the same number of steps."""
    one = next(one for one in read_plan() if one.name == "emnist-local-steps")
    recipe = one.recipe_at("medium", {"K=10": {"K": 10, "lr": 0.4}, "K=20": {"K": 20, "lr": 0.2}})
    specs = {entry: recipe.spec_for(entry, 0) for entry in one.entry_names()}
    assert {entry: (spec.local.steps, spec.rounds) for entry, spec in specs.items()} == {
        "K=1": (1, 800), "K=10": (10, 80), "K=20": (20, 40), "K=40": (40, 20),
    }  # fmt: skip
    assert [spec.local.lr for spec in specs.values()] == [0.4, 0.4, 0.2, 0.4]


def test_late_alignment_spends_the_whole_budget():
    recipe = with_late_alignment().recipe_at("small", {}, 100)
    assert recipe.spec_for("fedga-late", 0).rounds == 67  # the last 33 of them communicate twice: 100 in all
    assert recipe.spec_for("fedga-running", 0).rounds == 100


def test_beta_belongs_to_the_grid_of_an_algorithm_without_a_baseline():
    lists = {"lr": [0.1, 0.2], "beta": [0.1, 0.3], "beta_fine": [0.2]}
    assert list(Search(entry="fedinit", baseline=None, lists=lists).others) == ["lr", "beta"]
    assert list(Search(entry="fedga", baseline="fedavg", lists=lists).others) == ["lr"]


# What is left


def test_the_time_left_does_not_take_a_runs_start_for_a_round(tmp_path):
    """Five seconds of starting and first measuring, then half a second a round: eight are left."""
    spec = read_plan()[0].recipe_at("small", {}).spec_for("fedavg", 0).model_copy(update={"rounds": 12})
    rows = [{**row, "seconds": 5 + row["seconds"]} for row in rows_of(0.8)]
    write_run(tmp_path / "run", spec.to_dict(), summary=None, metrics="".join(json.dumps(row) + "\n" for row in rows))
    one = Planned(entry="fedavg", seed=0, spec=spec, folder=tmp_path / "run")
    assert time_left([one]) == "1 of 1 runs left, about 0:00:04 at the speed so far"


def test_the_time_left_follows_the_rounds_that_are_done(tmp_path):
    def planned(entry: str, seed: int, rounds: int) -> Planned:
        spec = next(iter(read_plan())).recipe_at("small", {}).spec_for("fedavg", seed)
        return Planned(
            entry=entry,
            seed=seed,
            spec=spec.model_copy(update={"rounds": rounds}),
            folder=tmp_path / entry / f"seed{seed}",
        )

    runs = [planned("fedavg", 0, 4), planned("fedavg", 1, 10), planned("fedga", 0, 20)]
    assert time_left(runs) == "3 of 3 runs left; how long a round takes is not known yet"
    avg0, avg1, ga0 = (run.spec.to_dict() for run in runs)
    write_run(tmp_path / "fedavg" / "seed0", avg0)  # four rounds in two seconds
    left = "2 of 3 runs left, about 0:00:10 at the speed so far (fedga counted like the slowest measured)"
    assert time_left(runs) == left
    # Of FedGA's run alone: as long as FedAvg's longest, ten rounds of half a second.
    assert time_left(runs, runs[2:]) == left.replace("2 of 3", "1 of 1").replace("0:00:10", "0:00:05")
    write_run(tmp_path / "fedga" / "seed0", ga0, summary=None)  # 16 of 20 rounds are left of it
    assert time_left(runs) == "2 of 3 runs left, about 0:00:13 at the speed so far"
    assert time_left(runs, runs[2:]) == "1 of 1 runs left, about 0:00:08 at the speed so far"
    write_run(
        tmp_path / "fedavg" / "seed1",
        avg1,
        summary=None,
        failure=json.dumps({"failure": "NaN", "diverged": True}),
    )
    assert time_left(runs).startswith("1 of 3 runs left, about 0:00:08")
    longer = [planned("fedavg", 0, 6), *runs[1:]]  # the four rounds that are there go on
    (tmp_path / "fedavg" / "seed0" / "checkpoint.safetensors").touch()
    assert time_left(longer) == "2 of 3 runs left, about 0:00:09 at the speed so far"
    shorter = [planned("fedavg", 0, 3), *runs[1:]]  # what lies there, of four rounds, is not what is planned now
    words = "2 of 3 runs left (1 in whose place there is one with other settings), about 0:00:10 at the speed so far"
    assert time_left(shorter) == words
    assert time_left(shorter, shorter[1:2]).startswith("0 of 1 runs left")


# Tables


def run_of(accuracies: list[float], *, updates: int, sent: int, examples: int) -> list[dict[str, float]]:
    """Return a run's rows, measured after every communication, each of which costs the same."""
    costs = {"local_updates": updates, "bytes": sent, "examples": examples, "communication_rounds": 1, "round": 1}
    return [
        {"test_accuracy": accuracy, **{key: n * cost for key, cost in costs.items()}}
        for n, accuracy in enumerate(accuracies, start=1)
    ]


def test_entries_stand_beside_the_baseline_at_every_equal_cost():
    cheap = [run_of([0.1, 0.2, 0.3, level], updates=5, sent=10, examples=50) for level in (0.40, 0.44)]
    dear = [run_of([0.2, 0.3, 0.4, level], updates=5, sent=20, examples=100) for level in (0.50, 0.54)]
    nobody: list[list[dict[str, float]]] = []
    first, second = beside_baseline({"dear": dear, "none": nobody, "cheap": cheap}, "cheap")
    assert (first["name"], first["difference"]) == ("cheap", {})
    assert first["scores"] == pytest.approx([40, 44])
    assert first["spent"] == dict.fromkeys(("communication", "updates", "bytes", "computation"), 1.0)
    assert second["spent"] == {"communication": 1.0, "updates": 1.0, "bytes": 2.0, "computation": 2.0}
    # For the bytes and examples that "cheap" has spent, "dear" comes to its second measurement: 30 in both runs.
    values = {at: one["value"] for at, one in second["difference"].items()}
    assert values == pytest.approx({"communication": 10.0, "updates": 10.0, "bytes": -12.0, "computation": -12.0})
    # Student's t of two runs with variance 8 each: 4.3027 · √(8/2 + 8/2); of one side without spread 12.7062 · √(8/2).
    assert second["difference"]["communication"]["margin"] == pytest.approx(4.30265 * 8**0.5, rel=1e-4)
    assert second["difference"]["bytes"]["margin"] == pytest.approx(12.7062 * 2, rel=1e-4)


def test_the_baseline_is_what_the_others_are_measured_by():
    plan = {one.name: one.baseline for one in read_plan()}
    assert {plan[name] for name in ("emnist-one-class", "anchor-dirichlet", "forms-cifar10")} == {"fedavg"}
    assert (plan["large-batch-emnist"], plan["emnist-local-steps"], plan["emnist-beta"]) == (
        "largebatchsgd",
        "K=10",
        "beta 0.01",
    )


# Words


def row_of(verdict: str, *, papers: bool, **changes: object) -> dict[str, object]:
    numbers = {"first_scores": [50.0, 51.0], "second_scores": [40.0, 41.0], "difference": 10.0, "margin": 3.0}
    about = {"text": f"{verdict}, {papers}", "at": "rounds", "second": "fedavg", "why": "so", "papers": papers}
    return {**numbers, **about, "verdict": verdict, **changes}


def test_the_papers_claims_come_first_and_others_hold_or_do_not():
    rows = [row_of("reproduced", papers=False), row_of("not reproduced", papers=False), row_of("pending", papers=False)]
    rows += [row_of("reproduced", papers=True), row_of("pending", papers=True, second=0.01, second_scores=[])]
    table = verdict_table([{"name": "one", "verdicts": rows}])[1:]
    assert [line[4] for line in table] == ["reproduced", "pending", "holds", "does not hold", "pending"]
    assert [line[3] for line in table[:2]] == ["+10 ± 3 (2 and 2 runs)", "+10 ± 3 (2 runs)"]


def test_the_verdicts_begin_with_what_came_out():
    one = read_plan()[0].model_copy(update={"claims": [Claim(text="", first="a", second="b", at="rounds")] * 50})
    ours = Claim(text="", first="a", second="b", at="rounds", papers=False)
    others = [one, one.model_copy(update={"claims": [ours] * 9})]
    rows = [row_of(verdict, papers=True) for verdict in ("reproduced", "not reproduced", "undecidable", "pending")] * 4
    rows += [row_of("reproduced", papers=False)] * 7
    entries = [
        {"seeds": [0, 1]},
        {"seeds": [0, 1, 2], "chosen": {"source": "on a tenth, not trained on"}},
        {"seeds": []},
    ]
    words = verdict_words("small", [{"verdicts": rows, "algorithms": entries}], others)
    chosen = "with up to 3 seeds; in 1 of them settings were chosen on validation examples, not on the test images"
    assert words.startswith(f"Scale small; experiments: 1, {chosen} that decide here. Of 50 claims of the paper: ")
    by_hand = verdict_words("small", [{"verdicts": rows, "algorithms": entries[::2]}], others)
    assert "in 0 of them settings were chosen on validation" in by_hand
    # 12 of the 50 are judged; of 19 with the others, a twentieth is about one.
    assert "of the paper: 4 reproduced, 4 not reproduced, 4 undecidable, 38 pending." in words
    assert "Of the 19 claims judged at 95 %, the paper's and others, about 1 would" in words


# A whole list

TINY = {
    "experiment": [
        {
            "name": "tiny",
            "title": "digits",
            "recipe": "digits",
            "algorithms": [["fedga", "fedavg"], ["fedprox"]],
            "provenance": {"everything": "our choice"},
            "settings": {"task": {"clients": 6}, "clients": {"per_round": 3}},
            "claims": [{"text": "FedGA above FedAvg", "first": "fedga", "second": "fedavg", "at": "communication"}],
            "scales": {
                "small": {
                    "budget": 8,
                    "seeds": 2,
                    "tune": {
                        "budget": 4,
                        "lists": {
                            "fedga": {"lr": [0.05, 0.2], "beta": [0.1], "beta_fine": [0.1]},
                            "fedprox": {"mu": [0.1]},
                        },
                    },
                }
            },
        },
        {
            "name": "taken",
            "title": "digits with the same settings",
            "recipe": "digits",
            "algorithms": [["no alignment"]],
            "settings_from": "tiny",
            "settings": {"task": {"clients": 6}, "clients": {"per_round": 3}},
            "entries": {"no alignment": {"algorithm": {"name": "fedga", "beta": 0.0}}},
            "claims": [
                {"text": "β = 0 is FedAvg", "first": "no alignment", "second": "tiny/fedavg", "at": "communication"}
            ],
            "scales": {"small": {"budget": 8, "seeds": 2, "hours": 0.5}},
        },
    ]
}


@pytest.fixture
def _tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_bytes(tomli_w.dumps(TINY).encode())


# The first experiment has 4 of its 6 runs, the second none of its 2; it takes half an hour by its own account.
LAST_LINE = "in all: 4 of 8 runs left; the plan is about 0.5 hours of one core, "
LAST_LINE += "not counting 1 of 2 experiments whose time is not known"
WORDS = ("reproduce", "--plan", "tiny.toml", "--out", "out", "--workers", "0")


def stamps() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path("out").rglob("summary.json")}


@pytest.mark.usefixtures("_tiny")
def test_a_list_goes_on_after_kill_9_and_ends_in_verdicts():
    process = subprocess.Popen([sys.executable, "-m", "gradalign", *WORDS], stderr=subprocess.DEVNULL)
    first = Path("out/tiny/runs/fedga/seed0/summary.json")
    while not first.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = stamps()
    assert first.exists()
    assert len(done) < 8

    call(*WORDS, "tiny", "--only", "fedga,fedavg", "--seeds", "1")
    assert not Path("out/tiny/runs/fedavg/seed1").exists()
    call(*WORDS, "tiny", "--only", "fedga,fedavg")
    assert {path: stamp for path, stamp in stamps().items() if path in done} == done  # what is done is left alone
    assert not Path("out/tiny/runs/fedprox").exists()
    assert call(*WORDS, "--list").stdout.splitlines()[-1] == LAST_LINE
    state = json.loads(call(*WORDS, "--list", "--json").stdout)
    assert [one["settings_to_choose"] for one in state] == [["fedprox"], []]
    assert state[0]["left"].startswith("2 of 6 runs left, about 0:00:0")
    asked = json.loads(call(*WORDS, "--list", "--only", "fedprox", "--seeds", "1", "--json").stdout)
    assert [(one["name"], one["left"].partition(",")[0], one["core_hours"]) for one in asked] == [
        ("tiny", "1 of 1 runs left", None)  # the plan's hours are those of all its runs
    ]
    assert asked[0]["settings_to_choose"] == ["fedprox"]
    only = call(*WORDS, "--list", "--only", "fedavg").stdout
    assert "settings to choose" not in only, "FedAvg's are chosen"
    assert only.splitlines()[-1] == "in all: 0 of 2 runs left", only

    rest = call(*WORDS, "--json")
    assert re.search(r"\(8 of 8 rounds\) after \d+ s: fedprox", rest.stderr), "a log tells how far a run is"
    results = json.loads(rest.stdout)
    assert results == json.loads(Path("out/results.json").read_text()) | {"report": "out/report.html"}
    tiny, taken = results["experiments"]
    assert [one["seeds"] for one in tiny["algorithms"]] == [[0, 1]] * 3
    assert [one["communication_rounds"] for one in tiny["algorithms"]] == [8, 8, 8]
    # FedGA's displacement times zero: the same runs as FedAvg's if FedAvg's settings were FedGA's.
    assert taken["verdicts"][0]["second_scores"] == tiny["verdicts"][0]["second_scores"]
    for row in (*tiny["verdicts"], *taken["verdicts"]):
        assert (row["verdict"], row["why"].partition("; still rising")[0]) == judge(
            Claim.model_validate({k: row[k] for k in ("text", "first", "second", "at")}),
            difference(row["first_scores"], row["second_scores"]),
        )
    tables = Path("out/tables.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in tables if line.startswith("| fed")] == ["| fedavg", "| fedga", "| fedprox"]
    assert "holds runs of the scale small" in call(*WORDS, "--scale", "medium", code=2).stderr
    assert "holds runs of the scale small" in call(*WORDS, "--scale", "medium", "--list", code=2).stderr
    page = Path("out/report.html").read_text()
    assert "FedGA above FedAvg" in page
    assert results["words"].startswith(
        "Scale small; experiments: 2, with up to 2 seeds; in 2 of them settings were chosen"
    )
    assert results["words"].partition(":")[0] in page.partition("Verdicts</h2>")[2]
    assert page.index("Verdicts</h2>") < page.index("Where settings come from") < page.index("Comparison</h3>")
    assert 'everything</td><td class="text">our choice' in page
    assert "not trained on: the best of" in page


@pytest.mark.usefixtures("_tiny")
def test_settings_are_chosen_on_validation_examples_and_written_down():
    call(*WORDS, "tiny", "--only", "fedavg")
    for file in Path("out/tiny/tune").rglob("metrics.jsonl"):
        rows = read_metrics(file.parent)
        assert all(row["test_accuracy"] is None for row in rows)
        assert rows[-1]["validation_accuracy"] is not None
        assert read_table(file.parent / "spec.toml")["seed"] == SEARCH_SEED
    settled = {name: Chosen.model_validate(one) for name, one in read_table(Path("out/tiny/settings.toml")).items()}
    assert list(settled) == ["fedga", "fedavg"]
    assert "not trained on" in settled["fedga"].source
    spec = read_table(Path("out/tiny/runs/fedavg/seed1/spec.toml"))
    assert spec["local"]["lr"] == settled["fedavg"].values["lr"]
    assert "holdout" not in spec["clients"]


@pytest.mark.usefixtures("_tiny")
def test_only_what_is_asked_for_or_taken_over_is_searched():
    file = Path("out/tiny/settings.toml")
    file.parent.mkdir(parents=True)
    given = {"fedavg": {"values": {"lr": 0.3}, "source": "given"}}
    file.write_bytes(tomli_w.dumps(given).encode())
    call(*WORDS, "tiny", "--only", "fedavg")
    assert read_table(file) == given
    assert not Path("out/tiny/tune").exists(), "FedAvg's settings are known, and FedGA's are not asked for"
    call(*WORDS, "tiny", "--only", "fedprox", "--seeds", "1")
    assert list(read_table(file)) == ["fedavg", "fedprox"]
    assert read_table(Path("out/tiny/runs/fedprox/seed0/spec.toml"))["local"]["lr"] == 0.3


@pytest.mark.usefixtures("_tiny")
def test_what_lists_leave_out_is_the_recipes(tmp_path):
    """Of an algorithm's own numbers, too: no list of the paper's takes their place."""
    plan = json.loads(json.dumps(TINY))
    first = plan["experiment"][0]
    beta = {"kind": "off-until", "value": 0.3, "share": 0.5}
    first["entries"] = {"fedga": {"algorithm": {"beta": beta}}, "fedprox": {"algorithm": {"mu": 0.7}}}
    first["entries"]["sam"] = {"algorithm": {"name": "fedsam", "rho": 0.06}}
    first["entries"]["own"] = {"algorithm": {"name": "fedga", "mean": "running", "beta": "auto"}}
    names = ["fedga", "fedprox", "sam", "own"]
    first["algorithms"] = [["fedavg", *names]]
    first["scales"]["small"]["tune"]["lists"] = {name: {"lr": [0.05, 0.2]} for name in names}
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    call(*WORDS, "tiny", "--seeds", "1")
    chosen = read_table(Path("out/tiny/settings.toml"))
    specs = {name: read_table(Path(f"out/tiny/runs/{name}/seed0/spec.toml"))["algorithm"] for name in names}
    assert [specs[name][key] for name, key in zip(names, ("beta", "mu", "rho", "beta"), strict=True)] == [
        beta,
        0.7,
        0.06,
        "auto",
    ]
    for trial in Path("out/tiny/tune").rglob("spec.toml"):
        algorithm = read_table(trial)["algorithm"]
        assert algorithm in [{"name": "fedavg"}, *specs.values()], trial
    assert {one["values"]["lr"] for one in chosen.values()} <= {0.05, 0.2}


@pytest.mark.usefixtures("_tiny")
def test_retune_chooses_again_what_is_written_down():
    file, words = Path("out/tiny/settings.toml"), (*WORDS, "tiny", "--only", "fedprox")
    file.parent.mkdir(parents=True)
    given = {name: {"values": {"lr": 0.3}, "source": "given"} for name in ("fedga", "fedavg", "fedprox")}
    file.write_bytes(tomli_w.dumps(given).encode())
    call(*words)
    assert read_table(file) == given  # taken as it is
    # The runs with the given settings are not passed off as those of the chosen ones.
    assert "holds a run with other settings: local.lr (0.3 there" in call(*words, "--retune", code=2).stderr
    chosen = read_table(file)
    assert all("not trained on" in chosen[name]["source"] for name in given)
    before = {trial: trial.stat().st_mtime_ns for trial in Path("out/tiny/tune").rglob("metrics.jsonl")}
    shutil.rmtree("out/tiny/runs")
    call(*words, "--retune")
    assert read_table(file) == chosen
    after = {trial: trial.stat().st_mtime_ns for trial in Path("out/tiny/tune").rglob("metrics.jsonl")}
    assert before.keys() == after.keys()
    assert all(after[trial] > before[trial] for trial in before)


@pytest.mark.usefixtures("_tiny")
def test_retuning_that_is_interrupted_goes_on_without_the_word(monkeypatch):
    """Neither what was written down nor what the plan has counts again before all is chosen anew."""
    given_settings(Path("out"))
    change_plan(chosen={"fedprox": {"values": {"lr": 0.3, "mu": 0.5}, "source": "the plan's"}})
    trials = Path("out/tiny/tune/fedga")
    for held, name in ((trials / "trial", "tiny"), (Path("out/tiny/runs"), "tiny"), (Path("out/tiny/runs"), "taken")):
        with locked(held):
            assert "another process is at work on it" in call(*WORDS, name, "--retune").stderr
    assert "given" in Path("out/tiny/settings.toml").read_text(), "who is refused has given up nothing"
    with monkeypatch.context() as during:
        during.setattr("gradalign.reproduce.conduct.run_search", mock.Mock(side_effect=GradalignError("killed")))
        assert "killed" in call(*WORDS, "tiny", "--only", "fedavg", "--retune", code=2).stderr
    assert read_table(Path("out/tiny/settings.toml")) == {"chosen_anew": True}
    assert not trials.exists(), "they would be taken as they are"
    assert "settings to choose: fedga, fedprox" in call(*WORDS, "tiny", "--list").stdout
    call(*WORDS, "tiny", "--seeds", "1")
    settled = read_table(Path("out/tiny/settings.toml"))
    assert settled.pop("chosen_anew") is True
    assert {name for name, one in settled.items() if "not trained on" in one["source"]} == {
        "fedga",
        "fedavg",
        "fedprox",
    }
    assert settled["fedprox"]["values"]["mu"] == 0.1, "its list's, not the plan's"


@pytest.mark.usefixtures("_tiny")
def test_retune_gives_up_what_was_there_and_not_what_another_process_has_chosen_since():
    given_settings(Path("out"))
    first, second = (
        Reproduction(
            experiments=read_plan(Path("tiny.toml")),
            scale="small",
            folder=Path("out"),
            options=RunOptions(),
            say=print,
            retune=True,
        )
        for _ in range(2)
    )
    tiny = first.experiments[0]
    with mock.patch("gradalign.reproduce.conduct.run_search", side_effect=GradalignError("not again")) as search:
        with pytest.raises(GradalignError, match="not again"):
            first.settings(tiny)
        anew = {"values": {"lr": 0.2}, "source": "chosen anew"}
        Path("out/tiny/settings.toml").write_bytes(
            tomli_w.dumps({"chosen_anew": True} | dict.fromkeys(("fedga", "fedavg", "fedprox"), anew)).encode()
        )
        assert {one.source for one in second.settings(tiny).values()} == {"chosen anew"}
        assert search.call_count == 1


@pytest.mark.usefixtures("_tiny")
def test_retune_uses_no_old_trials_where_other_settings_are_taken_over():
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][1]["algorithms"] = [["no alignment"], ["fedprox"]]
    plan["experiment"][1]["scales"]["small"]["tune"] = {
        "budget": 4,
        "base": "fedavg",
        "lists": {"fedprox": {"mu": [0.1]}},
    }
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    old = Path("out/taken/tune/fedprox/trials/old")
    old.mkdir(parents=True)
    given_settings(Path("out"))
    call(*WORDS, "taken", "--seeds", "1", "--retune")
    assert not old.exists()
    assert Path("out/taken/tune/fedprox").exists()


@pytest.mark.usefixtures("_tiny")
def test_a_run_that_diverged_and_is_damaged_is_named():
    given_settings(Path("out"))
    words = (*WORDS, "tiny", "--only", "fedavg,fedga")
    call(*words)
    run = Path("out/tiny/runs/fedga/seed1")
    (run / "summary.json").unlink()
    (run / "failure.json").write_text('{"failure": "it diverged", "diverged": true}')
    assert "1 diverged" in call(*words, "--report").stdout
    (run / "metrics.jsonl").write_text('{"round": \n{"round": 1}\n')
    assert "error: damaged and not counted, named above: 1" in call(*words, "--report", code=2).stderr


@pytest.mark.usefixtures("_tiny")
def test_the_papers_numbers_on_the_page_are_the_plans_not_the_runs():
    given_settings(Path("out"))
    call(*WORDS, "tiny", "--only", "fedavg,fedga")
    for spec in Path("out/tiny/runs").rglob("spec.toml"):
        number = {"source": "table 9", "test_accuracy": {"fedga": [99.9, 0.1], "fedavg": [11.1, 0.1]}}
        spec.write_bytes(tomli_w.dumps(read_table(spec) | {"paper": number}).encode())
    call(*WORDS, "--report")
    assert "99.90" not in Path("out/report.html").read_text().partition("<main")[2]


@pytest.mark.usefixtures("_tiny")
def test_damage_is_told_and_does_not_pass_for_a_result():
    given_settings(Path("out"))
    words = (*WORDS, "tiny", "--only", "fedavg,fedga")
    whole = json.loads(call(*words, "--json").stdout)["experiments"]
    runs = Path("out/tiny/runs")
    names = (runs / "compare.toml").read_text()
    for damage in (lambda file: file.write_text("= ["), Path.unlink):
        damage(runs / "compare.toml")
        assert json.loads(call(*words, "--report", "--json").stdout)["experiments"] == whole
    (runs / "compare.toml").write_text(names)
    run, counted = runs / "fedga/seed1", json.loads((runs / "fedga/seed1/summary.json").read_text())
    wrong = {"communication_rounds": "x", "seconds": None}
    texts = {json.dumps(counted | {key: value}): f"lacks {key}" for key, value in wrong.items()}
    for text, why in {"{}": "lacks communication_rounds", '{"x': "is not valid JSON", **texts}.items():
        (run / "summary.json").write_text(text)
        for how in ((), ("--report",)):
            told = call(*words, *how, code=2).stderr.splitlines()
            assert any(f"fedga/seed1: its summary.json {why}" in line for line in told), told
            assert told[-1] == "error: damaged and not counted, named above: 1; what is removed is made anew"
    for file in ("metrics.jsonl", "spec.toml", "checkpoint.safetensors", "checkpoint.json"):
        (run / file).unlink(missing_ok=True)  # what is left would count as done
    assert "named above: 1" in call(*words, "--report", code=2).stderr
    shutil.rmtree(run)
    again = json.loads(call(*words, "--json").stdout)["experiments"]
    assert again[0]["verdicts"] == whole[0]["verdicts"]
    (runs / "fedga/seed1/summary.json").unlink()
    shutil.copytree(runs / "fedga/seed0", runs / "fedga/copy")
    call(*words, "--report")  # a run that is under way, and a copy, are not damaged
    Path("out/taken").mkdir()
    shutil.copytree(runs, "out/taken/runs")
    Path("out/taken/settings.toml").write_text("= [")
    others = call(*words, "--report", code=2)
    assert "left out taken: out/taken/settings.toml is not valid TOML" in others.stderr
    assert "FedGA above FedAvg" in others.stdout, "the others count"
    Path("out/tiny/settings.toml").write_text("= [")
    for how in ((), ("--report",), ("--list",)):
        assert "settings.toml is not valid TOML" in call(*words, *how, code=2).stderr
    Path("out/tiny/settings.toml").write_text('[fedga]\nsource = ""\nvalues = {lrr = 1.0}\n')
    assert "values.lrr.[key]: value error, must be one of lr, batch, K" in call(*words, "--list", code=2).stderr


def given_settings(out: Path) -> None:
    """Write settings for all that is tuned, so that nothing is searched."""
    file = out / "tiny/settings.toml"
    file.parent.mkdir(parents=True)
    given = {name: {"values": {"lr": 0.1}, "source": "given"} for name in ("fedga", "fedavg", "fedprox")}
    file.write_bytes(tomli_w.dumps(given).encode())


def change_plan(**changes: object) -> None:
    """Write the list anew with other numbers of its first experiment at the scale small."""
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][0]["scales"]["small"].update(changes)
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())


@pytest.mark.usefixtures("_tiny")
def test_runs_of_another_plan_are_neither_done_nor_judged():
    given_settings(Path("out"))
    call(*WORDS, "tiny", "--only", "fedga,fedavg")
    done = stamps()
    change_plan(budget=6)
    result = call(*WORDS, "tiny", code=2)
    assert "fedga/seed0 holds a run with other settings: rounds (4 there, 3 now)" in result.stderr
    assert result.stderr.strip().endswith("; remove it, or choose another --out")
    assert len(result.stderr.strip().splitlines()) == 1
    assert stamps() == done
    assert not Path("out/tiny/runs/fedprox").exists()  # nothing of the experiment is begun
    state = json.loads(call(*WORDS, "tiny", "--list", "--json").stdout)
    assert state[0]["left"].startswith("6 of 6 runs left (4 in whose place there is one with other settings)")
    shutil.rmtree("out/tiny/runs/fedga")
    call(*WORDS, "tiny", "--only", "fedga")  # who asks for others may go on beside them
    report = call(*WORDS, "tiny", "--report", "--json")
    assert report.stderr.count("not a run of this plan: rounds (8 there, 6 now)") == 2
    assert "not a run of this plan" in Path("out/report.html").read_text()
    results = json.loads(report.stdout)
    assert [one["name"] for one in results["experiments"][0]["algorithms"]] == ["fedga"]
    assert len(results["left_out"]) == 2


@pytest.mark.usefixtures("_tiny")
def test_runs_go_on_when_the_plan_has_become_longer():
    given_settings(Path("out"))
    given_settings(Path("fresh"))
    words = ("tiny", "--only", "fedga,fedavg", "--seeds", "1")
    call(*WORDS, *words)
    change_plan(budget=12)
    state = json.loads(call(*WORDS, "tiny", "--list", "--json").stdout)
    assert re.match(r"6 of 6 runs left, about \d:\d\d:\d\d at the speed so far", state[0]["left"])
    call(*WORDS, "tiny", "--report", code=2)  # they are not judged before
    call(*WORDS, *words)
    call(*(word.replace("out", "fresh") if word == "out" else word for word in WORDS), *words)
    for entry, rounds in (("fedga", 6), ("fedavg", 12)):
        rows = [read_metrics(Path(out, "tiny/runs", entry, "seed0")) for out in ("out", "fresh")]
        assert [own[-1]["round"] for own in rows] == [rounds, rounds]
        assert rows[0][-1] | {"seconds": 0} == rows[1][-1] | {"seconds": 0}


@pytest.mark.usefixtures("_tiny")
def test_an_experiment_becomes_longer_as_a_whole_or_not_at_all():
    """A run of one's last group that cannot go on is told before those of the first are touched."""
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][0] |= {"algorithms": [["fedga", "fedavg"], ["own"]], "claims": []}
    plan["experiment"][0]["entries"] = {"own": {"algorithm": {"name": "fedga", "beta": "auto"}}}
    del plan["experiment"][0]["scales"]["small"]["tune"], plan["experiment"][1]
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    call(*WORDS, "--seeds", "1")
    done = stamps()
    plan["experiment"][0]["scales"]["small"]["budget"] = 12
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    result = call(*WORDS, "--seeds", "1", code=2)
    assert "own/seed0 holds a run of 8 rounds that cannot go on to 12: what fedga does in a round" in result.stderr
    assert result.stderr.strip().endswith("; remove it, or choose another --out")
    assert stamps() == done
    state = json.loads(call(*WORDS, "--list", "--json").stdout)
    assert state[0]["left"].startswith("6 of 6 runs left (1 in whose place there is one with other settings)")
    shutil.rmtree("out/tiny/runs/own")
    call(*WORDS, "--seeds", "1")
    assert not set(done.items()) & set(stamps().items())


def test_a_longer_run_may_be_measured_as_a_shorter_one_was():
    plan = {one.name: one for one in read_plan()}["emnist-one-class"]
    short = plan.scales["medium"].model_copy(update={"measured_as": None})
    longer = short.model_copy(update={"budget": 3 * short.budget, "measured_as": short.budget})
    for entry, rounds in (("fedga", short.budget // 2), ("fedavg", short.budget)):
        specs = [
            plan.model_copy(update={"scales": {"medium": scale}}).recipe_at("medium", {}).spec_for(entry, 0).to_dict()
            for scale in (short, longer)
        ]
        assert [spec["rounds"] for spec in specs] == [rounds, 3 * rounds]
        assert is_shorter(*specs), "nothing else differs"
        assert not is_shorter(*reversed(specs))
    trial = plan.model_copy(update={"scales": {"medium": longer}}).recipe_at("medium", {}, 120).spec_for("fedavg", 0)
    assert (trial.rounds, trial.measure.test_every) == (120, 2)  # a sixtieth


def test_small_has_mediums_lists_and_settings_where_it_says_nothing():
    for one in read_plan():
        small, medium = one.at("small"), one.at("medium")
        assert small.settings == medium.settings
        assert small.budget <= medium.budget
        assert (small.hours or 0.0) <= (medium.hours or 0.0)
        if medium.tune is not None:
            assert small.tune.lists == medium.tune.lists
            assert small.tune.budget <= medium.tune.budget
    assert sum(one.at("small").hours for one in read_plan()) <= 12, "an evening on two cores"


def test_a_plans_own_small_scale_stays_its_own(tmp_path):
    lists = {"fedga": {"lr": [0.1], "beta": [0.1]}}
    medium = {"budget": 500, "measured_as": 50, "seeds": 9, "hours": 7.0, "settings": {"local": {"lr": 0.3}}}
    medium["tune"] = {"budget": 100, "lists": lists, "base": "fedga"}
    small = {"budget": 30, "tune": {"budget": 5, "lists": {"fedavg": {"lr": [0.2]}}}}
    for own, tuned in ((small, "fedavg"), ({"budget": 30}, None), ({"budget": 30, "tune": {"budget": 5}}, "fedga")):
        one = {"name": "a", "title": "a", "recipe": "digits", "algorithms": [["fedga"]]}
        table = {"experiment": [{**one, "scales": {"small": own, "medium": medium}}]}
        (tmp_path / "own.toml").write_bytes(tomli_w.dumps(table).encode())
        found = read_plan(tmp_path / "own.toml")[0].at("small")
        assert (found.budget, found.seeds, found.hours, found.measured_as) == (30, 3, None, None)
        assert found.settings == {"local": {"lr": 0.3}}
        assert (None if found.tune is None else (found.tune.budget, *found.tune.lists)) == (tuned and (5, tuned))


@pytest.mark.usefixtures("_tiny")
def test_what_fails_does_not_end_the_list():
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][0]["settings"]["clients"]["per_round"] = 7  # of six
    plan["experiment"][1].update(settings_from="other", claims=[])
    plan["experiment"].append({**TINY["experiment"][0], "name": "other", "algorithms": [["fedga", "fedavg"]]})
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    result = call(*WORDS, "--seeds", "1", code=2)
    lines = result.stderr.strip().splitlines()
    assert lines[0].startswith("tiny: ")
    assert lines[0].endswith("; going on with the next")
    assert lines[-1] == "error: not carried out, for the reasons given above: tiny"
    assert {path.split("/")[1] for path in stamps() if "/runs/" in path} == {"taken", "other"}
    assert "FedGA above FedAvg" in result.stdout


@pytest.mark.usefixtures("_tiny")
def test_a_plan_may_grow_and_shrink():
    given_settings(Path("out"))
    words = (*WORDS, "tiny", "--only", "fedavg")
    said = call(*words, "--seeds", "1").stderr
    assert "fedavg, seed 0, 8 rounds; 1 of 1 runs left" in said, "of those that are asked for"
    done = stamps()
    call(*words, "--seeds", "3")  # one more than the list has
    assert sorted(path.parent.name for path in map(Path, stamps())) == ["seed0", "seed1", "seed2"]
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][0]["algorithms"] = [["fedga"], ["fedavg", "fedsam"]]
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    call(*words[:-1], "fedsam", "--seeds", "1")  # with fedavg's lr, which is known
    there = read_table(Path("out/tiny/runs/compare.toml"))
    assert there == {"name": "tiny", "algorithms": ["fedga", "fedavg", "fedsam", "fedprox"], "seeds": [0, 1, 2]}
    assert {path: stamp for path, stamp in stamps().items() if path in done} == done
    entries = json.loads(call(*WORDS, "tiny", "--report", "--json").stdout)["experiments"][0]["algorithms"]
    assert {one["name"]: one["seeds"] for one in entries} == {"fedavg": [0, 1, 2], "fedsam": [0]}
    Path("out/tiny/runs/compare.toml").write_text('name = "another"\nalgorithms = []\nseeds = []\n')
    assert "holds another comparison" in call(*WORDS, "tiny", "--only", "fedga", code=2).stderr


@pytest.mark.usefixtures("_tiny")
def test_an_entry_that_joins_later_takes_settings_over_like_the_others():
    given_settings(Path("out"))
    call(*WORDS, "taken", "--seeds", "1")
    plan = json.loads(json.dumps(TINY))
    plan["experiment"][1]["algorithms"] = [["no alignment"], ["new"]]
    plan["experiment"][1]["entries"]["new"] = {"algorithm": {"name": "fedga", "beta": 0.02}}
    Path("tiny.toml").write_bytes(tomli_w.dumps(plan).encode())
    call(*WORDS, "taken", "--seeds", "1")
    spec = read_table(Path("out/taken/runs/new/seed0/spec.toml"))
    assert (spec["local"]["lr"], spec["algorithm"]["beta"]) == (0.1, 0.02)
    assert read_table(Path("out/taken/settings.toml"))["new"]["values"] == {"lr": 0.1}


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("no-such",), 'there is no experiment "no-such"; known are tiny, taken'),
        (("--scale", "huge"), '--scale must be small, medium, paper, got "huge"'),
        (("--only", "fedgo"), '--only: "fedgo" is no entry; known are fedavg, fedga, fedprox, no alignment'),
        (("--plan", "none.toml"), "there is no recipe none.toml"),
        (("--report",), "out holds no finished run of the list; begin without --report"),
        (("--report", "--list"), "--list, --report and --retune are three things to do; give one of them"),
        (("--only", ""), '--only: "" is no entry; known are fedavg, fedga, fedprox, no alignment'),
    ],
)
def test_bad_input_is_one_sentence(words, sentence):
    result = call(*WORDS, *words, code=2)
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_a_plan_with_mistakes_is_refused(tmp_path):
    def refused(change) -> str:
        plan = json.loads(json.dumps(TINY))
        change(plan["experiment"])
        (tmp_path / "own.toml").write_bytes(tomli_w.dumps(plan).encode())
        with pytest.raises(GradalignError) as error:
            read_plan(tmp_path / "own.toml")
        return str(error.value)

    assert 'names "scaffold"' in refused(lambda list_: list_[0]["claims"][0].update(first="scaffold"))
    assert 'names "nobody"' in refused(lambda list_: list_[1].update(settings_from="nobody"))
    assert '"tiny" is there twice' in refused(lambda list_: list_[1].update(name="tiny"))
    assert "tolerance" in refused(lambda list_: list_[0]["claims"][0].update(expect="equal"))
    own = lambda list_: list_[0]["scales"]["small"]["tune"]["lists"]  # noqa: E731
    assert 'names "fedvag"' in refused(lambda list_: list_[0].update(entries={"fedvag": {"local": {"lr": 0.1}}}))
    assert 'names "fedgaa"' in refused(lambda list_: own(list_).update(fedgaa={"lr": [0.1]}))
    assert "an entry with itself" in refused(lambda list_: list_[0]["claims"][0].update(first="fedavg"))
    assert "an entry with itself" in refused(lambda list_: list_[0]["claims"][0].update(second="tiny/fedga"))
    assert "taken has its own settings from another" in refused(lambda list_: list_[0].update(settings_from="taken"))
    assert "taken takes settings from itself" in refused(lambda list_: list_[1].update(settings_from="taken"))
    own_base = {"tune": {"budget": 4, "base": "fedavgg", "lists": {}}}
    assert 'names "fedavgg"' in refused(lambda list_: list_[0]["scales"]["small"].update(own_base))
    assert 'claims.0.setled is not a known setting; did you mean "settled"' in refused(
        lambda list_: list_[0]["claims"][0].update(setled=True)
    )
    assert 'did you mean "lr"' in refused(lambda list_: own(list_)["fedga"].update(lrr=[0.1]))
    zz = {"chosen": {"fedga": {"values": {"zz": 1.0}, "source": ""}}}
    assert "must be one of lr, batch, K" in refused(lambda list_: list_[0]["scales"]["small"].update(zz))
    assert 'did you mean "algorithms"' in refused(lambda list_: list_[0].update(algorithm=["fedga"]))
    assert refused(lambda list_: list_.clear()) == "own.toml has no [[experiment]]"


def evidence_script(name: str):
    """Return one of the scripts that make the pages' numbers."""
    place = Path(__file__).parent.parent / "docs" / "evidence" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"evidence_{name}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers_in(words: str) -> list[float]:
    return [float(word.replace("−", "-")) for word in re.findall(r"[+−]?[0-9.]+", words)]


def test_the_page_of_forms_says_what_its_numbers_say():
    """Means, deviations and differences on the page follow from the kept seeds' accuracies."""
    forms = evidence_script("forms")
    page = (forms.HERE.parent / "communication.md").read_text(encoding="utf-8")
    kept = json.loads((forms.HERE / "forms.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in kept["experiments"]] == list(forms.TITLES)
    compared = 0
    for one in kept["experiments"]:
        section = page.partition(f"### {forms.TITLES[one['name']]} (")[2].partition("\n#")[0]
        cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
        told = {row[0]: row[1:] for row in cells if "diverged" not in row[1]}
        rows = {forms.NAMES[row["name"]]: row for row in one["algorithms"] if len(row["scores"]) > 2}
        assert told.keys() == rows.keys()
        plain = rows["FedAvg"]["scores"]
        for name, row in rows.items():
            own = row["scores"]
            mean, deviation, count = numbers_in(told[name][0])
            assert mean == pytest.approx(statistics.fmean(own), abs=0.006), (one["name"], name)  # three digits are kept
            assert deviation == pytest.approx(statistics.stdev(own), abs=0.006)
            assert count == len(own)
            if name == "FedAvg":
                continue
            assert told[name][1:4] == [forms.signed(**row["difference"][at]) for at in forms.COSTS]
            # A fresh β that sets itself ends a communication early: FedAvg's last measurement is not compared there.
            if row["name"] != "fedga-fresh-auto":
                found = difference(own, plain)
                assert numbers_in(told[name][1]) == pytest.approx([found.value, found.margin], abs=0.006), name
                compared += 1
    assert compared > 40


def test_the_table_of_local_steps_is_that_of_the_kept_seeds():
    """FedAvg's and ``FedGA()``'s accuracies with K = 5, 2 and 1, and Welch's difference where they are two."""
    forms = evidence_script("forms")
    page = (forms.HERE.parent / "communication.md").read_text(encoding="utf-8")
    told = page.partition("## How many local steps")[2].partition("\n## ")[0]
    lines = [line.split("|")[2:] for line in told.splitlines() if line.startswith("| K = ")]
    rows = [[number for cell in cells if "β" not in cell for number in numbers_in(cell)] for cells in lines]
    kept = [json.loads((forms.HERE / name).read_text(encoding="utf-8")) for name in ("forms.json", "verdicts.json")]
    five, fewer = (
        {
            entry["name"]: entry["scores"]
            for one in found["experiments"]
            if one["name"] == name
            for entry in one["algorithms"]
        }
        for found, name in zip(kept, ("forms-emnist-one-class", "one-class-local-steps"), strict=True)
    )
    pairs = [(five["fedavg"], five["fedga-auto"]), (fewer["K=2"], fewer["fedga-K=2"]), (fewer["K=1"], None)]
    for numbers, (plain, aligned) in zip(rows, pairs, strict=True):
        expected = [statistics.fmean(plain), statistics.stdev(plain)]
        if aligned is not None:
            found = difference(aligned, plain)
            expected += [statistics.fmean(aligned), statistics.stdev(aligned), found.value, found.margin]
        assert numbers == pytest.approx(expected, abs=0.006)
    above = difference(fewer["K=1"], five["fedga-auto"])
    assert f"{above.value:.1f} ± {above.margin:.1f} points above `FedGA()` with five" in told


def test_the_page_of_results_says_what_its_numbers_say():
    """Verdicts on the page are those of the kept seeds by the plan's rules, as the plan has them now."""
    evidence = evidence_script("verdicts")
    found = json.loads(evidence.KEPT.read_text(encoding="utf-8"))
    page = evidence.PAGE.read_text(encoding="utf-8")
    assert evidence.filled(page, found) == page
    claims = {(one.name, claim.text): claim for one in read_plan() for claim in one.claims}
    papers = sum(claim.papers for claim in claims.values())
    came_out = r"(\d+) reproduced, (\d+) not reproduced, (\d+) undecidable, (\d+) pending"
    counts = re.search(rf"{papers} claims of the paper: {came_out}", page)
    words = f"Of {papers} claims drawn from the paper, [{{}} are reproduced here, {{}} are not, "
    words += "{} cannot be decided at this scale"
    words += ", {} are pending]" if counts[4] != "0" else "]"
    assert words.format(*counts.groups()) in (evidence.HERE.parents[1] / "README.md").read_text(encoding="utf-8")
    judged = 0
    for one in found["experiments"]:
        lost = {entry["name"]: entry["diverged"] for entry in one["algorithms"]}
        for row in one["verdicts"]:
            claim = claims[one["name"], row["text"]]
            sides = [side for side in (claim.first, claim.second) if isinstance(side, str)]
            second = row["second_scores"] if len(sides) > 1 else [claim.second * claim.unit] * 2
            verdict, _ = judge(claim, difference(row["first_scores"], second))
            decided = verdict in ("reproduced", "not reproduced")
            if decided and claim.settled and max(row["rises"]) > 0.5:
                verdict = "undecidable"
            if not any(lost.get(side) for side in sides):  # else it may be taken back
                assert row["verdict"] == verdict, row["text"]
            judged += verdict != "pending"
    assert judged > 3


GONE = {
    "−1.2 ± 1.5",  # one class each after 2,000 communications, before the runs had the paper's 3,000
    "0.36 ± 0.31",  # digits, with the list of lr that ended too early
    "3.4 ± 1.9",  # FedGA − FedAvg on CIFAR-100 at equal updates and ...
    "0.5 ± 1.1",  # ... at equal communication, with the lr of FedAvg from a search that ended trials near chance
}
"""Differences that the page of results tells of runs which others have replaced."""
ABOUT = {
    "One class of EMNIST each": ("emnist-one-class", "emnist-one-class-k10"),
    "Clients that hold alike": ("emnist-iid", "cifar10-iid"),
    "CIFAR-100 and Shakespeare": ("cifar100", "shakespeare"),
    "Where curves come to their end": ("flat-digits",),
    "With one communication a round": ("forms-", "one-class-long"),
    "Does alignment overfit less?": ("emnist-one-class", "cifar100", "flat-digits", "losses"),
    "Drift, local steps, β": ("emnist-iid", "emnist-local-steps", "emnist-beta"),
    "Large batches": ("large-batch-", "cifar10-updates"),
    "SCAFFOLD, and a table that others have published": ("",),
    "Why it differs": ("cifar100",),
}
"""The experiments that a section's hand-written differences are of, by how their names begin."""


def test_differences_in_words_are_those_of_the_kept_seeds():
    """Each "x ± y" that was written by hand rounds a kept difference of its section: none is of runs before."""
    evidence = evidence_script("verdicts")
    kept = [json.loads((evidence.HERE / name).read_text(encoding="utf-8")) for name in ("forms.json", "verdicts.json")]
    known = {one["name"]: list(kept_differences(one)) for found in kept for one in found["experiments"]}
    overfitting = evidence_script("overfitting")
    runs = {name: overfitting.kept_runs(name) for name in overfitting.TITLES}
    known["losses"] = [(one.value, one.margin, False) for read in overfitting.compared(runs).values() for one in read]
    known["emnist-one-class"] += read_off_the_runs(runs)
    known["large-batch-emnist"] += [(one.value, one.margin, False) for one in paid_for(overfitting)]
    page = evidence.PAGE.read_text(encoding="utf-8")
    for begin, end in (evidence.GLANCE, evidence.CLAIMS):
        page = page.partition(begin)[0] + page.partition(end)[2]
    parts = re.split(r"^##+ (.+)\n", page, flags=re.MULTILINE)
    told = {"the lead": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    told |= {name: (evidence.HERE.parents[1] / name).read_text(encoding="utf-8") for name in HELD}
    assert told.keys() >= ABOUT.keys()
    compared = 0
    for place, text in told.items():
        near = [pair for name, pairs in known.items() if name.startswith(ABOUT.get(place, ("",))) for pair in pairs]
        for found in re.finditer(r"([+−]?)(\d+\.?\d*) ± (\d+\.?\d*)(?=(.{,14}))", text):
            compared += 1
            words = f"{found[1]}{found[2]} ± {found[3]}"
            assert rounds_one_of(near, *found.groups()) or words in GONE, (place, words)
    assert compared > 50


HELD = ("README.md", "docs/does-it-help.md")


def rounds_one_of(known, sign, value, margin, after):
    """Whether a number and its margin, as they are written, are one of the differences that are known."""
    near = [0.501 * 10 ** -len(number.partition(".")[2]) for number in (value, margin)]
    number = float(value) * (-1 if sign == "−" else 1)
    return any(
        abs((apart if sign else abs(apart)) - number) < near[0] and abs(spread - float(margin)) < near[1]
        for apart, spread, by_seed in known
        if by_seed <= ("seed" in after)
    )


def kept_differences(one):
    """Yield value, margin and whether it is seed by seed: of a kept experiment's claims, its tables, any two ends."""
    for entry in one["algorithms"]:
        known = [at for at in entry["difference"].values() if at["margin"] is not None]
        yield from ((at["value"], at["margin"], False) for at in known)
    sides = [(a["scores"], b["scores"]) for a in one["algorithms"] for b in one["algorithms"] if a is not b]
    for row in one.get("verdicts", []):
        level = [] if isinstance(row["second"], str) else [100 * row["second"]] * 2
        sides.append((row["first_scores"], row["second_scores"] or level))
    paired = [pair for pair in sides if len(pair[0]) == len(pair[1])]
    own = [([a - b for a, b in zip(*pair, strict=True)], [0.0, 0.0]) for pair in paired]
    for by_seed, pairs in ((False, sides), (True, own)):
        found = [difference(*pair) for pair in pairs]
        yield from ((one.value, one.margin, by_seed) for one in found if one is not None and one.margin is not None)


def read_off_the_runs(runs):
    """Return two differences that no claim has: K = 1 beside 10 after 1,200 communications, and a last fifth."""

    def mean_of(run, key, low, high):
        rows = [row for row in run.rows if row.get("test_accuracy") is not None and low < row[key] <= high]
        return 100 * statistics.fmean(row["test_accuracy"] for row in rows)

    one, ten = runs["emnist-one-class"], runs["emnist-one-class-k10"]
    steps = [[mean_of(run, "communication_rounds", 1080, 1200) for run in k["fedavg"]] for k in (one, ten)]
    ends = [run.rows[-1]["local_updates"] for run in one["fedga"]]
    fifth = [
        [mean_of(run, "local_updates", 0.8 * ends[0], ends[0]) for run in one[name]] for name in ("fedga", "fedavg")
    ]
    return [(found.value, found.margin, False) for found in (difference(*steps), difference(*fifth))]


def paid_for(overfitting):
    """Return GradAlign − large-batch SGD at equal computation, after 200, 400 and 600 of SGD's updates."""
    runs = overfitting.kept_runs("large-batch-emnist", ("gradalign", "largebatchsgd"))

    def reached(name, updates):
        ends = [[row for row in run.rows if 0.9 * updates < row["round"] <= updates] for run in runs[name]]
        return [100 * statistics.fmean(row["test_accuracy"] for row in rows) for rows in ends]

    return [difference(reached("gradalign", most / 2), reached("largebatchsgd", most)) for most in (200, 400, 600)]


def test_the_curve_over_beta_is_drawn_where_the_kept_runs_end(monkeypatch):
    evidence = evidence_script("verdicts")
    monkeypatch.syspath_prepend(str(evidence.HERE))  # as when the script is called
    figures = evidence_script("figures")
    found = json.loads(evidence.KEPT.read_text(encoding="utf-8"))["experiments"]
    kept = {
        entry["name"]: entry["scores"] for one in found for entry in one["algorithms"] if one["name"] == "emnist-beta"
    }
    drawn = figures.kept_runs("emnist-beta", [f"beta {beta}" for beta in figures.BETAS])
    assert set(drawn) == set(kept)
    for name, runs in drawn.items():
        assert sorted(map(figures.last_tenth, runs)) == pytest.approx(sorted(kept[name]), abs=1e-4)


def test_when_alignment_begins_to_pay_is_read_off_the_kept_runs():
    evidence = evidence_script("verdicts")
    found = zip((200, 400, 600), paid_for(evidence_script("overfitting")), strict=True)
    begin, *rest = (f"{apart.value:+.1f} ± {apart.margin:.1f}|{updates}" for updates, apart in found)
    words = ", ".join(
        [begin.replace("|", " points after ") + " of SGD's updates", *(r.replace("|", " after ") for r in rest)]
    )
    for page in ("large-batches.md", "results.md"):
        assert words.replace("-", "−") in (evidence.PAGE.parent / page).read_text(encoding="utf-8"), words


def test_what_is_left_of_alignments_gain_is_the_arithmetic_of_kept_differences():
    """FedAvg's further updates, the gain at equal updates, and what is left at equal communication."""
    evidence = evidence_script("verdicts")
    kept = [json.loads((evidence.HERE / name).read_text(encoding="utf-8")) for name in ("forms.json", "verdicts.json")]
    entries = {
        one["name"]: entry["difference"]
        for found in kept
        for one in found["experiments"]
        for entry in one["algorithms"]
        if entry["name"] == "fedga"
    }
    page = evidence.PAGE.read_text(encoding="utf-8").partition("## Why it differs")[2].partition("\n- ")[0]
    lines = [line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    names = ["forms-emnist-one-class", "emnist-one-class-k10", "emnist-one-class", "forms-cifar100", "cifar100"]
    for cells, name in zip(lines, [*names, "emnist-iid", "cifar10-iid", "flat-digits"], strict=True):
        after, alike = (entries[name][at]["value"] for at in ("communication", "updates"))
        for cell, number in zip(cells, (alike - after, alike, after), strict=True):
            digits = len(cell.strip().partition(".")[2])
            assert numbers_in(cell) == pytest.approx([number], abs=0.51 * 10**-digits), name


def test_a_claim_beside_another_experiment_has_all_its_seeds():
    """When an experiment's seeds are brought in, what others are held against it is judged anew, too."""
    evidence = evidence_script("verdicts")
    found = json.loads(evidence.KEPT.read_text(encoding="utf-8"))["experiments"]
    kept = {f"{one['name']}/{entry['name']}": entry["scores"] for one in found for entry in one["algorithms"]}
    elsewhere = [row for one in found for row in one["verdicts"] if "/" in str(row["second"])]
    assert elsewhere
    for row in elsewhere:
        assert len(row["second_scores"]) == len(kept[row["second"]]), row["text"]


def test_a_setting_at_the_end_of_its_list_is_marked_as_one():
    """A reader sees where a better value may lie beyond what was tried: it undid a gain once, on digits."""
    evidence = evidence_script("verdicts")
    plan = {one.name: one for one in read_plan()}
    marked = {}
    for one in json.loads(evidence.KEPT.read_text(encoding="utf-8"))["experiments"]:
        tune = plan[one["name"]].at("medium").tune
        for entry in one["algorithms"]:
            words = evidence.settings(entry["chosen"])
            marked[one["name"], entry["name"]] = words
            lists = (
                tune.lists[entry["name"]].model_dump(exclude_none=True) if tune and entry["name"] in tune.lists else {}
            )
            for key, symbol in (("lr", "lr"), ("beta", "β"), ("rho", "ρ"), ("mu", "μ")):
                tried = [*lists.get(key, []), *lists.get(f"{key}_fine", [])]
                for end, word in ((min, "smallest"), (max, "largest")) if len(tried) > 1 else ():
                    told = f"{symbol} {end(tried)} ({word} tried)"
                    assert (entry["chosen"]["values"][key] != end(tried)) or told in words, (one["name"], entry["name"])
    assert marked["emnist-iid", "fedprox"] == "lr 0.2, K 10, μ 0.01", "its lr is FedAvg's"
    assert marked["emnist-one-class-k10", "fedavg"] == "lr 0.1, K 10", "0.05 to 0.4 were tried"
    assert "lr 4.0 (largest tried)" in marked["shakespeare", "fedavg"]


def test_the_table_at_a_glance_is_worked_out_from_the_seeds():
    """Its numbers are Welch's, of the seeds' scores that the first claim on the two was judged by, at either cost."""
    evidence = evidence_script("verdicts")
    found = json.loads(evidence.KEPT.read_text(encoding="utf-8"))
    known = {evidence.SHORT[one["name"]]: one for one in found["experiments"] if one["name"] in evidence.SHORT}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in evidence.at_a_glance(found)[2:]]
    assert rows[0][:2] == ["EMNIST, one class each", "+3.05 (85.95, 82.9)"], "table 1"
    compared = 0
    for title, _, *views, ends, runs in rows:
        scores = {entry["name"]: entry["scores"] for entry in known[title]["algorithms"]}
        for name, told in zip(("fedga", "fedavg", "scaffold", "fedprox"), ends.split(", "), strict=True):
            seeds = scores.get(name, [])
            assert (
                told == "–"
                if len(seeds) < 2
                else numbers_in(told)[0] == pytest.approx(statistics.mean(seeds), abs=0.051)
            )
            fewer = len(seeds) < min(len(scores["fedga"]), len(scores["fedavg"]))
            assert told.endswith(f"({len(seeds)} seeds)") == (fewer and len(seeds) > 1)
        entries = {entry["name"]: len(entry["scores"]) for entry in known[title]["algorithms"]}
        assert runs.endswith(f"{min(entries['fedga'], entries['fedavg'])} seeds")
        for at, told in zip(("communication", "updates"), views, strict=True):
            same = {"first": "fedga", "second": "fedavg", "metric": "test_accuracy", "at": at}
            judged = [one for one in known[title]["verdicts"] if same.items() <= one.items()]
            if judged:
                sides = judged[0]["first_scores"], judged[0]["second_scores"]
                welch = stats.ttest_ind(*sides, equal_var=False).confidence_interval()
                middle, margin = (welch.high + welch.low) / 2, (welch.high - welch.low) / 2
                assert numbers_in(told)[:2] == pytest.approx([middle, margin], abs=0.006), title
                compared += 1
    assert compared > 8
    assert [row[1] for row in rows if row[0].startswith("CIFAR")] == ["a gain", "+1.24 (74.34, 73.1)"], (
        "K = 2 is not the paper's"
    )
    ends = [row for one in found["experiments"] for row in one["verdicts"] if "FedGA ends above" in row["text"]]
    came_out = [row["verdict"] for row in ends if row["papers"]]
    kinds = [[cell.strip() for cell in line.strip("|").split("|")] for line in evidence.counts(found)]
    verdicts = ("reproduced", "not reproduced", "undecidable", "pending")
    assert kinds[2][1:] == [str(len(came_out)), *(str(came_out.count(one)) for one in verdicts)]
    sums = dict(
        zip(kinds[0][1:], (sum(map(int, column)) for column in list(zip(*kinds[2:], strict=True))[1:]), strict=True)
    )
    words = evidence.verdict_words("medium", evidence.plain(found["experiments"]), evidence.own_plan())
    assert (
        f"Of {sums.pop('in all')} claims of the paper: {', '.join(f'{n} {word}' for word, n in sums.items())}." in words
    )
    single = [{**one, "scores": one["scores"][:1]} for one in found["experiments"][0]["algorithms"]]
    assert len(evidence.at_a_glance({"experiments": [{**found["experiments"][0], "algorithms": single}]})) == 2


def test_the_kept_runs_give_the_kept_numbers(tmp_path):
    """An archive is a folder of ``reproduce``: its runs are judged anew, to the numbers that the page is made of."""
    evidence = evidence_script("verdicts")
    known = {one["name"]: one for one in json.loads(evidence.KEPT.read_text(encoding="utf-8"))["experiments"]}
    archives = sorted(evidence.RUNS.glob("*.tar.xz"))
    for path in archives:
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
    again = Reproduction(
        experiments=read_plan(), scale="medium", folder=tmp_path, options=RunOptions(), say=lambda words: None
    )
    found = again.results()
    assert found["left_out"] == []
    experiments = evidence.kept(found)["experiments"]
    assert {f"{one['name']}.tar.xz" for one in experiments} == {path.name for path in archives} != set()
    for one in experiments:
        assert {**one, "provenance": {}} == {**known[one["name"]], "provenance": {}}
    for metrics in tmp_path.rglob("metrics.jsonl"):
        assert evidence.measured(metrics.read_bytes()) == metrics.read_bytes(), "to be kept again"


def test_what_is_kept_does_not_become_less():
    evidence = evidence_script("verdicts")
    name = read_plan()[0].name
    rows = [{"text": "one", "verdict": "undecidable"}, {"text": "two", "verdict": "pending"}]

    def kept(scores, verdicts, scale="medium"):
        entry = {"name": "fedga", "scores": scores, "diverged": 1, "communications": 100}
        return {"scale": scale, "experiments": [{"name": name, "algorithms": [entry], "verdicts": verdicts}]}

    before = kept([1.0, 2.0], rows)
    better = kept([1.0, 2.0, 3.0], [{"text": "one", "verdict": "reproduced"}, rows[1]])
    assert evidence.joined(before, better) == better
    assert evidence.joined(before, {**better, "experiments": []}) == before
    with pytest.raises(SystemExit, match="less than is kept: seeds of fedga; unpack"):
        evidence.joined(better, before)
    with pytest.raises(SystemExit, match="less than is kept: one; unpack"):
        evidence.joined(before, kept([3.0, 4.0], [{"text": "one", "verdict": "pending"}, rows[1]]))
    with pytest.raises(SystemExit, match="scale medium, these runs are of small"):
        evidence.joined(before, kept([3.0, 4.0], rows, "small"))


def test_what_is_kept_gives_way_to_runs_of_a_longer_list():
    evidence = evidence_script("verdicts")

    def entry(name, seeds, length, diverged=0):
        return {"name": name, "scores": [1.0] * seeds, "diverged": diverged, "communications": length}

    def one(*entries, verdict="undecidable"):
        claim = {"text": "claim", "first": "fedga", "second": "scaffold", "verdict": verdict}
        return {"algorithms": list(entries), "verdicts": [claim]}

    before = one(entry("fedga", 3, 320), entry("scaffold", 3, 320), entry("lost", 0, 0, diverged=3))
    lost = entry("lost", 0, 0, diverged=3)
    longer = one(entry("fedga", 2, 2000), lost, verdict="pending")
    assert evidence.lost(before, longer) == "", "SCAFFOLD waits for runs of that length, and what is claimed of it"
    assert evidence.lost(before, one(entry("fedga", 2, 2000), verdict="pending")) == "seeds of lost"
    short = one(entry("fedga", 2, 2000), entry("scaffold", 2, 320), lost)
    assert evidence.lost(before, short) == "seeds of scaffold", "of the same length, and fewer"
    single = one(entry("fedga", 1, 2000), lost, verdict="pending")
    assert evidence.lost(before, single) == "seeds of fedga, seeds of scaffold, claim", "one run is no result"


def test_seeds_are_compared_one_by_one_where_both_sides_have_them():
    """By hand: differences 1, 1, 1, 1, 6 have the mean 2 and the deviation √5, so the margin is 2.776·√5/√5."""
    evidence = evidence_script("verdicts")
    scores = {"first_scores": [11.0, 21.0, 31.0, 41.0, 56.0], "second_scores": [10.0, 20.0, 30.0, 40.0, 50.0]}
    verdict, seeds = {"first": "a", "second": "b", **scores}, [0, 1, 2, 3, 4]
    assert evidence.by_seed(verdict, {"a": seeds, "b": seeds}) == " (by seed ± 2.8)"
    assert evidence.by_seed(verdict, {"a": seeds, "b": [0, 1, 2, 3, 5]}) == ""
    assert evidence.by_seed(verdict, {"a": [*seeds, 5], "b": [*seeds, 5]}) == "", "one has no number"
    assert evidence.by_seed(verdict | {"second": 0.01, "second_scores": []}, {"a": seeds}) == ""
