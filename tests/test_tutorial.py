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


@pytest.fixture
def _written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "patients", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for kind, text in BLOCKS:
        if kind in ("python", "toml"):
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("_written")
def test_the_tutorials_commands_work():
    (shell,) = [text for kind, text in BLOCKS if kind == "sh"]
    commands = [shlex.split(line, comments=True) for line in shell.splitlines()]
    assert commands[0][0] == "python"
    subprocess.run([sys.executable, *commands[0][1:]], check=True)
    outputs = [
        call(*words[1:], *(() if words[1] == "data" else ("--workers", 0, "--set", "rounds=6")))
        for words in commands[1:]
    ]
    first = json.loads(Path("runs/patients-fedga-seed0/summary.json").read_text())
    assert first["task"]["clients"] == 3
    assert first["best_test_accuracy"] > 0.8
    spec = json.loads(call("show", "runs/patients-fedga-seed0-2", "--json").stdout)["spec"]
    assert spec["task"]["hidden"] == 32
    assert "fedavg" in outputs[2].stdout
    assert Path("runs/compare-patients/curves.png").exists()
    assert Path("patients-task-partition.png").exists()
