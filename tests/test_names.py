"""Names that become folders: whatever a recipe calls its entries, nothing is written outside the folder asked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gradalign as ga
from gradalign.comparison import plan_comparison
from gradalign.recipes import load_recipe
from gradalign.runs import output_folder, readable_name, safe_name

HOSTILE = ["", ".", "..", "...", "../..", "/", "/etc", "a/b", "a\\b", "\0", "a\0", ".lock", "-rf", "con", "NUL.txt"]
HOSTILE += [
    "x" * 300,
    "é" * 200,
    "summary.json",
    "compare.toml",
    "trials",
    "\x1b[2J",
    "\u202e",
    "\udc80",
    "a.",
    " ",
    "~",
]
NAMES = st.one_of(st.text(max_size=40), st.sampled_from(HOSTILE), st.text("./-\0 aA", max_size=6))


def is_one_step_inside(name: str) -> bool:
    inside = os.path.normpath(os.path.join("/out", name))
    return os.path.dirname(inside) == "/out" and os.path.basename(inside) == name


@pytest.mark.parametrize("make", [safe_name, readable_name])
@given(text=NAMES)
def test_a_name_is_one_step_inside_its_folder(make, text):
    name = make(text)
    assert is_one_step_inside(name)
    assert name.isprintable()
    assert not re.search(r"[/\\:*?\"<>|\0\s]", name)
    assert not name.startswith((".", "-"))
    assert not name.endswith(".")
    assert 0 < len(name.encode()) <= 255
    assert not re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name)
    assert name not in ("summary.json", "compare.toml", "report.html", "curves.png", "trials")


@given(first=NAMES, second=NAMES)
@example("a b", "a-b")
@example("..", "...")
@example("K=1", "K 1")
@example("x" * 300, "x" * 301)
@example("a b", safe_name("a b"))
def test_different_names_have_different_folders(first, second):
    assert (safe_name(first) == safe_name(second)) == (first == second)


@pytest.mark.parametrize("name", ["fedga", "fedga+fedprox", "K=1", "beta0.01", "fedga-2", "βeta_1"])
def test_usual_names_stay_as_they_are(name):
    assert safe_name(name) == readable_name(name) == name


@pytest.mark.parametrize("entry", HOSTILE[1:])
def test_comparisons_stay_inside_their_folder(tmp_path, entry):
    recipe = tmp_path / "r.toml"
    recipe.write_text("")
    loaded = load_recipe(str(recipe), ["rounds=1"])
    loaded.compare.settings[entry] = {"algorithm": {"name": "fedavg"}}
    out = tmp_path / "out"
    (planned,) = plan_comparison(loaded, [entry], 1, out)
    assert planned.folder.parent.parent == out
    assert Path(os.path.normpath(planned.folder)) == planned.folder


def test_names_that_differ_in_case_alone_are_refused(tmp_path):
    with pytest.raises(ga.GradalignError, match="names the same algorithm twice"):
        plan_comparison(load_recipe("digits"), ["fedga", "FedGA"], 1, tmp_path)
    recipe = load_recipe("digits")
    for entry, lr in (("mine", 0.1), ("Mine", 0.2)):
        recipe.compare.settings[entry] = {"algorithm": {"name": "fedavg"}, "local": {"lr": lr}}
    with pytest.raises(ga.GradalignError, match="would share a folder"):
        plan_comparison(recipe, ["mine", "Mine"], 1, tmp_path)


@pytest.mark.parametrize("name", ["../../x", "/x", "x" * 400, "\0"])
def test_the_folder_of_a_run_without_out_lies_in_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = output_folder(None, name, resume=False)
    assert folder.parent == Path("runs")
    folder.mkdir(parents=True)
