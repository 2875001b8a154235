"""After an interruption at any round, a run goes on to the bits that it would have had without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import gradalign as ga
from conftest import blobs, vector
from gradalign import runs
from gradalign.algorithms.rules import ServerRule
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup
from gradalign.fast import Group
from gradalign.runs import checkpoint
from gradalign.runs.metrics import read_metrics
from gradalign.server.state import ServerState
from test_cli import call

LOCAL = ga.LocalTraining(lr=0.1, epochs=1, batch_size=4, weight_decay=0.01)
SIZES = (7, 4, 9, 6)
MODELS = {
    "cohorts": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
    "lockstep": lambda: nn.Sequential(nn.Linear(12, 400), nn.Tanh(), nn.Linear(400, 350), nn.ReLU(), nn.Linear(350, 3)),
}
ALGORITHMS = {
    "scaffold": ga.Scaffold(),
    "fedga": ga.FedGA(beta=0.2),
    "fedga and scaffold": ga.FedGA(beta=0.2) + ga.Scaffold() + ga.FedAdam(lr=0.05),
    "running": ga.FedGA(beta="auto", length=0.5, mean="running") + ga.FedLESAM(rho=0.1),
    "memories": ga.FedInit() + ga.FedCM(alpha=0.5) + ga.FedSAM(rho=0.1),
    "one trip": ga.FedGA(beta="auto", length=0.5, mean="running"),
    "kept": ga.FedGA(beta=0.2, mean="kept") + ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1),
}


def crowd(model) -> ga.Task:
    generator = torch.Generator().manual_seed(3)
    counts = [SIZES[client % len(SIZES)] for client in range(33)]
    data = [(torch.randn(n, 12, generator=generator), torch.randint(3, (n,), generator=generator)) for n in counts]
    return ga.Task(model=model, clients=data, test=data[0])


class Stops:
    """Ends the process's work, as Ctrl-C would, at the second row that it hears of."""

    def __init__(self) -> None:
        self.heard = 0

    def start(self, *_: object) -> None: ...

    def end(self, *_: object) -> None: ...

    def log(self, *_: object) -> None:
        self.heard += 1
        if self.heard == 2:
            raise KeyboardInterrupt


def in_pieces(out: Path, *arguments, **options) -> tuple[ga.Result, int]:
    """Run to the end, interrupted after every round."""
    interruptions = 0
    while True:
        try:
            found = ga.run(*arguments, out=out, resume=True, checkpoint_seconds=0, trackers=[Stops()], **options)
            return found, interruptions
        except KeyboardInterrupt:
            interruptions += 1


def rows_of(folder: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(folder)]


def same_after_interruptions(tmp_path, task, algorithm, **options) -> torch.Tensor:
    whole = ga.run(task, algorithm, out=tmp_path / "whole", **options)
    pieces, interruptions = in_pieces(tmp_path / "pieces", task, algorithm, **options)
    assert interruptions == options["rounds"]
    assert torch.equal(vector(whole), vector(pieces))
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "pieces")
    return vector(whole)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_cohorts_resume_to_the_same_bits(tmp_path, algorithm, every):
    task = crowd(MODELS["cohorts"])
    assert Group(Setup(task=task, local=LOCAL, clients_per_round=28)).cohort is not None
    options = {"rounds": 4, "clients_per_round": 28, "local": LOCAL, "weights": "examples"}
    same_after_interruptions(
        tmp_path, task, algorithm, workers=0, measure=ga.Measure(train_every=every, train_clients=30), **options
    )


@pytest.mark.parametrize(
    ("model", "sampled", "algorithm"),
    [
        ("cohorts", 28, "fedga and scaffold"),
        ("lockstep", 28, "fedga"),
        ("lockstep", 28, "one trip"),
        ("lockstep", 5, "running"),
    ],
    ids=["cohorts", "lockstep", "lockstep in one trip", "products"],
)
def test_workers_resume_to_the_same_bits(tmp_path, model, sampled, algorithm):
    """The gradients of large layers are products; they must not depend on where in shared memory they are written."""
    task = crowd(MODELS[model])
    group = Group(Setup(task=task, local=LOCAL, clients_per_round=sampled))
    assert (group.cohort is not None, group.lockstep is not None) == (
        sampled == 28 and model == "cohorts",
        sampled == 28 and model == "lockstep",
    )
    assert sum(p.numel() for p in task.make_model(0).parameters()) % 16
    options = {"rounds": 2, "clients_per_round": sampled, "local": LOCAL, "measure": ga.Measure(train_every=1)}
    pieces = same_after_interruptions(tmp_path, task, ALGORITHMS[algorithm], workers=2, **options)
    quiet = options | {"measure": ga.Measure(test_every=0, train_every=0)}
    assert all(
        torch.equal(pieces, vector(ga.run(task, ALGORITHMS[algorithm], workers=workers, **quiet))) for workers in (0, 1)
    )


@pytest.mark.parametrize("limit", [None, 5])
def test_one_by_one_too(tmp_path, limit):
    """Batch norm and dropout, and gradients of whole clients or of some examples."""
    local = ga.LocalTraining(lr=0.1, steps=2, batch_size=5, gradient_examples=limit)
    options = {"rounds": 4, "clients_per_round": 4, "local": local, "measure": ga.Measure(train_every=1)}
    same_after_interruptions(tmp_path, blobs(), ALGORITHMS["fedga and scaffold"], workers=0, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_measuring_changes_no_bit_of_a_cohort(algorithm):
    options = {"rounds": 3, "clients_per_round": 28, "local": LOCAL, "workers": 0}
    measures = ga.Measure(train_every=0), ga.Measure(train_every=1, train_clients=30)
    runs = [ga.run(crowd(MODELS["cohorts"]), algorithm, measure=measure, **options) for measure in measures]
    assert torch.equal(vector(runs[0]), vector(runs[1]))


# More rounds


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


WITHOUT_CLIENTS_VECTORS = {
    "fedga": ga.FedGA(beta=0.2),
    "running and momentum": ga.FedGA(beta=0.2, mean="running") + ga.FedAvgM(lr=1.0, momentum=0.5),
    "memories": ga.FedCM(alpha=0.5) + ga.FedSAM(rho=0.1) + ga.FedAdam(lr=0.05),
    "warm-up in rounds": ga.FedGA(beta=ga.Warmup(value=0.2, rounds=4)) + ga.FedProx(mu=0.1),
}
SOME = {"clients_per_round": 3, "local": LOCAL, "workers": 0, "measure": ga.Measure(test_every=1, train_every=1)}


@pytest.mark.parametrize("algorithm", WITHOUT_CLIENTS_VECTORS.values(), ids=WITHOUT_CLIENTS_VECTORS)
def test_a_finished_run_goes_on_for_more_rounds_to_the_same_bits(tmp_path, algorithm):
    whole = ga.run(blobs(), algorithm, rounds=7, out=tmp_path / "whole", keep_best=True, **SOME)
    for rounds in (2, 3, 7):
        longer = ga.run(blobs(), algorithm, rounds=rounds, out=tmp_path / "longer", resume=True, keep_best=True, **SOME)
        assert longer.summary["rounds"] == rounds
    assert torch.equal(vector(whole), vector(longer))
    assert all(map(torch.equal, whole.best.state_dict().values(), longer.best.state_dict().values()))
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "longer")
    assert (tmp_path / "whole/spec.toml").read_text() == (tmp_path / "longer/spec.toml").read_text()
    again = ga.run(blobs(), algorithm, rounds=7, out=tmp_path / "longer", resume=True, keep_best=True, **SOME)
    assert again.summary["sha256"] == longer.summary["sha256"], "nothing is left to do"


KEPT = ga.Scaffold(control="kept")


def test_an_interrupted_run_may_be_given_more_rounds_too(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ga.run(blobs(), KEPT, rounds=3, out=tmp_path / "a", checkpoint_seconds=0, trackers=[Stops()], **SOME)
    longer = ga.run(blobs(), KEPT, rounds=5, out=tmp_path / "a", resume=True, **SOME)
    assert torch.equal(vector(longer), vector(ga.run(blobs(), KEPT, rounds=5, **SOME)))


class Dies(Stops):
    """Ends the process's work at the first row."""

    def log(self, *_: object) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("fatal", ["remove", "write_whole", "first row"])
def test_a_run_that_dies_while_it_is_given_more_rounds_goes_on(tmp_path, monkeypatch, fatal):
    whole = {rounds: ga.run(blobs(), ga.FedGA(beta=0.2), rounds=rounds, **SOME) for rounds in (2, 4, 6)}
    run = {"out": tmp_path, "resume": True, **SOME}
    ga.run(blobs(), ga.FedGA(beta=0.2), rounds=2, **run)
    before = contents(tmp_path)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    trackers = [Dies()] if fatal == "first row" else []
    with monkeypatch.context() as patched:
        if not trackers:
            patched.setattr(runs, fatal, dies)
        with pytest.raises(KeyboardInterrupt):
            ga.run(blobs(), ga.FedGA(beta=0.2), rounds=4, trackers=trackers, **run)
    if fatal == "remove":
        assert contents(tmp_path) == before
    for rounds in (*([] if trackers else [2]), 4, 6):  # the shorter one, until the longer one has a row
        found = ga.run(blobs(), ga.FedGA(beta=0.2), rounds=rounds, **run)
        assert torch.equal(vector(whole[rounds]), vector(found))


def test_nothing_is_touched_before_the_longer_run_has_something_to_write(tmp_path):
    """A metrics file that was changed, a tracker that cannot start: the finished run stays finished."""
    ga.run(blobs(), ga.FedAvg(), rounds=2, out=tmp_path, **SOME)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    before = contents(tmp_path)

    class Unable(Stops):
        def start(self, *_: object) -> None:
            raise ga.GradalignError("no network")

    with pytest.raises(ga.GradalignError, match="no network"):
        ga.run(blobs(), ga.FedAvg(), rounds=4, out=tmp_path, resume=True, trackers=[Unable()], **SOME)
    assert contents(tmp_path) == before
    (tmp_path / "metrics.jsonl").write_bytes(metrics.replace(b'"sampled": 3', b'"sampled": 2'))
    damaged = contents(tmp_path)
    with pytest.raises(ga.GradalignError, match=r"metrics.jsonl lacks rows .* or they were changed"):
        ga.run(blobs(), ga.FedAvg(), rounds=4, out=tmp_path, resume=True, **SOME)
    assert contents(tmp_path) == damaged


def test_a_run_that_was_ended_from_outside_is_over(tmp_path, monkeypatch):
    """Whoever ended it cannot be asked again: not when its last files were not written, and not for more rounds."""
    run = {"out": tmp_path, **SOME}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run |= {"rounds": 9, "on_round": lambda row: row["round"] == 3, "checkpoint_seconds": 1e6}
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_tensors", full)
        with pytest.raises(OSError, match="No space left"):
            ga.run(blobs(), ga.FedAvg(), **run)
    assert not (tmp_path / "checkpoint.safetensors").exists()
    stopped = ga.run(blobs(), ga.FedAvg(), resume=True, **run)
    assert stopped.summary["rounds"] == 3
    with pytest.raises(ga.GradalignError, match="a run of 9 rounds that cannot go on to 12: what it carries"):
        ga.run(blobs(), ga.FedAvg(), resume=True, **{**run, "rounds": 12, "on_round": None})


def test_a_stop_in_the_last_round_is_not_forgotten(tmp_path):
    run = {"on_round": lambda row: row["round"] == 3, "checkpoint_seconds": 0, "out": tmp_path, **SOME}
    ga.run(blobs(), ga.FedAvg(), rounds=3, **run)
    with pytest.raises(ga.GradalignError, match="cannot go on to 6: what it carries"):
        ga.run(blobs(), ga.FedAvg(), rounds=6, resume=True, **run)


def test_nothing_of_a_finished_run_is_cut(tmp_path):
    """A checkpoint from before the end, as of a process that died between its last two files, is none to go on from."""
    with pytest.raises(KeyboardInterrupt):
        ga.run(blobs(), ga.FedAvg(), rounds=3, out=tmp_path, checkpoint_seconds=0, trackers=[Stops()], **SOME)
    older = (tmp_path / "checkpoint.safetensors").read_bytes()
    ga.run(blobs(), ga.FedAvg(), rounds=3, out=tmp_path, resume=True, **SOME)
    (tmp_path / "checkpoint.safetensors").write_bytes(older)
    before = contents(tmp_path)
    with pytest.raises(ga.GradalignError, match="is not of the round that the run ended with"):
        ga.run(blobs(), ga.FedAvg(), rounds=6, out=tmp_path, resume=True, **SOME)
    assert contents(tmp_path) == before


class Twice(ServerRule):
    """Remembers one vector under two names."""

    label = "twice"

    def step(self, x, update, memory, *_):
        return x + update, {"m": update, "n": update}


def test_what_is_remembered_twice_can_be_written(tmp_path):
    found = [
        ga.run(blobs(), ga.FedAvg() + Twice(), rounds=rounds, out=tmp_path, resume=True, **SOME) for rounds in (2, 4)
    ]
    assert torch.equal(vector(found[1]), vector(ga.run(blobs(), ga.FedAvg() + Twice(), rounds=4, **SOME)))


def test_a_scaled_run_goes_on_by_the_same_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("run", "digits", "--set", "scale=0.5", "--set", "algorithm.beta=0.1", "--workers", "0", "--out", "a")
    call(*words, "--set", "rounds=2")
    for rounds in (4, 4, 5):
        call(*words, "--resume", "--set", f"rounds={rounds}")
        summary = json.loads(Path("a/summary.json").read_text())
        assert summary["rounds"] == rounds
        assert "rounds" not in summary["scale"].partition(",")[0]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_with_more_rounds(tmp_path):
    ga.run(blobs(), ga.FedGA(), rounds=2, out=tmp_path, **SOME)
    for name in ("summary.json", "checkpoint.safetensors", "model.safetensors"):
        (tmp_path / name).unlink(missing_ok=True)
    found = ga.run(blobs(), ga.FedGA(), rounds=4, out=tmp_path, resume=True, **SOME)
    assert torch.equal(vector(found), vector(ga.run(blobs(), ga.FedGA(), rounds=4, **SOME)))


STOPS = {"early_stopping": {"patience": 5}}
COSINE = ga.LocalTraining(lr=ga.Cosine(value=0.1), epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("algorithm", "first", "then", "words"),
    [
        (KEPT, {}, {}, "that cannot go on to 4: what it carries from round to round was not kept"),
        (ga.FedGA(), {}, {}, "that cannot go on to 4: what fedga does in a round depends on how long"),
        (ga.FedAvg(), {"local": COSINE}, {"local": COSINE}, "to 4: local.lr depends on how long the run is"),
        (ga.FedAvg(), STOPS, STOPS, "to 4: early stopping may have ended it elsewhere"),
        (ga.FedAvg(), {}, {"seed": 1}, r"holds a run with other settings: rounds \(2 there, 4 now\); seed"),
        (ga.FedAvg(), {"rounds": 5}, {}, r"holds a run with other settings: rounds \(5 there, 4 now\)"),
    ],
)
def test_what_cannot_go_on_is_told_and_left_as_it_is(tmp_path, algorithm, first, then, words):
    ga.run(blobs(), algorithm, out=tmp_path, **{**SOME, "rounds": 2, **first})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ga.GradalignError, match=words):
        ga.run(blobs(), algorithm, out=tmp_path, resume=True, **{**SOME, "rounds": 4, **then})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_comparison_goes_on_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    """One entry of three cannot go on: the others are left as they are."""
    monkeypatch.chdir(tmp_path)
    words = ("compare", "digits", "--seeds", "1", "--workers", "0", "--out", "c", "--set", "task.clients=5", "--set")
    words += ("clients.per_round=3", "--set", "local.steps=2", "--algorithms")
    able, unable = "fedavg,fedga,fedprox", "fedavg,fedga,fedinit"
    call(*words, able, "--set", "rounds=3")
    call(*words, able, "--set", "rounds=5", "--resume")
    assert json.loads(Path("c/summary.json").read_text())["terms"] == "at equal communication (10 rounds of it each)"
    assert [len(rows_of(Path("c", entry, "seed0"))) for entry in able.split(",")] == [11, 6, 11], "equal communication"
    shutil.rmtree("c")
    call(*words, unable, "--set", "rounds=3")
    before = contents(tmp_path)
    problem = call(*words, unable, "--set", "rounds=5", "--resume", code=2).stderr
    assert "fedinit/seed0 holds a run of 6 rounds that cannot go on to 10: what it carries" in problem
    assert contents(tmp_path) == before


def test_a_comparison_in_python_keeps_its_length(tmp_path):
    algorithms, out = [ga.FedAvg(), KEPT], {"seeds": 1, "out": tmp_path, **SOME}
    ga.compare(blobs(), algorithms, rounds=2, **out)
    before = contents(tmp_path)
    with pytest.raises(ga.GradalignError, match="holds a run of 2 rounds, not 4; choose another out, or go on with"):
        ga.compare(blobs(), algorithms, rounds=4, resume=True, **out)
    assert contents(tmp_path) == before


def whole_state() -> ServerState:
    """Two clients of weights 2 and 5, and all that a checkpoint may hold beside x."""
    x, nothing = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(0)
    best = Point(x + 1, nothing, nothing)
    kept, weights = {"scaffold": {4: x, 1: 2 * x}}, {"scaffold": {4: 2.0, 1: 5.0}}
    numbers = {"fedga": {"rounds": 3.0}}
    vectors = {"memory": {"m": 3 * x.double()}, "shared": {"scaffold": 4 * x.double()}}
    point = Point(x, nothing, nothing)
    return ServerState(
        point=point, round=7, **vectors, numbers=numbers, kept=kept, kept_weights=weights, best=(5, best)
    )


def test_a_state_comes_back_whole():
    before = whole_state()
    after = ServerState.from_tensors(*before.to_tensors())
    assert (after.round, after.numbers, after.kept_weights) == (7, before.numbers, {"scaffold": {1: 5.0, 4: 2.0}})
    assert after.kept["scaffold"][1].tolist() == [2.0, 4.0, 6.0]
    assert after.best[0] == 5
    assert after.best[1].x.tolist() == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"memory.m": 2}, 'the vector "m" has the shape'),
        ({"shared.scaffold": 4}, 'the vector "scaffold" has the shape'),
        ({"kept.scaffold": None}, "clients and their vectors do not belong together"),
        ({"weights.scaffold": None}, "have no weights, as in a checkpoint of an earlier version"),
        ({"clients.scaffold": 3, "weights.scaffold": 3}, 'vectors "scaffold" have the shape'),
        ({"weights.scaffold": 1}, 'weights "scaffold" have the shape'),
        ({"best.x": 2}, "the best round's model has another shape"),
    ],
)
def test_a_state_that_is_not_whole_is_refused(changed, words):
    tensors, counters = whole_state().to_tensors()
    for name, length in changed.items():
        tensors.pop(name)
        tensors |= {} if length is None else {name: torch.zeros(length)}
    with pytest.raises(ValueError, match=words):
        ServerState.from_tensors(tensors, counters)
