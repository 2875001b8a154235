"""A function after every round, early stopping, the best round's model; and all of it after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gradalign as ga
from conftest import blobs, vector
from gradalign.runs.metrics import read_metrics
from gradalign.server.monitor import EarlyStopping, Monitor

LOCAL = ga.LocalTraining(lr=0.3, steps=3, batch_size=6)


def run(**more) -> ga.Result:
    options = {"rounds": 12, "local": LOCAL, "workers": 0, "measure": ga.Measure(test_every=1, train_every=0)}
    return ga.run(blobs(), ga.FedAvg(), **(options | more))


@pytest.mark.parametrize("way", ["STOP", "True", "raise"])
def test_a_function_may_end_the_run(way, tmp_path):
    """The round in which it does is measured like a last one, and the run is complete."""
    heard = []

    def on_round(row):
        heard.append(row["round"])
        if row["round"] == 3:
            if way == "raise":
                raise ga.StopTraining("seen enough")
            return ga.STOP if way == "STOP" else True
        return None

    measure = ga.Measure(test_every=10, train_every=10)
    result = run(on_round=on_round, out=tmp_path, measure=measure)
    assert heard == [1, 2, 3]
    assert result.summary["rounds"] == 3
    assert result.history["round"] == [0, 1, 2, 3]
    assert result.summary["stopped"] == ("seen enough" if way == "raise" else "on_round asked for it")
    assert result.history["test_accuracy"][1:3] == [None, None]
    assert result.history["test_accuracy"][3] is not None
    assert result.history["r"][3] is not None
    assert json.loads((tmp_path / "summary.json").read_text())["stopped"] == result.summary["stopped"]
    assert torch.equal(vector(result), vector(run(rounds=3, measure=measure))), "the model of the third round"


def test_every_round_is_told_of_and_the_last_one_is_not_stopped():
    heard = []
    result = run(rounds=3, on_round=lambda row: heard.append(row["round"]) or row["round"] == 3)
    assert heard == [1, 2, 3]
    assert "stopped" not in result.summary


@pytest.mark.parametrize(
    ("answer", "words"), [(3, "what on_round returns must be True or False"), ("yes", "what on_round returns")]
)
def test_an_answer_that_is_none(answer, words):
    with pytest.raises(ga.GradalignError, match=words):
        run(on_round=lambda row: answer)


def test_an_error_in_the_function_is_named():
    with pytest.raises(ga.GradalignError, match="on_round failed: KeyError: 'test_acc'"):
        run(on_round=lambda row: row["test_acc"] > 0.5)
    with pytest.raises(ga.GradalignError, match="on_round must be a function"):
        run(on_round="stop")
    with pytest.raises(ga.GradalignError, match="on_round failed: AttributeError"):
        run(on_round=lambda row: row.__setitem__("round", 0))


@pytest.mark.parametrize(("name", "what"), [("train_loss", "train"), ("loss", "test")])
def test_a_score_that_is_never_measured_is_refused(name, what):
    measure, task = ga.Measure(monitor=name, **{f"{what}_every": 0}), blobs()
    columns = ["train_loss", "test_loss", "test_accuracy"]
    Monitor(measure, task).check(measure, task, columns)  # a run may follow what it has at its end
    with pytest.raises(ga.GradalignError, match=f"is the score and never measured; set measure.{what}_every"):
        Monitor(measure, task).check(measure, task, columns, score=True)


def monitor_of(values: list[float | None], **measure) -> tuple[Monitor, list[bool], list[bool]]:
    """Feed a column of test losses; return the monitor, which rows were best so far, and where it would stop."""
    watched = Monitor(ga.Measure(monitor="loss", **measure), blobs())
    best, stops = [], []
    for number, value in enumerate(values):
        best.append(watched.take({"round": number, "test_loss": value}))
        stops.append(watched.why_stop is not None)
    return watched, best, stops


def test_patience_by_hand():
    """Losses: what is not measured does not count; a change of exactly min_delta is none; best is best all the same."""
    values = [4.0, None, 3.0, 3.5, None, 2.5, 2.5, 2.25, 2.5]
    watched, best, stops = monitor_of(values, early_stopping={"patience": 2, "min_delta": 0.5})
    assert best == [True, False, True, False, False, True, False, True, False]
    # 3.0 is better than 4.0 by one; 3.5 and 2.5 (by exactly 0.5) are not: two in a row, at the sixth row.
    assert stops == [False] * 5 + [True] * 2 + [False] * 2, "2.25 beats 3.0 by more than 0.5 again"
    assert (watched.best_round, -watched.best) == (7, 2.25)
    assert monitor_of(values, early_stopping=EarlyStopping(patience=2))[2] == [False] * 8 + [False]
    assert monitor_of(values, early_stopping=EarlyStopping(patience=1))[2][3:6] == [True, True, False]
    assert monitor_of([1.0, 2.0, 3.0], mode="max", early_stopping={"patience": 1})[2] == [False] * 3


@pytest.mark.parametrize(
    ("name", "column", "larger"),
    [
        ("accuracy", "validation_accuracy", True),
        ("test_loss", "validation_loss", False),
        ("wide", "validation_wide", True),
        ("validation_wide", "validation_wide", True),
        ("train_loss", "train_loss", False),
        ("clients_worst_accuracy", "clients_worst_accuracy", True),
        ("r", "r", False),
    ],
)
def test_names_of_what_is_monitored(name, column, larger):
    """The metric on what the run is scored on; any other column by its own name."""
    task = replace(ga.hold_out(blobs(), 0.2), metrics={"wide": lambda outputs, targets: 0.0})
    watched = Monitor(ga.Measure(monitor=name), task)
    assert (watched.name, watched.larger) == (column, larger)
    assert watched.value({column: 0.25}) == (0.25 if larger else -0.25)
    assert Monitor(ga.Measure(monitor=name, mode="min"), task).value({column: 0.25}) == -0.25


def expected_stop(values: list[float], patience: int) -> int:
    """Return the round after which a run ends whose scores are these."""
    for last in range(len(values)):
        best = values.index(max(values[: last + 1]))
        if last - best >= patience:
            return last
    return len(values) - 1


def test_a_run_ends_when_the_score_gets_no_better_and_keeps_the_best_model(tmp_path):
    whole = run(rounds=12)
    scores = whole.history["test_accuracy"]
    end = expected_stop(scores, 2)
    best = scores.index(max(scores[: end + 1]))
    assert 0 < best < end < 12, "else this shows nothing"
    result = run(early_stopping={"patience": 2}, keep_best=True, out=tmp_path)
    assert result.summary["rounds"] == end
    assert result.summary["stopped"] == "test accuracy did not get better in the last 2 measurements"
    assert result.summary["monitor"] == {"name": "test_accuracy", "best": scores[best], "round": best}
    there = run(rounds=best).model.state_dict()
    for state in (result.best.state_dict(), load_file(tmp_path / "best.safetensors")):
        assert all(torch.equal(state[name], tensor) for name, tensor in there.items())
    again = run(early_stopping={"patience": 2}, keep_best=True, out=tmp_path, resume=True)
    assert again.summary == result.summary
    assert again.history == result.history
    assert all(torch.equal(again.best.state_dict()[name], tensor) for name, tensor in there.items())
    (tmp_path / "best.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(ga.GradalignError, match=r"best.safetensors was changed or cut"):
        run(early_stopping={"patience": 2}, keep_best=True, out=tmp_path, resume=True)


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from test_callbacks import run
def on_round(row):
    if row["round"] == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
run(early_stopping={"patience": 2}, keep_best=True, out=sys.argv[1], checkpoint_seconds=float(sys.argv[4]),
    on_round=on_round, resume=True)
"""


@pytest.mark.parametrize("seconds", ["0", "1000"], ids=["a checkpoint every round", "no checkpoint"])
def test_killed_and_resumed_the_run_ends_in_the_same_round_with_the_same_best_model(tmp_path, seconds):
    whole = run(early_stopping={"patience": 2}, keep_best=True)
    end, best = whole.summary["rounds"], whole.summary["monitor"]["round"]
    assert best < end - 1
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent), str(end - 1), seconds]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    assert (tmp_path / "best.safetensors").exists() == (seconds == "0")
    found = run(early_stopping={"patience": 2}, keep_best=True, out=tmp_path, resume=True)
    assert torch.equal(vector(found), vector(whole))
    for name, tensor in whole.best.state_dict().items():
        assert torch.equal(found.best.state_dict()[name], tensor)
    assert (found.summary["stopped"], found.summary["monitor"]) == (whole.summary["stopped"], whole.summary["monitor"])
    for name, column in whole.history.items():
        assert name == "seconds" or found.history[name] == column


def test_a_checkpoint_of_the_stopping_round_is_not_gone_on_from(tmp_path, monkeypatch):
    """An interrupt in the very moment after the decision leaves such a one."""
    from gradalign.server.all_rounds import AllRounds

    options = {"early_stopping": {"patience": 2}, "out": tmp_path}
    expected = run(early_stopping={"patience": 2})

    def stop(self, state, notes):
        self._save(state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AllRounds, "_end", stop)
        with pytest.raises(KeyboardInterrupt):
            run(**options)
    found = run(**options, resume=True)
    assert found.summary["rounds"] == expected.summary["rounds"] == read_metrics(tmp_path)[-1]["round"]
    assert found.summary["stopped"] == expected.summary["stopped"]


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ({"monitor": "f1"}, 'measure.monitor: "f1" is not measured in this run; give one of test_accuracy'),
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience must be a whole number of at least 1"),
        ({"early_stopping": {"min_delta": 1.0}}, "early_stopping is a table of patience and min_delta"),
        ({"early_stopping": {"patience": 1, "wait": 2}}, "early_stopping is a table of patience and min_delta"),
        ({"early_stopping": {"patience": 1, "min_delta": -1.0}}, "early_stopping.min_delta must be a number"),
        ({"monitor": "loss", "mode": "largest"}, 'measure.mode must be "max" or "min"'),
        ({"mode": "min"}, 'measure.mode must be "max" or "min" of a measure.monitor'),
        ({"monitor": 3}, "measure.monitor is the name of a metric"),
        ({"metrics": 3}, "measure.metrics is a list of names"),
        ({"keep_best": True, "test_every": 0}, "test_accuracy is not measured on the way; set measure.test_every"),
        (
            {"keep_best": True, "monitor": "r", "train_every": 0},
            "r is not measured on the way",
        ),
        ({"metrics": "f1"}, "measure.metrics is a list of names"),
        ({"keep_best": 1}, "measure.keep_best must be True or False"),
    ],
)
def test_what_cannot_be_followed_is_said(measure, words, tmp_path):
    with pytest.raises(ga.GradalignError, match=words):
        run(measure=ga.Measure(**measure), out=tmp_path / "run")
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_clients_must_be_measured_on_the_way_to_be_followed():
    task = replace(blobs(), client_tests=blobs().clients)
    followed = {"monitor": "clients_worst_loss", "keep_best": True}
    with pytest.raises(ga.GradalignError, match=r"clients_worst_loss is not measured on the way"):
        ga.run(task, ga.FedAvg(), rounds=2, workers=0, measure=ga.Measure(**followed))
    measure = ga.Measure(**followed, clients_every=1)
    result = ga.run(task, ga.FedAvg(), rounds=3, local=LOCAL, workers=0, measure=measure)
    losses = result.history["clients_worst_loss"]
    assert result.summary["monitor"]["round"] == losses.index(min(losses))


def test_nothing_to_follow():
    task = ga.Task(model=lambda: nn.Linear(8, 4), clients=blobs().clients)
    with pytest.raises(ga.GradalignError, match="the task custom has no test examples"):
        ga.run(task, ga.FedAvg(), rounds=1, workers=0, keep_best=True)
    followed = ga.Measure(monitor="train_loss", keep_best=True, train_every=1)
    result = ga.run(task, ga.FedAvg(), rounds=3, workers=0, measure=followed)
    losses = result.history["train_loss"]
    assert result.summary["monitor"] == {"name": "train_loss", "best": min(losses), "round": losses.index(min(losses))}


@pytest.mark.parametrize(("monitor", "mode"), [("f1", None), ("test_accuracy", "min")])
def test_a_trial_of_a_sweep_is_scored_by_the_monitored_metric(monitor, mode, tmp_path):
    from gradalign.recipes.spec import validate
    from gradalign.server.runner import RunOptions
    from gradalign.sweep.plan import TrialRunner
    from gradalign.sweep.protocol import Outcome, scoring_of

    tables = {"rounds": 3, "task": {"clients": 5}, "algorithm": {"name": "fedavg"}, "clients": {"holdout": 0.2}}
    measure = {"metrics": ["f1"], "monitor": monitor, "test_every": 1} | ({"mode": mode} if mode else {})
    spec = validate(tables | {"measure": measure}, "here")
    state, score, facts = TrialRunner(RunOptions(workers=0), 0.5).run(spec, tmp_path / "t", None, lambda row: None)
    assert state == "complete"
    name, sign = ("f1", 1) if mode is None else ("accuracy", -1)
    assert score == sign * read_metrics(tmp_path / "t")[-1][f"validation_{name}"]
    assert facts[f"validation_{name}"] == sign * score
    scoring = scoring_of(
        [Outcome(stage="s", slot=0, entry="e", seed=0, point={}, state=state, score=score, facts=facts)]
    )
    assert (scoring.name, scoring.larger) == (name, mode is None)
    assert scoring.shown(score) == (score if mode is None else -100 * score)


def test_what_was_measured_comes_back_from_what_was_written(tmp_path):
    from gradalign.recipes.spec import validate

    measure = ga.Measure(metrics=["f1"], monitor="f1", mode="max", clients_every=0, test_clients=7, train_every=2)
    run(measure=measure, early_stopping={"patience": 2, "min_delta": 0.25}, keep_best=True, out=tmp_path, rounds=1)
    written = tomllib.loads((tmp_path / "spec.toml").read_text())
    spec = validate({"measure": written["measure"]}, "spec.toml")
    stopping = EarlyStopping(patience=2, min_delta=0.25)
    assert ga.Measure(**spec.measure.model_dump()) == replace(measure, early_stopping=stopping, keep_best=True)
