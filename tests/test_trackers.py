"""Trackers: every row once, whatever happens to the run, and nothing that happens to them harms it."""

from __future__ import annotations

import json
import logging
import struct
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

import gradalign as ga
from conftest import blobs, vector
from gradalign.cli.app import app
from gradalign.recipes import load_recipe
from gradalign.runs.metrics import read_metrics
from gradalign.tracking import tagged

SMALL = ("--set", "rounds=3", "--set", "task.clients=5", "--set", "clients.per_round=3", "--workers", "0")
TAGS = {
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy",
    "train_loss": "train/loss",
    "r": "alignment/r",
    "drift": "alignment/drift",
    "beta": "round/beta",
    "bytes_up": "spent/bytes_up",
    "seconds": "spent/seconds",
}


def call(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    return result


def train(out: Path | None, *trackers: ga.Tracker, **more: object) -> ga.Result:
    settings = {"rounds": 6, "workers": 0, "measure": ga.Measure(train_every=2), "checkpoint_seconds": 0} | more
    return ga.run(blobs(), ga.FedGA(beta=0.1), out=out, trackers=trackers, **settings)


class Diary:
    """A tracker that remembers what it was told, and can be made to break."""

    def __init__(self, breaks_at: int | None = None, error: BaseException | None = None) -> None:
        self.told: list[object] = []
        self.breaks_at, self.error = breaks_at, error or OSError("No space left on device")

    def start(self, run: ga.RunInfo) -> None:
        self.told.append(("start", run.name, run.rounds, [row["round"] for row in run.earlier]))
        if self.breaks_at == -1:
            raise self.error

    def log(self, row):
        self.told.append(row["round"])
        if row["round"] == self.breaks_at:
            raise self.error

    def end(self, summary):
        self.told.append(("end", None if summary is None else summary["rounds"]))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def assert_same_as_the_metrics(found: dict[str, list[tuple[int, float]]], folder: Path, kind: type = float) -> None:
    rows = read_metrics(folder)
    for column, tag in TAGS.items():
        expected = [(row["round"], kind(row[column])) for row in rows if row[column] is not None]
        assert expected, column
        assert found[tag] == expected, tag
    measured = {name for row in rows for name, value in row.items() if value is not None} - {"round"}
    assert len([tag for tag in found if not tag.startswith("summary/")]) == len(measured), "all metrics, none twice"


def wandb_records(folder: Path) -> list:
    """Return what wandb has written, once its last record, the run's exit, is there.

    wandb's service has all of it in a buffer when ``finish`` returns, and writes it a moment later, or much later on a
    busy machine; ``teardown`` asks for that, and does not always wait long enough.
    """
    import wandb

    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for _ in range(1200):
        records = list(written_records(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.05)
    raise AssertionError(f"wandb wrote {len(records)} records and no end")


def written_records(data: bytes):
    """Read wandb's file: a header of 7 bytes, then LevelDB's log format with protobuf messages in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, part = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # the rest is on its way
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(part)
            part = b""
            yield record


def wandb_history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for tag in (tag for tag in items if not tag.startswith("_")):
                found.setdefault(tag, []).append((items["_step"], items[tag]))
    return found


def test_tagged_rows():
    row = {"round": 3, "test_loss": 0.5, "r": None, "drift": 2, "bytes_up": 7, "beta": 0.1, "new": 1.5}
    assert tagged(row) == {
        "test/loss": 0.5,
        "alignment/drift": 2.0,
        "spent/bytes_up": 7.0,
        "round/beta": 0.1,
        "round/new": 1.5,
    }


def test_tensorboard_has_every_number_of_the_metrics(tmp_path):
    call("run", "digits", *SMALL, "--set", "tensorboard=true", "--out", tmp_path / "r")
    found = events(tmp_path / "r/tensorboard")
    assert_same_as_the_metrics(found, tmp_path / "r", np.float32)
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert found["summary/best_test_accuracy"] == [(3, np.float32(summary["best_test_accuracy"]))]
    accumulator = EventAccumulator(str(tmp_path / "r/tensorboard"))
    accumulator.Reload()
    settings = accumulator.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "beta = 0.4" in settings
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(accumulator.summary_metadata), (
        "the HPARAMS tab has the run"
    )


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_resumed_run_is_in_tensorboard_once_and_whole(tmp_path, from_the_start):
    before = [ga.TensorBoard()] if from_the_start else []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, *before, Diary(4, KeyboardInterrupt()))
    assert len(read_metrics(tmp_path)) == 5
    (tmp_path / "checkpoint.safetensors").unlink()  # as if killed before the first one: all rounds are played again
    train(tmp_path, ga.TensorBoard(), resume=True)
    found = events(tmp_path / "tensorboard")
    assert [step for step, _ in found["test/loss"]] == [0, 1, 2, 3, 4, 5, 6]
    assert_same_as_the_metrics(found, tmp_path, np.float32)


def test_tensorboard_after_checkpoints_and_for_a_run_that_is_complete(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ga.TensorBoard(), Diary(4, KeyboardInterrupt()))
    diary = Diary()
    train(tmp_path, ga.TensorBoard(), diary, resume=True)
    assert diary.told == [("start", "blobs-fedga-seed0", 6, [0, 1, 2, 3]), 4, 5, 6, ("end", 6)]
    assert_same_as_the_metrics(events(tmp_path / "tensorboard"), tmp_path, np.float32)
    again, elsewhere = Diary(), tmp_path / "plain"
    train(tmp_path, again, resume=True)
    assert again.told == [], "nothing is left to tell"
    train(elsewhere)
    train(elsewhere, ga.TensorBoard(), resume=True)
    assert_same_as_the_metrics(events(elsewhere / "tensorboard"), elsewhere, np.float32)


def test_wandb_offline_has_every_number_once_also_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = tmp_path / "my.toml"
    recipe.write_text('name = "mine"\nrounds = 4\n[wandb]\nproject = "p"\n[algorithm]\nname = "fedga"\nbeta = 0.2\n')
    loaded = load_recipe(str(recipe), ["wandb=true", "wandb.tags=['a']"])
    assert (loaded.tracking.wandb.project, loaded.tracking.wandb.tags) == ("p", ["a"])
    out, tracker = tmp_path / "r", ga.WeightsAndBiases("p", tags=["a"])
    with pytest.raises(KeyboardInterrupt):
        train(out, tracker, Diary(4, KeyboardInterrupt()))
    (first,) = out.glob("wandb/offline-run-*")
    train(out, tracker, resume=True)
    (second,) = out.glob("wandb/offline-run-*")
    assert second.name.split("-")[-1] == first.name.split("-")[-1], "one run there, not two"
    assert_same_as_the_metrics(wandb_history(out), out)
    (run,) = [r.run for r in wandb_records(out) if r.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, list(run.tags), run.display_name) == ("p", ["a"], "blobs-fedga-seed0")
    assert (config["algorithm"]["name"], config["algorithm"]["beta"]) == ("fedga", 0.1)


def test_a_run_resumed_within_a_second_keeps_its_wandb_record(tmp_path, monkeypatch):
    """wandb names a folder by its second; the new record must not be taken for the old one and removed."""

    class Stub(types.ModuleType):
        """As much of wandb as makes folders: the name is made as wandb makes it."""

        Settings = dict

        def init(self, *, id, dir, **_):
            folder = Path(dir) / "wandb" / f"offline-run-{time.strftime('%Y%m%d_%H%M%S')}-{id or 'abc'}"
            folder.mkdir(parents=True, exist_ok=True)
            record = folder / "run.wandb"
            record.write_text("")
            return types.SimpleNamespace(
                step=0, offline=True, log=lambda row, step, commit: record.open("a").write(f"{step}\n"), finish=len
            )

    tracker = ga.WeightsAndBiases("p")
    monkeypatch.setitem(sys.modules, "wandb", Stub("wandb"))
    while time.time() % 1 > 0.3:  # so that both starts would fall into one second
        time.sleep(0.01)
    for earlier in ([], [{"round": 0}, {"round": 1}]):
        tracker.start(ga.RunInfo(name="r", folder=tmp_path, settings={}, rounds=3, earlier=earlier))
    (record,) = tmp_path.glob("wandb/*/run.wandb")
    assert record.read_text() == "0\n1\n"


def test_wandb_that_cannot_start_says_so_before_any_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    done = call("run", "digits", *SMALL, "--set", "wandb.mode=online", "--out", tmp_path / "r", code=2)
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: Weights & Biases could not start")
    assert "wandb.mode=offline" in lines[-1]
    rows = tmp_path / "r/metrics.jsonl"
    assert (rows.read_text() if rows.exists() else "") == ""
    call("run", "digits", *SMALL, "--out", tmp_path / "r")  # the folder may be used for a run without it


@pytest.mark.parametrize(("package", "setting"), [("tensorboard", "tensorboard=true"), ("wandb", "wandb=true")])
@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_extra_that_is_not_installed_is_named_before_anything_is_written(
    tmp_path, monkeypatch, package, setting, command
):
    monkeypatch.setitem(sys.modules, package, None)  # how Python notes a package that cannot be imported
    done = call(command, "digits", *SMALL, "--set", setting, "--out", tmp_path / "r", code=2)
    assert done.stderr.count("\n") == 1
    assert f"pip install 'gradalign[{package}]'" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("wandb=3", "wandb must be true, false or a table"),
        ("wandb.modus=offline", 'did you mean "mode"?'),
        ("wandb.mode=off", "wandb.mode: must be 'online', 'offline' or 'disabled'"),
        ("tensorboard=maybe", "tensorboard: must be a valid boolean"),
        ("tensorbord=true", 'did you mean "tensorboard"?'),
    ],
)
def test_mistakes_in_the_settings(tmp_path, setting, words):
    assert words in call("run", "digits", *SMALL, "--set", setting, "--out", tmp_path / "r", code=2).stderr


def test_settings_of_trackers_are_no_part_of_the_spec(tmp_path):
    out = tmp_path / "r"
    call("run", "digits", *SMALL, "--set", "tensorboard=true", "--out", out)
    assert "tensorboard" not in (out / "spec.toml").read_text()
    (out / "summary.json").unlink()
    call("run", "digits", *SMALL, "--out", out, "--resume")
    call("run", "digits", *SMALL, "--set", "wandb=false", "--out", out, "--resume")


def test_trackers_change_no_bit_of_the_result(tmp_path):
    plain, tracked = train(None), train(tmp_path / "r", ga.TensorBoard(), Diary())
    assert torch.equal(vector(plain), vector(tracked))
    timeless = [{k: v for k, v in result.history.items() if k != "seconds"} for result in (plain, tracked)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("breaks_at", [0, 2])
def test_a_tracker_that_breaks_is_left_behind_with_one_warning(tmp_path, caplog, breaks_at):
    broken, whole = Diary(breaks_at), Diary()
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, broken, whole)
    assert result.summary["rounds"] == 6
    assert broken.told[1:] == [*range(breaks_at + 1), ("end", None)]
    assert whole.told[1:] == [0, 1, 2, 3, 4, 5, 6, ("end", 6)]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "Diary" in warning
    assert "No space left on device" in warning


def test_a_tracker_that_cannot_start_ends_the_run_and_lets_the_others_go(tmp_path):
    whole = Diary()
    with pytest.raises(ga.GradalignError, match="the tracker Diary could not start: No space left on device"):
        train(tmp_path, whole, Diary(-1))
    assert whole.told[1:] == [("end", None)]
    assert read_metrics(tmp_path) == []


def test_a_diverged_run_ends_its_trackers_and_says_why_in_its_folder(tmp_path):
    diary = Diary()
    with pytest.raises(ga.DivergedError):
        train(tmp_path, diary, local=ga.LocalTraining(lr=1e38))
    assert diary.told[-1] == ("end", None)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["diverged"] is True
    assert "NaN or infinite" in failure["failure"]


def test_what_is_no_tracker_is_refused():
    with pytest.raises(ga.GradalignError, match="start, log and end"):
        train(None, "tensorboard")
    with pytest.raises(ga.GradalignError, match="start, log and end"):
        train(None, ga.TensorBoard)
    with pytest.raises(ga.GradalignError, match="no folder to write to"):
        train(None, ga.TensorBoard())


def test_a_comparisons_runs_are_tracked_each_in_its_folder(tmp_path):
    words = ("--seeds", 2, "--algorithms", "fedga,fedavg", "--set", "tensorboard=true")
    call("compare", "digits", *SMALL, *words, "--out", tmp_path / "c")
    for run in ("fedga/seed0", "fedga/seed1", "fedavg/seed0", "fedavg/seed1"):
        found = events(tmp_path / "c" / run / "tensorboard")
        rows = read_metrics(tmp_path / "c" / run)
        assert [value for _, value in found["test/accuracy"]] == [np.float32(row["test_accuracy"]) for row in rows]
