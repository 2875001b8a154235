"""The device: passed down to whatever computes, checked before anything is written, no part of the spec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradalign as ga
from conftest import Quadratics
from gradalign.runs.folder import read_spec
from test_cli import call

SMALL = ("--set", "rounds=1", "--set", "task.clients=5", "--set", "clients.per_round=2")
COMMANDS = {
    "run": ("run", "digits", *SMALL, "--workers", 0, "--out", "out"),
    "flower": ("run", "digits", *SMALL, "--engine", "flower", "--out", "out"),
    "compare": ("compare", "digits", *SMALL, "--algorithms", "fedavg", "--seeds", 1, "--workers", 0, "--out", "out"),
    "sweep": ("sweep", "digits", *SMALL, "--algorithm", "fedavg", "--grid", "lr=.1", "--grid", "batch=8", "--grid",
              "epochs=1", "--grid", "weight_decay=0", "--seeds", 1, "--finalists", 1, "--workers", 0, "--out", "out"),
    "diagnose": ("diagnose", "digits", "--clients", 3),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("gpu0", 'error: "gpu0" is not a device; give for example "cpu" or "cuda:0"\n'),
        ("meta", 'error: the device "meta" holds no numbers; give for example "cpu" or "cuda:0"\n'),
        ("cuda:99", 'error: the device "cuda:99" cannot be used here: '),
    ],
)
def test_a_wrong_device_is_one_sentence_before_anything_is_written(command, device, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*COMMANDS[command], "--device", device, code=2)
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_device_reaches_the_model(command, tmp_path, monkeypatch):
    """Every model that a command makes is put where --device says; cpu:0 is the processor under another name."""
    pytest.importorskip("flwr" if command == "flower" else "torch")
    monkeypatch.chdir(tmp_path)
    seen = []
    right = ga.Task.make_model

    def make_model(task, seed, device="cpu"):
        seen.append(str(device))
        return right(task, seed, device)

    monkeypatch.setattr(ga.Task, "make_model", make_model)
    call(*COMMANDS[command], "--device", "cpu:0")
    assert "cpu:0" in seen
    if command in ("run", "flower"):
        assert "device" not in read_spec(Path("out"))
        call(*COMMANDS[command], "--device", "cpu", "--resume")  # it may go on elsewhere


def test_python_too():
    task = Quadratics.make(2).task()
    with pytest.raises(ga.GradalignError, match="not a device"):
        ga.run(task, ga.FedAvg(), device="gpu0")
    result = ga.run(task, ga.FedAvg(), rounds=1, device=torch.device("cpu"), workers=0)
    assert result.summary["rounds"] == 1


def test_a_recipe_may_name_the_device(tmp_path, monkeypatch):
    """It is no part of the spec, and --device goes over it."""
    monkeypatch.chdir(tmp_path)
    text = 'rounds = 1\n{}\n[task]\nname = "digits"\nclients = 5\n[algorithm]\nname = "fedavg"\n'
    Path("my.toml").write_text(text.format('device = "gpu0"'))
    for command in ("run", "compare", "sweep"):
        assert '"gpu0" is not a device' in call(command, "my.toml", "--out", "out", code=2).stderr
    assert not Path("out").exists()
    call("run", "my.toml", "--device", "cpu", "--workers", 0, "--out", "out")
    assert "device" not in read_spec(Path("out"))
    call("run", "my.toml", "--set", "device=cpu:0", "--resume", "--out", "out")
    Path("my.toml").write_text(text.format("device = 3"))
    assert "device must be a word such as" in call("run", "my.toml", code=2).stderr


def test_on_another_device_than_the_processor_the_bits_are_the_same():
    """On one that holds the processor's numbers, but does not mix with it; see ``accelerator``."""
    pytest.importorskip("flwr")
    registration = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot have devices made in Python")
    script = Path(__file__).with_name("accelerator.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 6
    assert all(line.endswith(", same") for line in told), told
