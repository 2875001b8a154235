"""The README's example runs as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gradalign.recipes.build import build_federation
from gradalign.recipes.spec import validate
from gradalign.recipes.tracking import TrackingSpec

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readmes_python_example_trains(capsys):
    code, own_loop = [text for kind, text in BLOCKS if kind == "python"]
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    exec(compile(own_loop, "README.md", "exec"), names)
    assert float(names["loss"]) < 0.5
    accuracy = float(capsys.readouterr().out.splitlines()[0])
    assert accuracy > 0.8


def test_the_readmes_recipe_is_valid():
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    federation = build_federation(validate(tomllib.loads(text), "README.md"))
    assert federation.algorithm.label == "fedga+fedadam"


def test_the_tracking_pages_example_and_recipe(capsys):
    page = (ROOT / "docs/tracking.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL))
    exec(compile(blocks["python"], "docs/tracking.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("halves-fedga-seed0: ")
    assert said[-1] == "done"
    spec = TrackingSpec.model_validate(tomllib.loads(blocks["toml"]))
    assert spec.tensorboard
    assert spec.wandb.tags == ["heterogeneous"]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/flower.md",
        "docs/sweeps.md",
        "docs/large-batches.md",
        "docs/local-training.md",
        "docs/own-algorithm.md",
        "docs/report.md",
        "docs/theory.md",
        "docs/torchrun.md",
        "docs/tracking.md",
        "docs/trainers.md",
        "docs/tutorial-own-data.md",
        "docs/results.md",
        "docs/reproduce.md",
        "docs/results-and-metrics.md",
        "examples/flower-fedga/README.md",
    ],
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_the_examples_of_the_page_on_results(capsys):
    page = (ROOT / "docs/results-and-metrics.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL))
    exec(compile(blocks["python"], "docs/results-and-metrics.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("<Result: fedavg, ")
    assert all(0.0 <= float(number) <= 1.0 for number in (said[1] + " " + said[2]).split())
    spec = validate(tomllib.loads(blocks["toml"]), "docs/results-and-metrics.md")
    assert list(build_federation(spec).task.metrics) == ["f1", "auc"]
    assert spec.measure.early_stopping.patience == 5
