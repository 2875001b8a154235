"""The examples run as their first lines say, in seconds, and learn."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from test_distributed import environment, torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"


def accuracies(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"test accuracy (\d\.\d+)", text)]


def test_the_loop_learns_in_both_ways():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "gradalign_loop.py")], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    found = accuracies(done.stdout)
    assert len(found) == 2
    assert min(found) > 0.9
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.parametrize(
    "words",
    ["trainer_lightning.py", "trainer_lightning.py --automatic", "trainer_accelerate.py", "trainer_transformers.py"],
)
def test_the_trainers_examples_learn_and_are_short(words, monkeypatch, capsys):
    """In this process: importing the trainers takes longer than the examples."""
    path = EXAMPLES / words.split()[0]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(path), *words.split()[1:]])
    AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert "60 steps" in said
    assert accuracies(said)[0] > 0.9
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_the_sharded_example_learns():
    done = torchrun(2, str(EXAMPLES / "gradalign_fsdp.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert accuracies(done.stdout)[0] > 0.9


def test_the_ddp_example_learns_and_its_ranks_stay_equal():
    done = torchrun(2, str(EXAMPLES / "gradalign_ddp.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert accuracies(done.stdout)[0] > 0.9
    assert "equal: True" in done.stdout
