"""The command line, as its user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradalign.cli.app import app
from gradalign.recipes import shipped_recipes

SMALL = ("--set", "rounds=3", "--set", "task.clients=5", "--set", "clients.per_round=3", "--workers", "0")


def call(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_help_does_not_wait_for_torch():
    code = """
import sys
sys.argv = ["gradalign", "--help"]
from gradalign.cli import main
try:
    main()
except SystemExit:
    print("torch" in sys.modules, "pydantic" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("False False")
    assert "compare" in out


def test_a_missing_extra_is_one_sentence(monkeypatch):
    code = "import sys; sys.modules['typer'] = None; from gradalign.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    wanted = "the command line needs the package typer; install it with: pip install 'gradalign[cli]'"
    assert done.stderr == f"error: {wanted}\n"
    for name in [name for name in sys.modules if name.startswith("gradalign.sweep.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    wanted = "this command needs the package optuna; install it with: pip install 'gradalign[sweep]'"
    assert call("sweep", "digits", code=2).stderr == f"error: {wanted}\n"


def test_version():
    assert call("--version").stdout.startswith("gradalign 0.")


def test_run_then_show(tmp_path):
    call("run", "digits", *SMALL, "--seed", 7)
    folder = Path("runs/digits-fedga-seed7")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["communication_rounds"] == 6
    assert summary["task"]["train_examples"] + summary["task"]["test_examples"] == 1797
    shown = call("show", folder).stdout
    assert "beta = 0.4" in shown
    assert "seed 7" in shown
    data = json.loads(call("show", folder, "--json").stdout)
    assert data["complete"]
    assert data["spec"]["seed"] == 7
    assert data["summary"] == summary
    again = call("run", "digits", *SMALL, "--seed", 7, "--json")
    assert json.loads(again.stdout)["folder"] == "runs/digits-fedga-seed7-2", "a taken default name gets a number"


def test_a_run_folders_spec_is_a_recipe():
    call("run", "digits", *SMALL, "--out", "a")
    call("run", "a/spec.toml", "--workers", 0, "--out", "b")
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert Path("a/spec.toml").read_text() == Path("b/spec.toml").read_text()


def test_compare_writes_table_summary_and_picture():
    words = ("compare", *SMALL, "--seeds", 2, "--algorithms", "fedga,fedga+fedprox,fedavgm", "--out", "c")
    table = call(*words).stdout
    for name in ("fedga", "fedga+fedprox", "fedavgm"):
        assert name in table
        assert Path(f"c/{name}/seed1/summary.json").exists()
    summary = json.loads(Path("c/summary.json").read_text())
    assert summary["seeds"] == [0, 1]
    runs = [json.loads(Path(f"c/fedga/seed{seed}/summary.json").read_text()) for seed in (0, 1)]
    best = [run["best_test_accuracy"] for run in runs]
    found = summary["algorithms"][0]["best_test_accuracy"]
    assert found["mean"] == pytest.approx(sum(best) / 2)
    assert found["std"] == pytest.approx(abs(best[0] - best[1]) / 2**0.5)
    assert Path("c/curves.png").read_bytes().startswith(b"\x89PNG")
    picture = Path("c/curves.png").stat().st_size
    assert picture > 20_000
    assert "already holds a comparison" in call(*words, code=2).stderr
    resumed = json.loads(call(*words, "--resume", "--json").stdout)
    assert resumed["algorithms"] == summary["algorithms"]
    assert "fedavgm" in call("show", "c").stdout


def test_compare_settings_of_single_entries():
    Path("r.toml").write_text(
        """
rounds = 2
[task]
clients = 5
[algorithm]
name = "fedga"
beta = 0.1
[local]
steps = 2
[compare]
algorithms = ["weak", "fedga", "kept"]
seeds = 1
[compare.settings.weak]
algorithm.name = "fedga"
algorithm.beta = 0.01
local.lr = 0.05
[compare.settings.kept]
algorithm = { name = "scaffold", control = "kept" }
"""
    )
    call("compare", "r.toml", "--workers", 0, "--out", "c", "--set", "local.steps=3")
    specs = {
        name: json.loads(call("show", f"c/{name}/seed0", "--json").stdout)["spec"] for name in ("weak", "fedga", "kept")
    }
    assert specs["weak"]["algorithm"] == {"name": "fedga", "beta": 0.01}
    assert specs["weak"]["local"]["lr"] == 0.05
    assert specs["fedga"]["algorithm"] == {"name": "fedga", "beta": 0.1}
    assert specs["kept"]["algorithm"] == {"name": "scaffold", "control": "kept"}
    assert {spec["local"]["steps"] for spec in specs.values()} == {3}


def test_one_diverging_algorithm_does_not_take_the_others_down():
    Path("r.toml").write_text(
        """
rounds = 3
[task]
clients = 5
[compare]
algorithms = ["fedavg", "wild"]
seeds = 1
[compare.settings.wild]
algorithm.name = "fedavg"
local.lr = 1e30
"""
    )
    result = call("compare", "r.toml", "--workers", 0, "--out", "c", code=2)
    assert "diverged" in result.stdout
    assert result.stderr.splitlines()[-1].startswith(
        "error: wild, seed 0: the test loss became NaN or infinite after round 1"
    )
    summary = json.loads(Path("c/summary.json").read_text())
    assert summary["algorithms"][0]["final_test_accuracy"] is not None
    assert summary["algorithms"][1]["runs"][0]["failure"]


def test_tasks_lists_what_can_be_trained():
    assert "classes_per_client" in call("tasks").stdout
    listed = json.loads(call("tasks", "--json").stdout)
    assert listed["tasks"][0]["name"] == "digits"
    assert listed["tasks"][0]["settings"]["clients"] == 20
    assert listed["recipes"] == list(shipped_recipes())


def test_a_users_own_task():
    Path("mine.py").write_text(
        """
import torch
import gradalign
def task(width=4):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    model = lambda: torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    return gradalign.Task(name="mine", model=model, clients=[(x[i::4], y[i::4]) for i in range(4)], test=(x, y))
"""
    )
    Path("r.toml").write_text('rounds = 2\n[task]\nname = "mine:task"\nwidth = 5\n[algorithm]\nname = "fedavg"\n')
    call("run", "r.toml", "--workers", 0, "--out", "a")
    assert json.loads(Path("a/summary.json").read_text())["task"]["name"] == "mine"
    assert (
        "task.depth is not a setting of the task mine:task; known here: width"
        in call("run", "r.toml", "--set", "task.depth=3", code=2).stderr
    )
    assert 'has no "nope"' in call("run", "r.toml", "--set", "task.name=mine:nope", code=2).stderr


BAD = [
    ("local.learning_rate=1", "local.learning_rate is not a known setting"),
    ("local.lr=-1", "local.lr: must be greater than 0, got -1"),
    ("local.lr=fast", "local.lr: must be a valid number, got 'fast'"),
    ('local.lr={kind="warmup",value=0.1}', "local.lr: a warm-up's length is given by rounds or share, got neither"),
    (
        'local.lr={kind="warmup",rounds=3,value=0.1,end=0.0}',
        'local.lr: a "warmup" schedule has the keys value, rounds, start, share; end is not one of them',
    ),
    ("rounds=0", "rounds: must be greater than or equal to 1, got 0"),
    ("rounds=2.5", "rounds: must be a valid integer, got 2.5"),
    ("lokal.lr=1", 'lokal is not a known setting; did you mean "local"?'),
    ("clients.per_round=21", "clients.per_round is 21, but the task digits has 20 clients"),
    ("task.clients=2000", "there are only"),
    ("task.clients=1000", "use fewer clients"),
    ("task.name=mnist", 'task.name: "mnist" is not a task'),
    ("task.name=nowhere:task", 'task.name: cannot import "nowhere"'),
    ("task.colour=3", "task.colour is not a setting of the task digits"),
    ("task.partition=odd", "task.partition must be one of iid, one-class, separate,"),
    ("algorithm.name=fedsgd", 'algorithm.name: "fedsgd" is not an algorithm'),
    ("algorithm.mu=0.1", "algorithm.mu is set, but fedga has no such parameter"),
    ("algorithm.name=gradalign", "gradalign takes one local step a round, got local.steps = 10"),
    ("algorithm.name=fedga+fedadam+fedyogi", "more than one server rule"),
    ("server.tau=0.1", "server.tau is set, but the server rule fedavg has only lr"),
    ("local.epochs=2", "local.steps and local.epochs were both given"),
    ("local.lr=1e30", "NaN or infinite"),
    ("seed", "--set takes section.key=value"),
]


@pytest.mark.parametrize(("setting", "message"), BAD)
def test_bad_settings_get_one_line_and_exit_code_2(setting, message):
    result = call("run", "digits", "--workers", 0, "--out", "r", "--set", setting, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nowhere.toml"), 'there is no recipe file "nowhere.toml"'),
        (("run", "."), "is a folder, not a recipe file"),
        (("run", "broken.toml"), "broken.toml is not valid TOML"),
        (("run", "binary.toml"), "cannot read the recipe binary.toml"),
        (("compare", "--algorithms", "fedga,nothing"), '"nothing" is not an algorithm'),
        (("compare", "--algorithms", ","), "one is empty"),
        (("compare", "--algorithms", "fedga,fedga"), "same algorithm twice"),
        (("compare", "--set", "compare.seeds=0"), "seeds: must be greater than or equal to 1"),
        (("show", "nowhere"), "there is no folder nowhere"),
        (("show", "."), "neither a run folder nor a finished comparison"),
        (("run", "digits", "--out", "file"), "cannot use file as a run folder"),
    ],
)
def test_bad_words_get_one_line_and_exit_code_2(words, message):
    Path("broken.toml").write_text("rounds = = 3")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("file").write_text("in the way")
    result = call(*words, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_a_warning_is_one_line():
    words = ["run", "digits", *map(str, SMALL), "--set", "algorithm.beta=auto", "--set", "local.steps=1"]
    said = subprocess.run([sys.executable, "-m", "gradalign", *words], capture_output=True, text=True).stderr
    assert [line for line in said.splitlines() if "warning" in line.lower()] == [
        "warning: with one local step a round fedga changes nothing: the model is the one without it; "
        "let clients take more local.steps or local.epochs"
    ]
