"""Run folders: complete, atomic, and resumed to the same bits after any end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gradalign as ga
from conftest import blobs, hear_ctrl_c, vector
from gradalign.runs import differing_fields
from gradalign.runs.metrics import read_metrics

LOCAL = ga.LocalTraining(lr=0.1, steps=3, batch_size=8)
KEEPING = ga.FedGA(beta=0.1) + ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1) + ga.FedYogi(lr=0.05)

RECIPE = """
name = "small"
rounds = 25
[task]
clients = 8
classes_per_client = 3
[algorithm]
name = "fedga+scaffold+fedadam"
control = "kept"
beta = 0.1
[server]
lr = 0.05
[local]
lr = 0.1
steps = 4
batch_size = 16
[clients]
per_round = 4
[measure]
test_every = 2
train_every = 5
"""


def without_time(folder: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(folder)]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gradalign", *(str(word) for word in words)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def test_a_folder_holds_all_of_a_run(tmp_path):
    result = ga.run(blobs(), KEEPING, rounds=4, clients_per_round=3, local=LOCAL, workers=0, out=tmp_path / "r")
    names = {path.name for path in (tmp_path / "r").iterdir() if not path.name.startswith(".")}
    assert names == {"spec.toml", "metrics.jsonl", "summary.json", "model.safetensors", "holdings.json"}
    assert json.loads((tmp_path / "r/summary.json").read_text()) == json.loads(json.dumps(result.summary))
    stored = load_file(tmp_path / "r/model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in result.model.state_dict().items())
    rows = read_metrics(tmp_path / "r")
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    assert {name: [row[name] for row in rows] for name in rows[0]} == result.history


def test_costs_by_hand(tmp_path):
    """8·16+16+16+16 (batch norm) + 16·4+4 = 244 floats of parameters, 32 floats and one int64 of buffers."""
    vector_bytes, buffer_bytes = 4 * 244, 4 * 32 + 8
    for algorithm, phases, extra in (
        (ga.FedAvg(), 1, 0),
        (ga.FedGA(beta=0.1), 2, 0),
        (ga.Scaffold(), 2, 0),
        (ga.Scaffold(control="kept"), 1, 1),
    ):
        history = ga.run(blobs(), algorithm, rounds=3, clients_per_round=4, local=LOCAL, workers=0).history
        assert history["communication_rounds"] == [0, phases, 2 * phases, 3 * phases]
        assert history["local_updates"] == [0, 12, 24, 36]
        each = 4 * (buffer_bytes + (phases + extra) * vector_bytes)
        assert history["bytes_up"] == history["bytes_down"] == [0, each, 2 * each, 3 * each]


def test_beta_in_force_and_cost_follow_the_schedule():
    algorithm = ga.FedGA(beta=ga.OffUntil(value=0.2, round=2))
    history = ga.run(blobs(), algorithm, rounds=4, local=LOCAL, workers=0).history
    assert history["beta"] == [None, 0.0, 0.0, 0.2, 0.2]
    assert history["communication_rounds"] == [0, 1, 2, 4, 6], "no β, no gradient phase"


def test_measured_when_asked():
    measure = ga.Measure(test_every=2, train_every=3)
    history = ga.run(blobs(), ga.FedAvg(), rounds=7, local=LOCAL, workers=0, measure=measure).history
    assert [r for r, v in enumerate(history["test_accuracy"]) if v is not None] == [0, 2, 4, 6, 7]
    for name in ("train_loss", "train_accuracy", "r", "drift", "drift_ratio", "cosine"):
        assert [r for r, v in enumerate(history[name]) if v is not None] == [0, 3, 6, 7], name
    never = ga.Measure(test_every=0, train_every=0)
    history = ga.run(blobs(), ga.FedAvg(), rounds=2, local=LOCAL, workers=0, measure=never).history
    assert set(history["test_loss"]) == set(history["r"]) == {None}


def test_measuring_does_not_change_the_result():
    """Gradients taken for the metrics stand in for the gradient phase; the numbers must be the same ones."""
    runs = [
        ga.run(blobs(), ga.FedGA(beta=0.1), rounds=3, local=LOCAL, workers=0, measure=ga.Measure(train_every=every))
        for every in (0, 1)
    ]
    assert torch.equal(vector(runs[0]), vector(runs[1]))


def test_interrupted_runs_resume_to_the_same_bits(tmp_path):
    task = blobs()
    options = {"rounds": 8, "clients_per_round": 3, "local": LOCAL, "workers": 0}
    whole = ga.run(task, KEEPING, out=tmp_path / "whole", **options)
    calls = 0

    def predict(model, batch):
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt
        return model(batch[0]), batch[1]

    breaking = ga.Task(model=task.model, clients=task.clients, test=task.test, name="blobs", predict=predict)
    with pytest.raises(KeyboardInterrupt):
        ga.run(breaking, KEEPING, out=tmp_path / "broken", **options)
    assert (tmp_path / "broken/checkpoint.safetensors").exists()
    assert 0 < len(read_metrics(tmp_path / "broken")) < 9
    resumed = ga.run(task, KEEPING, out=tmp_path / "broken", resume=True, **options)
    assert torch.equal(vector(whole), vector(resumed))
    assert without_time(tmp_path / "whole") == without_time(tmp_path / "broken")
    assert not (tmp_path / "broken/checkpoint.safetensors").exists()
    again = ga.run(task, KEEPING, out=tmp_path / "broken", resume=True, **options)
    assert torch.equal(vector(whole), vector(again))
    assert again.summary == json.loads(json.dumps(resumed.summary))


@pytest.mark.parametrize("checkpoint_seconds", [0, 0.05])
def test_kill_9_at_random_moments_and_resume(tmp_path, recipe, checkpoint_seconds):
    whole = tmp_path / "whole"
    subprocess.run(command("run", recipe, "--out", whole, "--workers", 0), check=True, capture_output=True)
    moments = random.Random(checkpoint_seconds)
    out = tmp_path / "killed"
    run = command(
        *("run", recipe, "--out", out, "--workers", 2, "--resume", "--checkpoint-seconds", checkpoint_seconds)
    )
    kills = 0
    while not (out / "summary.json").exists():
        process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = (out / "metrics.jsonl").stat().st_size if (out / "metrics.jsonl").exists() else 0
        wanted = before + moments.randrange(1, 3000)
        while process.poll() is None:
            path = out / "metrics.jsonl"
            if kills < 5 and path.exists() and path.stat().st_size >= wanted:
                time.sleep(moments.random() * 0.03)
                process.kill()
                kills += 1
                break
            time.sleep(0.002)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    assert kills >= 2
    assert without_time(whole) == without_time(out)
    expected, found = load_file(whole / "model.safetensors"), load_file(out / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_keeps_a_checkpoint_and_leaves_no_process(tmp_path, recipe, end, code):
    out = tmp_path / "stopped"
    run = command("run", recipe, "--set", "rounds=5000", "--out", out, "--workers", 2)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(run, start_new_session=True, preexec_fn=hear_ctrl_c, **pipes)
    while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < 4:
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.02)
    os.killpg(process.pid, end)  # as a terminal does: the whole group gets it
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, errors.decode()
    assert errors.decode().strip() == "stopped; continue with the same command and --resume"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert (out / "checkpoint.safetensors").exists()


def test_half_written_metrics_are_cut(tmp_path):
    options = {"rounds": 3, "local": LOCAL, "workers": 0, "out": tmp_path / "r"}
    ga.run(blobs(), ga.FedAvg(), **options)
    expected = without_time(tmp_path / "r")
    (tmp_path / "r/summary.json").unlink()  # as if killed just before the end, with a line half written
    with (tmp_path / "r/metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "tes')
    ga.run(blobs(), ga.FedAvg(), resume=True, **options)
    assert without_time(tmp_path / "r") == expected


def test_other_settings_are_refused_by_name(tmp_path):
    options = {"rounds": 2, "workers": 0, "out": tmp_path / "r"}
    ga.run(blobs(), ga.FedGA(beta=0.1), local=LOCAL, **options)
    before = {path: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    with pytest.raises(ga.GradalignError, match=r"algorithm.beta \(0.1 there, 0.2 now\)$"):
        ga.run(blobs(), ga.FedGA(beta=0.2), local=LOCAL, resume=True, **options)
    with pytest.raises(ga.GradalignError, match="already holds a run; add --resume"):
        ga.run(blobs(), ga.FedGA(beta=0.1), local=LOCAL, **options)
    assert before == {path: path.read_bytes() for path in (tmp_path / "r").iterdir()}


def test_foreign_folders_and_second_writers_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ga.GradalignError, match=r"not a run folder and not empty \(it has thesis.tex\)"):
        ga.run(blobs(), ga.FedAvg(), rounds=1, workers=0, out=tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ga.GradalignError, match="another process is writing"):
            ga.run(blobs(), ga.FedAvg(), rounds=1, workers=0, out=tmp_path / "busy")


def test_nan_stops_with_one_sentence_and_keeps_the_last_good_checkpoint(tmp_path):
    options = {"rounds": 9, "workers": 0, "out": tmp_path / "r", "measure": ga.Measure(test_every=1)}
    lr = ga.Steps(value=0.1, at_rounds={3: 1e30})
    with pytest.raises(ga.DivergedError, match=r"NaN or infinite in round 4 at client 0 .*lower local.lr"):
        ga.run(blobs(), ga.FedAvg(), local=ga.LocalTraining(lr=lr, steps=3), **options)
    assert len(read_metrics(tmp_path / "r")) == 4
    good = load_file(tmp_path / "r/checkpoint.safetensors")
    assert bool(torch.isfinite(good["x"]).all())
    three = ga.run(blobs(), ga.FedAvg(), rounds=3, local=ga.LocalTraining(lr=0.1, steps=3), workers=0)
    assert torch.equal(good["x"], torch.nn.utils.parameters_to_vector(three.model.parameters()))


def test_damaged_checkpoints_are_named(tmp_path):
    ga.run(blobs(), ga.FedAvg(), rounds=2, local=LOCAL, workers=0, out=tmp_path / "r")
    (tmp_path / "r/summary.json").unlink()
    (tmp_path / "r/checkpoint.safetensors").write_bytes(b"garbage")
    with pytest.raises(ga.GradalignError, match=r"checkpoint.safetensors is not a checkpoint"):
        ga.run(blobs(), ga.FedAvg(), rounds=2, local=LOCAL, workers=0, out=tmp_path / "r", resume=True)


def test_differing_fields():
    assert differing_fields({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3, "d": 4}}) == [
        "b.c (2 there, 3 now)",
        "b.d (not set there, 4 now)",
    ]
