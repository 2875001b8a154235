"""A recipe is code: one that lies in a run folder does not run a stranger's without being asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradalign.recipes.trust import lies_in_run_folder
from gradalign.watch import Followed
from run_folders import rows_of, spec_of
from test_cli import call

TASK = """
from pathlib import Path
Path("imported").touch()
import torch
import gradalign as ga

def make():
    x = torch.arange(12.0).reshape(6, 2)
    return ga.Task(name="theirs", model=lambda: torch.nn.Linear(2, 2), clients=[(x[:2], x[:2].long()[:, 0] % 2),
                   (x[2:], x[2:].long()[:, 0] % 2)], test=(x, x.long()[:, 0] % 2))
"""
RECIPE = """
name = "theirs"
rounds = 2
task.name = "TASK"
algorithm.name = "fedavg"
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def module(request) -> str:
    """A module whose import leaves a trace; every test has its own name, since modules are imported once."""
    name = f"theirs_{abs(hash(request.node.name))}"
    Path(f"{name}.py").write_text(TASK)
    return name


def given_run(module: str, folder: str = "given") -> Path:
    """Write what somebody may send: a run that is not finished."""
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "spec.toml").write_text(RECIPE.replace("TASK", f"{module}:make"))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(0.5, 1)))
    return path


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_a_spec_from_a_run_folder_is_not_imported_unasked(command, module):
    recipe = given_run(module) / "spec.toml"
    told = call(command, recipe, "--out", "out", "--workers", 0, code=2).stderr
    assert "given/spec.toml lies in a run folder" in told
    assert f"{module}:make" in told
    assert "--trust-task" in told
    assert told.count("\n") == 1
    assert not Path("imported").exists()
    assert not Path("out").exists()


def test_copies_links_and_recipes_below_are_in_a_run_folder_too(module):
    folder = given_run(module)
    (folder / "deeper/yet").mkdir(parents=True)
    for copy in ("best.toml", "deeper/yet/recipe.toml"):
        (folder / copy).write_bytes((folder / "spec.toml").read_bytes())
    Path("link.toml").symlink_to(folder / "best.toml")
    Path("sweep").mkdir()
    Path("sweep/sweep.toml").touch()
    for recipe in ("given/best.toml", "given/deeper/yet/recipe.toml", "link.toml", "sweep/best.toml", "spec.toml"):
        assert lies_in_run_folder(Path(recipe)), recipe
    assert not lies_in_run_folder(Path("mine.toml"))
    call("run", "link.toml", "--resume", "--out", folder, code=2)
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    "vouching", [("--trust-task",), ("--task", "MODULE:make"), ("--set", "task.name=MODULE:make")], ids=lambda v: v[0]
)
def test_the_user_may_vouch_for_a_task(vouching, module):
    words = [word.replace("MODULE", module) for word in vouching]
    call("run", given_run(module) / "spec.toml", *words, "--workers", 0, "--out", "out")
    assert Path("imported").exists()
    assert Path("out/summary.json").exists()


def test_vouching_for_one_task_is_not_vouching_for_another(module):
    folder = given_run(module)
    hidden = '[compare]\nalgorithms = ["a"]\n[compare.settings.a]\nalgorithm.name = "fedavg"\ntask.name = "TASK"\n'
    text = RECIPE.replace("TASK", "digits") + hidden.replace("TASK", f"{module}:make")
    (folder / "own.toml").write_text(text)
    for words in ((), ("--task", "json:loads")):
        call("compare", folder / "own.toml", *words, "--out", "out", "--workers", 0, code=2)
    assert not Path("imported").exists()


def test_ones_own_recipe_resumes_its_folder_without_a_flag(module):
    Path("mine.toml").write_text(RECIPE.replace("TASK", f"{module}:make"))
    call("run", "mine.toml", "--workers", 0, "--out", "runs/mine")
    Path("runs/mine/summary.json").unlink()
    call("run", "mine.toml", "--workers", 0, "--out", "runs/mine", "--resume")
    assert Path("runs/mine/summary.json").exists()


def test_watching_and_reporting_advise_nobody_to_run_a_strangers_code(module):
    followed = Followed(given_run(module), entry="r", spec={"name": "theirs", "task": {"name": "os:system"}})
    assert followed.resume_command() == "gradalign run RECIPE --out given --resume (RECIPE and options as before)"
    shown = call("watch", "given", "--once").stdout
    assert "spec.toml" not in shown
    for name, task in (("theirs", "os:system"), ("ours", "digits")):
        folder = Path(name)
        folder.mkdir()
        spec = spec_of() | {"task": {"name": task}}
        (folder / "spec.toml").write_text(_toml(spec))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(0.5)))
        (folder / "summary.json").write_text(json.dumps({"rounds": 4, "seed": 0}))
        call("report", folder, "-o", f"{name}.html")
        page = Path(f"{name}.html").read_text()
        assert ("gradalign compare" in page) == (name == "ours")
        assert ("FOLDER/spec.toml" in page) == (name == "ours")
        assert ("names code that does not come with gradalign: <code>os:system</code>" in page) == (name == "theirs")
    assert not Path("imported").exists()


def _toml(table: dict) -> str:
    import tomli_w

    return tomli_w.dumps(table)
