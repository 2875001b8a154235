"""Corners found by trying to break things: each was once a wrong number, a lost file or a traceback."""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import blobs, vector
from gradalign.client.trainer import Setup
from gradalign.tasks.task import share_correct
from test_cli import SMALL, call

LOCAL = ga.LocalTraining(lr=0.1, steps=2, batch_size=7)
WORKERS = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Noisy:
    """A dataset that augments with torch's and NumPy's global generators, also when it is a test set."""

    def __init__(self, pair) -> None:
        self.inputs, self.targets = pair

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        return self.inputs[index] + torch.randn(8) * float(np.random.rand()), self.targets[index]


def test_random_data_follows_the_seed_whoever_reads_it():
    task = blobs()
    noisy = ga.Task(model=task.model, clients=[Noisy(c) for c in task.clients], test=Noisy(task.test))
    runs = [ga.run(noisy, ga.FedGA(beta=0.1), rounds=2, local=LOCAL, workers=w) for w in WORKERS]
    for run in runs[1:]:
        assert torch.equal(vector(run), vector(runs[0]))
        assert run.history["test_loss"] == runs[0].history["test_loss"]


class Lazy:
    """Clients made on demand, from the global generator."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int):
        return torch.randn(9, 8), torch.randint(4, (9,))


def test_clients_made_on_demand_are_the_same_for_everyone():
    task = ga.Task(model=blobs().model, clients=Lazy())
    runs = [ga.run(task, ga.FedAvg(), rounds=2, local=LOCAL, weights="examples", workers=w, seed=3) for w in WORKERS]
    assert all(torch.equal(vector(run), vector(runs[0])) for run in runs[1:])


class Remembering(nn.Module):
    """State that is not exchanged: a buffer outside the state dict and a frozen parameter, both updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(8), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += inputs.mean(dim=0)
            self.frozen += 0.1
        return self.layer(inputs + 0.01 * self.seen + self.frozen)


def test_nothing_leaks_from_one_client_to_the_next():
    task = ga.Task(model=Remembering, clients=blobs().clients)
    runs = [ga.run(task, ga.FedAvg(), rounds=2, local=LOCAL, workers=w) for w in WORKERS]
    assert all(torch.equal(vector(run), vector(runs[0])) for run in runs[1:])


def test_the_gradient_phase_makes_no_batch_of_one():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(601, 8, generator=generator), torch.randint(4, (601,), generator=generator)
    ga.run(ga.Task(model=blobs().model, clients=[data]), ga.FedGA(beta=0.1), rounds=1, local=LOCAL, workers=0)


def test_a_run_that_never_began_does_not_block_its_folder():
    task = blobs()
    broken = replace(task, model=lambda: 1 / 0)
    with pytest.raises(ga.GradalignError, match="could not be made: ZeroDivisionError"):
        ga.run(broken, ga.FedAvg(), rounds=1, local=LOCAL, workers=0, out="r")
    endless = replace(task, loss=lambda outputs, targets: outputs.sum() * float("nan"))
    with pytest.raises(ga.DivergedError, match="before any training; look at the model, the loss or the data"):
        ga.run(endless, ga.FedAvg(), rounds=1, local=LOCAL, workers=0, out="r")
    ga.run(task, ga.FedAvg(), rounds=1, local=LOCAL, workers=0, out="r")


def test_odd_facts_and_numbers_are_written_down():
    task = replace(blobs(), facts={"source": Path("x"), "count": np.int64(3), "mean": float("nan"), "none": None})
    local = ga.LocalTraining(lr=torch.tensor(0.1), steps=np.int64(2))
    ga.run(task, ga.FedGA(beta=np.float32(0.5)), rounds=1, local=local, workers=0, out="r")
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["task"]["count"] == 3
    assert summary["task"]["source"] == "x"
    assert "beta = 0.5" in Path("r/spec.toml").read_text()


@pytest.mark.parametrize(
    "lr",
    [ga.Warmup(value=0.1, rounds=2), ga.Cosine(value=0.1, rounds=3), ga.OffUntil(value=0.1, round=2)],
    ids=["warmup", "cosine", "off"],
)
def test_learning_rates_may_pass_through_zero(lr):
    local = ga.LocalTraining(lr=lr, steps=2)
    result = ga.run(blobs(), ga.Scaffold(control="kept"), rounds=4, local=local, workers=0)
    assert all(value is None or np.isfinite(value) for value in result.history["local_loss"])


def test_accuracy_of_sequences_and_pictures():
    scores = torch.zeros(2, 3, 5)
    scores[0, 0, 1] = scores[0, 1, 2] = 1.0
    labels = torch.tensor([[1, 2, 0], [4, 0, 0]])
    assert float(share_correct(scores, labels)) == pytest.approx(5 / 6), "classes last: all right but the 4"
    assert float(share_correct(scores.transpose(1, 2), labels)) == pytest.approx(5 / 6), "classes second"
    assert share_correct(torch.zeros(2, 7, 9), labels) is None
    assert share_correct(torch.zeros(6), torch.zeros(6, dtype=torch.int64)) is None


def test_another_model_is_refused_on_resume():
    task = blobs()
    options = {"rounds": 3, "workers": 0, "out": "r", "resume": True}
    with pytest.raises(ga.DivergedError):
        ga.run(task, ga.FedAvg(), local=ga.LocalTraining(lr=ga.Steps(value=0.1, at_rounds={1: 1e30})), **options)
    other = replace(task, model=lambda: nn.Linear(8, 4))
    with pytest.raises(ga.GradalignError, match="holds a model with 244 parameters"):
        ga.run(other, ga.FedAvg(), local=ga.LocalTraining(lr=ga.Steps(value=0.1, at_rounds={1: 1e30})), **options)


def test_buffers_keep_their_precision():
    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)
            self.register_buffer("pi", torch.tensor(np.pi, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs)

    task = replace(blobs(), model=Precise)
    assert float(ga.run(task, ga.FedAvg(), rounds=1, local=LOCAL, workers=0).model.pi) == np.pi
    rotating = nn.Linear(8, 4)
    rotating.register_buffer("phase", torch.tensor(1 + 2j))
    with pytest.raises(ga.GradalignError, match="the buffer phase is complex"):
        ga.run(replace(task, model=rotating), ga.FedAvg(), rounds=1, workers=0)


def test_workers_do_not_hold_the_locks_of_other_runs():
    """A run's lock ends with the run, also while another run's workers, forked in between, live on."""
    from gradalign.engines.pool import PoolEngine
    from gradalign.runs.locks import locked

    with locked(Path("a")):
        engine = PoolEngine(Setup(task=blobs(), local=LOCAL), 1)
    with engine, locked(Path("a")):
        assert engine.worker_pids()


def test_runs_in_threads_finish_and_agree():
    expected = vector(ga.run(blobs(), ga.FedGA(beta=0.1), rounds=2, local=LOCAL, workers=0))
    found: list[torch.Tensor] = []

    def work(workers: int) -> None:
        found.append(vector(ga.run(blobs(), ga.FedGA(beta=0.1), rounds=2, local=LOCAL, workers=workers)))

    threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in (0, 0, 2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


def _nested(_: int) -> list[float]:
    return vector(ga.run(blobs(), ga.FedAvg(), rounds=1, local=LOCAL)).tolist()


def test_inside_a_daemonic_worker_the_run_stays_in_process():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_nested, [0])[0] == _nested(0)


@pytest.mark.parametrize(
    ("call_it", "message"),
    [
        (lambda t: ga.run(t, ga.FedAvg(), seed=-1), "seed must be a whole number of at least 0"),
        (lambda t: ga.run(t, ga.FedAvg(), rounds=2.5), "rounds must be a whole number of at least 1"),
        (lambda t: ga.run(t, ga.FedAvg(), local={"lr": 0.1}), "local must be a gradalign.LocalTraining, got dict"),
        (lambda t: ga.run(t, ga.FedAvg(), device="foo"), '"foo" is not a device'),
        (lambda t: ga.run(t, ga.FedAvg(), workers=-1), "workers must be a whole number of at least 0"),
        (lambda t: ga.Task(model=t.model, clients=3), "Task.clients must be a sequence"),
        (lambda t: ga.Task(model=t.model, clients=[(torch.tensor(1.0), torch.tensor(1))]), "one entry per example"),
        (lambda t: ga.Measure(train_clients=0), "measure.train_clients must be a whole number of at least 1"),
        (lambda t: ga.FedGA(beta="0.1"), 'algorithm.beta must be a number, a schedule or "auto", got "0.1"'),
        (lambda t: ga.LocalTraining(steps=2.5), "local.steps must be a whole number"),
    ],
)
def test_python_mistakes_get_a_sentence(call_it, message):
    with pytest.raises(ga.GradalignError, match=message):
        call_it(blobs())


def test_no_grad_around_a_run_and_odd_arrays_are_fine():
    inputs, labels = np.random.default_rng(0).normal(size=(12, 8))[::-1], np.arange(12)[::-1] % 4
    task = ga.Task(model=lambda: nn.Linear(8, 4), clients=[(inputs, labels)])
    for fast in (True, False):
        with torch.no_grad():
            ga.run(task, ga.FedGA(beta=0.1), rounds=1, local=LOCAL, workers=0, fast=fast)


def test_clients_of_a_partition_behave_like_a_sequence():
    clients = ga.PartitionedClients((torch.arange(5.0), torch.arange(5)), [[0, 1], [2], [3, 4]])
    assert [len(client) for client in clients] == [2, 1, 2]
    assert len(clients[-1]) == 2
    assert [len(client) for client in clients[1:]] == [1, 2]
    with pytest.raises(IndexError):
        clients[3]


def test_compare_refuses_folders_that_are_not_its_own():
    call("run", "digits", *SMALL, "--out", "run")
    before = Path("run/summary.json").read_bytes()
    small = (*SMALL, "--seeds", 1, "--algorithms")
    assert "holds a single run" in call("compare", *small, "fedavg", "--out", "run", code=2).stderr
    assert Path("run/summary.json").read_bytes() == before
    call("compare", *small, "fedavg", "--out", "c")
    kept = Path("c/summary.json").read_bytes()
    assert "already holds a comparison" in call("compare", *small, "fedprox", "--out", "c", code=2).stderr
    resumed = call("compare", *small, "fedprox", "--out", "c", "--resume", code=2).stderr
    assert "holds another comparison: algorithms (['fedavg'] there, ['fedprox'] now)" in resumed
    assert Path("c/summary.json").read_bytes() == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "algorithm=3"), "algorithm: must be a table of settings"),
        (("--set", "seed=abc"), "seed: must be a valid integer"),
        (("--set", "seed=1.7"), "seed: must be a valid integer"),
        (("--set", "compare.settings.fedga.algorithm=3"), "compare.settings.fedga.algorithm must be a table"),
        (("--set", "compare.algoritms=3"), 'did you mean "algorithms"?'),
        (("--algorithms", "fedga,FEDGA"), "names the same algorithm twice"),
        (("--algorithms", "fedavg", "--set", "algorithm.beta=9"), "none of fedavg has such a parameter"),
        (("--algorithms", "fedavg", "--set", "server.momentum=0.5"), "none of fedavg has such a parameter"),
        (("--set", "task.seed=3"), "task.seed is not a setting"),
    ],
)
def test_comparisons_mistakes_get_one_line(words, message):
    result = call("compare", "digits", "--workers", 0, "--out", "c", *words, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("c").exists()


def test_another_algorithm_on_the_command_line_leaves_the_recipes_parameters_behind():
    call("run", "digits", *SMALL, "--set", "algorithm.name=fedavg", "--out", "r")
    assert json.loads(Path("r/summary.json").read_text())["algorithm"] == "fedavg"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no file')", "importing broken failed: ValueError: no file"),
        ("def task(:", "importing broken failed: SyntaxError"),
        ("def task():\n    raise OSError('disk')", "the task broken:task could not be made: OSError: disk"),
        ("def task():\n    return {}", "must return a gradalign.Task, got dict"),
        ("task = 3", "is not a function"),
    ],
)
def test_broken_tasks_get_one_line(code, message, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("broken.py").write_text(code)
    words = ("--set", "task={name='broken:task'}", "--set", "algorithm.name=fedavg")
    Path("r.toml").write_text("rounds = 1\n")
    result = call("run", "r.toml", "--workers", 0, "--out", "r", *words, code=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_resume_without_a_folder_is_refused(tmp_path):
    task = ga.Task(model=lambda: torch.nn.Linear(2, 2), clients=[(torch.zeros(2, 2), torch.tensor([0, 1]))])
    with pytest.raises(ga.GradalignError, match="resume=True needs out="):
        ga.run(task, ga.FedAvg(), rounds=1, resume=True, workers=0)


def test_an_empty_name_among_algorithms_is_refused(tmp_path):
    done = call("compare", "digits", "--algorithms", "fedga,,fedavg", "--out", tmp_path / "c", code=2)
    assert "one is empty" in done.stderr
    assert not (tmp_path / "c").exists()
