"""What users and strangers' files get wrong: one sentence, before anything is trained, and no memory for nothing."""

from __future__ import annotations

import gzip
import json
import lzma
import math
import pickle
import resource
import struct
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from torch import nn

import gradalign as ga
from gradalign.runs.checkpoint import require_writable
from gradalign.tasks.holdout import hold_out
from gradalign.tasks.partition import custom
from gradalign.tasks.readers import read_batch, read_idx, read_shakespeare
from gradalign.tasks.storage import Archive, fetch
from gradalign.theory.diagnose import diagnose
from small_files import cifar_batch
from test_cli import call

PAIR = torch.randn(6, 3), torch.arange(6) % 2


def task(**changes) -> ga.Task:
    return ga.Task(**({"model": lambda: nn.Linear(3, 2), "clients": [PAIR, PAIR, PAIR], "test": PAIR} | changes))


def run(made: ga.Task | None = None, **options):
    return ga.run(made or task(), ga.FedAvg(), **({"rounds": 1, "workers": 0} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 1.0},
        {"rounds": True},
        {"clients_per_round": "2"},
        {"clients_per_round": 2.5},
        {"clients_per_round": True},
        {"dropout": "0.1"},
        {"dropout": math.nan},
        {"dropout": True},
        {"seed": 1.5},
        {"fast": "no"},
        {"fast": 1},
        {"fast": None},
        {"resume": "yes"},
        {"progress": "no"},
        {"workers": 1.0},
        {"workers": True},
        {"workers": -1},
        {"workers": 10**6},
        {"checkpoint_seconds": "10"},
        {"checkpoint_seconds": math.nan},
        {"checkpoint_seconds": -1},
        {"out": 3},
        {"local": 0},
        {"measure": {}},
    ],
    ids=str,
)
def test_an_option_of_another_kind_is_refused_by_name(options):
    (name,) = options
    with pytest.raises(ga.GradalignError, match={"clients_per_round": "per_round"}.get(name, name)):
        run(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ga.Measure, {"target_accuracy": math.nan}),
        (ga.Measure, {"target_accuracy": 2.0}),
        (ga.Measure, {"target_accuracy": "0.5"}),
        (ga.Measure, {"target_accuracy": True}),
        (ga.Measure, {"test_every": 1.0}),
        (ga.Measure, {"test_every": True}),
        (ga.Measure, {"train_every": "1"}),
        (ga.Measure, {"train_clients": None}),
        (ga.Measure, {"train_clients": 2.5}),
        (ga.LocalTraining, {"momentum": "0.9"}),
        (ga.LocalTraining, {"momentum": math.nan}),
        (ga.LocalTraining, {"momentum": True}),
        (ga.LocalTraining, {"steps": 2.0}),
        (ga.LocalTraining, {"epochs": True}),
        (ga.LocalTraining, {"batch_size": "32"}),
        (ga.LocalTraining, {"lr": "0.1"}),
        (ga.LocalTraining, {"weight_decay": None}),
        (ga.LocalTraining, {"clip_norm": "5"}),
        (ga.LocalTraining, {"precision": True}),
        (task, {"loss": "mse"}),
        (task, {"predict": 3}),
        (task, {"augment": True}),
        (task, {"accuracy": 0.5}),
        (task, {"model": "resnet"}),
        (task, {"scored_on": "train"}),
        (task, {"name": 3}),
        (task, {"facts": [1]}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_setting_of_another_kind_is_refused_by_name(kind, options):
    with pytest.raises(ga.GradalignError, match=next(iter(options))):
        kind(**options)


@pytest.mark.parametrize("options", [{"lr": "0.1"}, {"steps": 2.5}, {"clients": True}, {"splits": 10**9}], ids=str)
def test_diagnose_and_hold_out_refuse_other_kinds_too(options):
    with pytest.raises(ga.GradalignError, match=next(iter(options))):
        diagnose(task(), **options)
    with pytest.raises(ga.GradalignError, match="hold out"):
        hold_out(task(), "0.1")


def test_numpy_s_numbers_are_numbers():
    options = {"rounds": np.int64(1), "dropout": np.float32(0.0), "fast": np.bool_(True), "seed": np.int32(2)}
    assert run(**options, measure=ga.Measure(target_accuracy=np.float64(0.5))).summary["rounds"] == 1


@pytest.mark.parametrize(
    "rows",
    [
        [0, 0.5],
        [0.0, 1.0],
        np.array([0.0]),
        [True, False],
        [0, True],
        torch.tensor([True]),
        [-1],
        [6],
        [[0, 1]],
        ["0"],
        3,
    ],
    ids=str,
)
def test_rows_of_a_partition_are_whole_numbers_inside_the_pool(rows):
    with pytest.raises(ga.GradalignError, match="partition"):
        ga.PartitionedClients(PAIR, [[0, 1], rows])


@pytest.mark.parametrize("lists", [[[0], [[1], [2, 3]]], [[True]], [[0.5]], [["a"]], [3]], ids=str)
def test_custom_lists_are_whole_numbers_too(lists):
    with pytest.raises(ga.GradalignError, match=r"task\.parts"):
        custom(10, lists)


def leave(*_):
    sys.exit("no licence")


class Leaving(nn.Linear):
    def forward(self, x):
        return leave()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {"model": lambda: Leaving(3, 2)},
        {"model": leave},
        {"loss": leave},
        {"augment": leave},
        {"accuracy": leave},
        {"predict": leave},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sys_exit_in_user_code_is_named(changes, workers):
    with pytest.raises(ga.GradalignError, match=r"sys\.exit\('no licence'\)"):
        run(task(**changes), workers=workers)


def test_sys_exit_in_a_diagnosis_is_named():
    with pytest.raises(ga.GradalignError, match=r"sys\.exit"):
        diagnose(task(loss=leave))


def test_sys_exit_on_the_command_line_is_one_line_and_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaving.py").write_text("import sys\n\ndef task():\n    sys.exit(0)\n\ndef other():\n    return 3\n")
    (tmp_path / "importing.py").write_text("import sys\nsys.exit()\n")
    for name in ("leaving:task", "importing:task"):
        for command in (("run", "digits", "--task", name), ("diagnose", name)):
            result = call(*command, code=2)
            assert "sys.exit(" in result.stderr
            assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("given", [nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyLinear(2))], ids=["module", "maker"])
def test_a_model_without_shapes_is_refused(given):
    with pytest.raises(ga.GradalignError, match="has no shape yet"):
        run(task(model=given))


class Odd(nn.Linear):
    def get_extra_state(self):
        return {"version": 3}


class Broken(nn.Linear):
    def get_extra_state(self):
        raise KeyError("gone")


class Twofold(nn.Linear):
    """Has a tensor of a kind that the file format does not know."""

    def get_extra_state(self):
        return torch.zeros(2, dtype=torch.complex128)


@pytest.mark.parametrize("kind", [Odd, Broken, Twofold])
def test_a_model_that_cannot_be_written_is_refused_before_training(tmp_path, kind):
    steps = []

    def loss(outputs, targets):
        steps.append(1)
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(ga.GradalignError, match="state"):
        run(task(model=lambda: kind(3, 2), loss=loss), out=tmp_path / "run")
    assert not steps


def test_asking_whether_a_model_can_be_written_does_not_write_it():
    wide = task(model=lambda: nn.Linear(3, 1_000_000))
    model = wide.make_model(0)
    tracemalloc.start()
    try:
        require_writable(model)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000, "16 MB of weights"
    finally:
        tracemalloc.stop()


def test_a_thousand_million_seeds_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("compare", "digits", "--seeds", 10**9, code=2)
    assert "--seeds must be a whole number of at least 1 and at most 10,000" in result.stderr


# Strangers' files. Each is read in a process that may have little memory.

BOMBS = {
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 3 << 30),
    "a byte array that is not there": b"\x80\x05\x96" + struct.pack("<Q", 3 << 30),
    "a text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30),
    "a long number that is not there": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1),
    "a memo place far away": b"\x80\x02]r" + struct.pack("<I", 0x0FFFFFFF) + b".",
    "a memo place in words": b"]p268435455\n.",
    "many lists": lzma.compress(b"\x80\x02" + b"]" * (8 << 20)),
    "one text encoded over and over": lzma.compress(
        b"\x80\x02X" + struct.pack("<I", 10 << 20) + b"a" * (10 << 20) + b"q\x000c_codecs\nencode\nq\x010"
        b"]q\x02(" + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 200 + b"e."
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_takes_no_memory_for_nothing(tmp_path, name):
    content = BOMBS[name]
    path = tmp_path / ("batch.xz" if content.startswith(b"\xfd7zXZ") else "batch")
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ga.GradalignError, match="batch"):
        read_batch(path, "labels", 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 900 << 10, "kilobytes"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_honest_pickles_of_every_protocol_are_read(tmp_path, protocol):
    content = cifar_batch(20, 10, 1)
    content |= {key.encode(): value for key, value in list(content.items()) if protocol > 2}
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol=protocol))
    images, labels = read_batch(tmp_path / "batch", "labels", 10)
    assert np.array_equal(images.reshape(20, -1), content["data"])
    assert labels.tolist() == content["labels"]


def test_an_idx_file_larger_than_any_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("gradalign.tasks.readers._MOST_ARRAY", 1 << 20)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(struct.pack(">4I", 0x0803, 1 << 31, 28, 28) + bytes(1 << 24)))
    with pytest.raises(ga.GradalignError, match="holds more than"):
        read_idx(path, 3)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"users": ["a"], "num_samples": ["x"], "user_data": {"a": 3}}'])
def test_odd_json_is_one_sentence(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ga.GradalignError):
        read_shakespeare([tmp_path / "a.json"])
    with pytest.raises(ga.GradalignError, match=r"task\.parts"):
        custom(5, tmp_path / "a.json")
    assert json.dumps("kept")


@pytest.mark.parametrize("length", ["ten", "-5", "1e3", "9" * 40, "99999999999", None], ids=str)
def test_a_server_that_lies_about_the_length_or_never_ends(tmp_path, length):
    class Endless(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            if length is not None:
                self.send_header("Content-Length", length)
            self.end_headers()
            try:
                for _ in range(400):
                    self.wfile.write(bytes(1 << 16))
            except OSError:
                pass

        def log_message(self, *_):
            pass

    web = HTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        archive = Archive(
            url=f"http://127.0.0.1:{web.server_port}/a.zip", known_hash="md5:0", members={"a": "a"}, most_bytes=1 << 20
        )
        with pytest.raises(ga.GradalignError) as caught:
            fetch(archive, tmp_path)
        assert "sends more than 1,048,576 bytes" in str(caught.value) or length in ("-5", "9" * 40)
        assert "\n" not in str(caught.value)
    finally:
        web.shutdown()
        web.server_close()
        thread.join()
    assert list(tmp_path.iterdir()) == []
