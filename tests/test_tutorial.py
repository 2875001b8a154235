"""The tutorial's code, exactly as it is printed, does what the tutorial says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from test_cli import call

PAGE = Path(__file__).parent.parent / "docs/tutorial-own-data.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
SHORT = ("--set", "rounds=6", "--workers", 0)


@pytest.fixture
def _written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "waves", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for kind, text in BLOCKS:
        if kind in ("python", "toml"):
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "make_patients.py"], check=True)


@pytest.mark.usefixtures("_written")
def test_the_tutorials_commands_work():
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert commands.pop(0) == ["python", "make_patients.py"]
    short = {"run": SHORT, "compare": (*SHORT, "--seeds", 1), "sweep": (*SHORT, "--seeds", 1, "--finalists", 1)}
    outputs = [call(*words[1:], *short.get(words[1], ())).stdout for words in commands]
    assert "alignment has something to act on" in " ".join(outputs[0].split())
    first = json.loads(Path("runs/patients-fedga-seed0/summary.json").read_text())
    assert first["task"]["clients"] == 3
    assert first["client_names"] == ["north", "south", "west"]
    assert first["best_test_accuracy"] > 0.8
    assert first["final_clients_worst_accuracy"] > 0.7
    said = (
        next(text for kind, text in BLOCKS if kind == "text").splitlines()[0].split(maxsplit=1)[1].removesuffix(", …")
    )
    assert said in " ".join(outputs[1].split()), "the numbers are the page's"
    age = json.loads(Path("runs/patients-fedga-seed0-2/summary.json").read_text())
    assert age["final_test_accuracy"] is None
    assert age["final_test_r2"] > 0.3
    assert "patient_id (an id: whole numbers, all different)" in first["task"]["left out"]
    spec = json.loads(call("show", "runs/patients-fedga-seed0-4", "--json").stdout)["spec"]
    assert (spec["task"]["hidden"], spec["task"]["statistics"]) == (32, "federation")
    report = Path("runs/compare-patients/report.html").read_text(encoding="utf-8")
    assert all(name in report for name in ("fedga", "fedavg", "north", "south", "west"))
    assert Path("runs/sweep-patients-fedga/best.toml").exists()
    assert Path("waves-task-partition.png").exists()


@pytest.mark.usefixtures("_written")
def test_the_tutorials_script_works():
    done = subprocess.run([sys.executable, "in_python.py"], check=True, capture_output=True, text=True)
    whole, *clinics = done.stdout.splitlines()
    assert float(whole.split("%")[0]) > 85
    assert [line.split(":")[0] for line in clinics] == ["north", "south", "west"]
