"""What each extra is for: torch and numpy alone serve the optimizer and a run without a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PYPROJECT["optional-dependencies"]
NAMES = {"tomli-w": "tomli_w"}  # the others are imported by the name they are installed by
OPTIONAL = [
    *("safetensors", "tomli_w", "pydantic", "typer", "rich", "requests", "matplotlib"),
    *("jinja2", "plotly", "scipy", "optuna", "flwr", "tensorboard", "wandb", "sklearn", "pandas", "torchmetrics"),
    "polars",  # of no extra: taken where it is there
    *("pyarrow", "lightning", "accelerate", "transformers"),
]

BARE = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None  # how Python notes a package that cannot be imported
"""
TASK = """
import torch
import gradalign as ga
x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
data = [(x[i::4], (x[i::4, 0] > 0).long()) for i in range(4)]
task = ga.Task(model=lambda: torch.nn.Linear(2, 2), clients=data, test=data[0])
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", BARE + code]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=dict(os.environ), timeout=120)


def packages(extra: str) -> set[str]:
    """Return all that an extra brings, by the names that are imported."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        name = requirement.split(">")[0].split("<")[0]
        if name.startswith("gradalign["):
            for other in name[len("gradalign[") : -1].split(","):
                found |= packages(other)
        else:
            found.add(NAMES.get(name, name))
    return found


def test_what_is_required_is_torch_and_numpy():
    assert {name.split(">")[0] for name in PYPROJECT["dependencies"]} == {"torch", "numpy"}
    assert packages("runs") < packages("recipes") < packages("cli") < packages("all")
    assert packages("all") == packages("cli") | packages("report") | packages("sweep") | packages("tables")


def test_torch_and_numpy_serve_the_optimizer_and_a_run_without_a_folder(tmp_path):
    code = """
model = torch.nn.Linear(2, 2)
optimizer = ga.GradAlign(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.1)
optimizer.step(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), x, (x[:, 0] > 0).long(), parts=4)
result = ga.run(task, ga.FedGA(beta=0.1) + ga.FedAdam(lr=0.1), rounds=2, workers=2)
ga.run(task, ga.FedGA(beta=ga.Warmup(value=0.1, rounds=2)), rounds=1, workers=0)
print(result.summary["rounds"])
"""
    done = run(TASK + code, tmp_path)
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert not list(tmp_path.iterdir())


CALLS = {
    "runs": "ga.run(task, ga.FedAvg(), rounds=1, workers=0, out='r')",
    "metrics": "ga.run(task, ga.FedAvg(), rounds=1, workers=0, measure=ga.Measure(metrics=['f1']))",
    "frames": "ga.run(task, ga.FedAvg(), rounds=1, workers=0).to_frame()",
    "plots": "ga.run(task, ga.FedAvg(), rounds=1, workers=0).plot()",
    "tensorboard": "ga.TensorBoard()",
    "wandb": "ga.WeightsAndBiases()",
    "flower": "ga.run(task, ga.FedAvg(), rounds=1, engine='flower')",
    "tables": "ga.table_task('t.csv', 'y', 'who')",
    "recipes": "import gradalign.recipes; gradalign.recipes.load_recipe('digits')",
    "lightning": "import gradalign.lightning",
    "accelerate": "import gradalign.accelerate",
    "transformers": "import gradalign.transformers",
    "report": "from gradalign.report import write_report; write_report([], 'page.html')",
}


def test_a_missing_extra_is_one_sentence_before_anything_is_done(tmp_path):
    tried = "".join(
        f"try:\n    {call}\nexcept ga.GradalignError as error:\n    print(error)\n" for call in CALLS.values()
    )
    done = run(TASK + tried, tmp_path)
    assert done.stderr == ""
    sentences = done.stdout.splitlines()
    assert len(sentences) == len(CALLS)
    for extra, sentence in zip(CALLS, sentences, strict=True):
        assert f"pip install 'gradalign[{extra}]'" in sentence
        named = [name for name in OPTIONAL if f"the package {name};" in sentence]
        assert all(name in packages(extra) for name in named)
    assert not list(tmp_path.iterdir())
