"""Ranks under torchrun: the same steps as one process, two all-reduces each; and the distributed engine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gradalign as ga
from conftest import vector
from gradalign.cli.app import app
from gradalign.runs.metrics import read_metrics
from ranks_at_work import SETTINGS, one_process, run_in_one_trip, run_of_everything, run_with_silent_clients

TESTS = Path(__file__).parent
SOURCE = Path(ga.__file__).parents[1]  # what is tested here is tested in the ranks, too
# A fault of torch 2.13, not ours: once DDP was used, gloo's threads outlive destroy_process_group, and one that drops a
# tensor while the interpreter ends aborts the process, rarely (github.com/pytorch/pytorch/issues/190489). Try again.
TORN_DOWN_BADLY = "terminate called without an active exception"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def torchrun(ranks: int, *command: str, seconds: float = 120.0, cwd: Path | None = None):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for _ in range(2):
        done = subprocess.run(
            [*launcher, *command], env=environment(), capture_output=True, text=True, timeout=seconds, cwd=cwd
        )
        if TORN_DOWN_BADLY not in done.stderr:
            break
    return done


@pytest.fixture(scope="module", params=[2, 3])
def reports(request, tmp_path_factory):
    ranks = request.param
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    done = torchrun(ranks, str(TESTS / "ranks_at_work.py"), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_take_the_steps_of_one_process_with_as_many_parts(reports, name):
    expected = one_process(name, len(reports))
    found = reports[0]["ends"][name][0]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for report in reports[1:]:
        assert torch.equal(report["ends"][name][0], found), "the ranks' parameters stay equal, to the bit"


def test_a_step_costs_two_all_reduces_and_nothing_else(reports):
    counts = {name: calls for name, (_, calls) in reports[0]["ends"].items()}
    for name in ("closure", "verbs", "ddp closure", "ddp verbs", "low", "two parts each", "clipped"):
        assert counts[name] == [2, 2, 2, 2], name
    assert counts["plain"] == [1, 1, 1, 1]
    assert counts["every"] == [2, 1, 2, 1]
    assert counts["reuse"] == counts["reuse verbs"] == [2, 1, 1, 1]
    assert counts["ddp overlap"] == [1, 1, 1, 1], "the second is DDP's own, in buckets"


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(reports):
    assert [report["skips"] for report in reports] == [(1, True)] * len(reports)


def test_parameters_without_gradients(reports):
    assert [report["unused"] for report in reports] == [[True, True, False]] * len(reports)


def test_averaging_by_ddp_before_alignment_is_noticed(reports):
    for report in reports:
        assert "give it as GradAlign(..., model=model)" in report["complaints"]["closure"]
        assert "inside model.no_sync()" in report["complaints"]["verbs"]


def test_the_runner_gives_every_rank_the_local_engines_bits(reports):
    expected = run_of_everything("local")
    for report in reports:
        assert torch.equal(report["run"], vector(expected))
        assert report["test accuracy"] == expected.history["test_accuracy"]
        assert report["widest"] == expected.history["test_widest"]
        assert report["clients"] == [asdict(one) for one in (*expected.clients, *expected.personalized)]
    assert [one.client for one in expected.clients] == [1, 2, 3, 4, 5]


def test_ranks_with_uneven_shares_of_the_training_give_the_local_engines_bits(reports):
    expected = run_with_silent_clients("local")
    assert set(expected.history["reported"]) - {None} != {8}
    for report in reports:
        assert torch.equal(report["silent"], vector(expected))


def test_one_trip_a_round_gives_the_local_engines_bits(reports):
    expected = run_in_one_trip("local")
    assert expected.history["beta"][-1] > 0.0
    for report in reports:
        assert torch.equal(report["one trip"], vector(expected))


TASK = """
import os, signal
from conftest import blobs
import gradalign as ga

class Mortal:
    def __init__(self, examples):
        self.inputs, self.targets = examples

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if os.environ.get("RANK", "none") == os.environ.get("VICTIM") and os.path.exists("runs/checkpoint.safetensors"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[index], self.targets[index]

def make(seed):
    task = blobs()
    return ga.Task(model=task.model, clients=[Mortal(client) for client in task.clients], test=task.test)
"""
RECIPE = """
rounds = 6
[task]
name = "mortal:make"
[algorithm]
name = "fedga"
beta = 0.1
[local]
lr = 0.1
steps = 2
batch_size = 8
"""
RUN = ("-m", "gradalign", "run", "recipe.toml", "--checkpoint-seconds", "0")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_rank_ends_the_job_and_others_resume_it_to_the_same_bits(tmp_path, monkeypatch, victim):
    (tmp_path / "mortal.py").write_text(TASK)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.setenv("VICTIM", str(victim))
    killed = torchrun(2, *RUN, "--out", "runs", cwd=tmp_path)  # waits 120 seconds at most, and needs a few
    assert killed.returncode != 0
    named = f"error: rank {victim} of the job ended before its work was done; continue with the same command"
    # Rank 1 may be inside a call of gloo's when rank 0 dies, and torchrun then ends it before it can speak.
    words = (named, "stopped by torchrun", *(["Signal 9 (SIGKILL) received"] if victim == 0 else []))
    assert any(word in killed.stderr for word in words)
    assert not (tmp_path / "runs" / "summary.json").exists()
    monkeypatch.delenv("VICTIM")
    if victim == 0:
        return
    resumed = torchrun(3, *RUN, "--out", "runs", "--resume", "--set", "tensorboard=true", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert resumed.stdout.count("test accuracy") == 1, "rank 0 alone prints"
    assert len(list((tmp_path / "runs/tensorboard").iterdir())) == 1, "rank 0 alone tracks"
    alone = subprocess.run(
        [sys.executable, *RUN, "--out", "alone", "--workers", "0"], cwd=tmp_path, env=environment(), capture_output=True
    )
    assert alone.returncode == 0, alone.stderr
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("runs", "alone")]
    assert models[0] == models[1]
    rows = [read_metrics(tmp_path / name) for name in ("runs", "alone")]
    assert [row["train_loss"] for row in rows[0]] == [row["train_loss"] for row in rows[1]]


def test_without_ranks_the_distributed_engine_says_how_to_start_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "digits", "--engine", "distributed"])
    assert done.exit_code == 2
    assert "torchrun --nproc-per-node N -m gradalign run RECIPE" in done.stderr
    unknown = CliRunner().invoke(app, ["run", "digits", "--engine", "carrier-pigeon"])
    assert unknown.exit_code == 2
    assert "the engine must be" in unknown.stderr
    assert not list(tmp_path.rglob("spec.toml")), "nothing is left behind"
