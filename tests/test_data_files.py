"""Readers are strict, a malicious pickle runs nothing, the cache follows its sources, downloads are whole."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gradalign.errors import GradalignError
from gradalign.tasks.datasets import cifar_data, emnist_data, shakespeare_data
from gradalign.tasks.readers import LETTERS, read_batch, read_idx, read_shakespeare
from gradalign.tasks.storage import Archive, cached_arrays, data_folder, fetch, using_data_folder
from small_files import cifar_batch, leaf_content, write_cifar, write_emnist, write_idx, write_pickle, write_shakespeare


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_emnist_is_read_upright_wherever_it_lies(tmp_path):
    for place in ("EMNIST/raw", "gzip", "."):
        folder = tmp_path / place.replace("/", "-").replace(".", "here")
        write_emnist(folder, place=place)
        data = emnist_data(str(folder))
        assert data.train.inputs.shape == (188, 1, 28, 28)
        assert (data.train.inputs[:, 0, 1, 0].numpy() == data.train.labels + 200).all()
        assert len(data.test.labels) == 47
        assert "188 + 47 of 112,800 + 18,800" in data.facts()["subset"]


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_cifar_is_read_plain_and_compressed(tmp_path, suffix):
    write_cifar(tmp_path, suffix)
    for classes, train, test in ((10, 100, 20), (100, 300, 100)):
        data = cifar_data(classes, str(tmp_path))
        assert data.train.inputs.shape == (train, 3, 32, 32)
        assert (data.train.inputs[:, 0, 0, 0].numpy() == data.train.labels).all()
        assert len(data.test.labels) == test


@pytest.mark.parametrize("protocol", range(6))
def test_cifar_pickles_of_every_protocol(tmp_path, protocol):
    batch = cifar_batch(5, 10, 0)
    write_pickle(tmp_path / "b", batch, protocol)
    images, labels = read_batch(tmp_path / "b", "labels", 10)
    assert images.reshape(5, -1).tobytes() == batch["data"].tobytes()
    assert labels.tolist() == batch["labels"]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_shakespeare_is_read_with_its_owners(tmp_path, suffix):
    write_shakespeare(tmp_path, suffix)
    data = shakespeare_data(str(tmp_path))
    content = leaf_content(12, 8, 0)
    assert list(data.users) == content["users"]
    assert np.bincount(data.train.owners).tolist() == content["num_samples"]
    window = "".join(LETTERS[code] for code in data.train.inputs[0])
    assert window == content["user_data"]["PLAY_ROLE0"]["x"][0]
    assert LETTERS[data.train.labels[0]] == content["user_data"]["PLAY_ROLE0"]["y"][0]
    assert len(LETTERS) == len(set(LETTERS)) == 80


class Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "call",
    [
        (os.system, ("touch harmed",)),
        (eval, ("open('harmed', 'w')",)),
        (exec, ("open('harmed', 'w')",)),
        (Path.touch, (Path("harmed"),)),
        (np.save, ("harmed", [1])),
        (np.memmap, ("harmed", "u1", "w+", 0, (4,))),
    ],
)
def test_a_malicious_pickle_runs_nothing(tmp_path, monkeypatch, call, protocol):
    monkeypatch.chdir(tmp_path)
    for name, content in (("whole", Evil(call)), ("inside", cifar_batch(2, 10, 0) | {"more": Evil(call)})):
        write_pickle(tmp_path / name, content, protocol)
        with pytest.raises(GradalignError, match="is not a CIFAR batch: it asks for") as error:
            read_batch(tmp_path / name, "labels", 10)
        one_line(error)
    assert not list(tmp_path.glob("harmed*"))


BATCH_FAULTS = [
    (lambda b: b.pop("labels"), 'with "data" and "labels"'),
    (lambda b: b["labels"].pop(), "one label for each of its 4 images"),
    (lambda b: b["labels"].__setitem__(0, 10), "whole numbers from 0 to 9"),
    (lambda b: b["labels"].__setitem__(0, "cat"), "whole numbers from 0 to 9"),
    (lambda b: b.update(data=b["data"][:, :3071]), "3072 bytes, got shape"),
    (lambda b: b.update(data=[1, 2]), "got no array"),
    (lambda b: b.update(data=b["data"].astype(np.float32)), "an array of type"),
]


@pytest.mark.parametrize(("spoil", "message"), BATCH_FAULTS)
def test_faulty_cifar_batches(tmp_path, spoil, message):
    batch = cifar_batch(4, 10, 0)
    spoil(batch)
    write_pickle(tmp_path / "data_batch_1", batch)
    with pytest.raises(GradalignError, match=message) as error:
        read_batch(tmp_path / "data_batch_1", "labels", 10)
    assert "data_batch_1" in one_line(error)


@pytest.mark.parametrize("name", ["b", "b.xz"])
def test_cut_or_foreign_cifar_batches(tmp_path, name):
    path = tmp_path / name
    write_pickle(path, cifar_batch(4, 10, 0))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello", b"\x80\x02}."):
        path.write_bytes(content)
        with pytest.raises(GradalignError, match=name):
            read_batch(path, "labels", 10)


def test_faulty_idx_files(tmp_path):
    path = tmp_path / "images.gz"
    write_idx(path, np.zeros((3, 28, 28)))
    whole, content = path.read_bytes(), gzip.decompress(path.read_bytes())
    assert read_idx(path, 3).shape == (3, 28, 28)
    faults = {
        "not an IDX file of labels": (whole, 1),
        "cut short or damaged": (whole[:40], 3),
        "is cut short: its header says": (gzip.compress(content[:-1]), 3),
        "is too long: its header says": (gzip.compress(content + b"x"), 3),
        "not even its header": (gzip.compress(content[:9]), 3),
        "Not a gzipped file": (b"hello there", 3),
    }
    for message, (data, dimensions) in faults.items():
        path.write_bytes(data)
        with pytest.raises(GradalignError, match=message) as error:
            read_idx(path, dimensions)
        assert "images.gz" in one_line(error)


def test_mislabelled_emnist(tmp_path):
    raw = tmp_path / "EMNIST/raw"
    for labels, shape, message in (
        (np.full(4, 47), (4, 28, 28), "must have labels from 0 to 46, it has the label 47"),
        (np.zeros(3), (4, 28, 28), "has 3 labels for 4 images"),
        (np.zeros(4), (4, 28, 27), "the images must be 28×28, got 28×27"),
    ):
        write_emnist(tmp_path)
        write_idx(raw / "emnist-balanced-test-images-idx3-ubyte.gz", np.zeros(shape))
        write_idx(raw / "emnist-balanced-test-labels-idx1-ubyte.gz", labels)
        with pytest.raises(GradalignError, match=message) as error:
            emnist_data(str(tmp_path))
        assert "emnist-balanced-test" in one_line(error)


LEAF_FAULTS = [
    (lambda c: c.pop("user_data"), 'no "user_data"'),
    (lambda c: c["users"].pop(), "as many"),
    (lambda c: c["users"].__setitem__(0, "SOMEBODY"), "name different users"),
    (lambda c: c["num_samples"].__setitem__(0, 1), '"num_samples" says 1'),
    (lambda c: c["user_data"]["PLAY_ROLE0"]["y"].pop(), "windows but"),
    (lambda c: c["user_data"]["PLAY_ROLE0"].pop("x"), 'lists "x" and "y"'),
    (lambda c: c["user_data"]["PLAY_ROLE0"]["x"].__setitem__(0, "short"), "not a text of 80 letters"),
    (lambda c: c["user_data"]["PLAY_ROLE0"]["x"].__setitem__(0, "%" * 80), "the letter '%'"),
    (lambda c: c["user_data"]["PLAY_ROLE0"]["y"].__setitem__(0, "☃"), "the letter '☃'"),
    (lambda c: c["user_data"]["PLAY_ROLE0"]["y"].__setitem__(0, "ab"), "not one letter"),
]


@pytest.mark.parametrize(("spoil", "message"), LEAF_FAULTS)
def test_faulty_leaf_files(tmp_path, spoil, message):
    content = leaf_content(2, 3, 0)
    spoil(content)
    path = tmp_path / "all.json"
    path.write_text(json.dumps(content))
    with pytest.raises(GradalignError, match=message) as error:
        read_shakespeare([path])
    assert "all.json" in one_line(error)


def test_cut_leaf_file_and_a_user_twice(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(leaf_content(2, 3, 0)))
    b.write_text(a.read_text())
    with pytest.raises(GradalignError, match="PLAY_ROLE0 occurs twice"):
        read_shakespeare([a, b])
    b.write_text(a.read_text()[:100])
    with pytest.raises(GradalignError, match=r"b\.json is cut short or not JSON"):
        read_shakespeare([b])


def test_missing_data_says_where_and_how(tmp_path):
    for load, word in ((emnist_data, "emnist"), (shakespeare_data, "LEAF"), (lambda f: cifar_data(10, f), "cifar10")):
        with pytest.raises(GradalignError, match=word) as error:
            load(str(tmp_path))
        assert str(tmp_path) in one_line(error)
    with pytest.raises(GradalignError, match="does not exist"):
        data_folder("/nowhere/at/all")


def test_which_folder_is_used(tmp_path, monkeypatch):
    a, b, c = (tmp_path / name for name in "abc")
    for folder in (a, b, c):
        folder.mkdir()
    monkeypatch.delenv("GRADALIGN_DATA", raising=False)
    assert data_folder() == tmp_path / "cache" / "data"
    monkeypatch.setenv("GRADALIGN_DATA", str(a))
    assert data_folder() == a
    with using_data_folder(b):
        assert data_folder() == b
        assert data_folder(str(c)) == c
    assert data_folder() == a


def test_the_cache_is_used_and_follows_its_source(tmp_path):
    source = tmp_path / "source"
    made = []

    def decode():
        made.append(1)
        return {"a": np.arange(5) + len(source.read_bytes())}

    def get():
        return cached_arrays("kind", [source], decode)["a"]

    source.write_bytes(b"1")
    first, second = get(), get()
    assert len(made) == 1
    assert isinstance(second, np.memmap)
    second[0] = 99  # copy-on-write: nobody else sees this
    assert get().tolist() == first.tolist() == [1, 2, 3, 4, 5]
    source.write_bytes(b"12")
    assert get().tolist() == [2, 3, 4, 5, 6]
    (entry,) = (tmp_path / "cache/decoded").iterdir()  # the old entry and all workshops are gone
    (entry / "a.npy").write_bytes(b"damaged")
    assert get().tolist() == [2, 3, 4, 5, 6]
    assert len(made) == 3
    assert isinstance(get(), np.memmap)


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "file"))
    assert cached_arrays("kind", [tmp_path / "file"], lambda: {"a": np.ones(2)})["a"].tolist() == [1, 1]


def test_processes_that_start_together_agree(tmp_path):
    write_emnist(tmp_path)
    code = "from gradalign.tasks.datasets import emnist_data as e; print(int(e().train.inputs.sum()))"
    env = os.environ | {"GRADALIGN_DATA": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert len({process.communicate()[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)
    assert len(list((tmp_path / "cache/decoded").iterdir())) == 1


class Server(http.server.BaseHTTPRequestHandler):
    content = b""
    promised: int | None = None
    asked = 0

    def do_GET(self):
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(self.promised or len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    class Own(Server):
        pass

    web = http.server.HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    Own.url = f"http://127.0.0.1:{web.server_port}/some.archive"
    yield Own
    web.shutdown()
    web.server_close()
    thread.join()


def packed(kind: str) -> bytes:
    file = io.BytesIO()
    entries = {"gzip/wanted.gz": b"the data", "gzip/other.gz": b"not needed", "../outside": b"evil"}
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in entries.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def archive_at(server, content: bytes, member: str = "gzip/wanted.gz") -> Archive:
    known = "sha256:" + hashlib.sha256(content).hexdigest()
    return Archive(url=server.url, known_hash=known, members={member: "EMNIST/raw/wanted.gz"})


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_download_is_checked_and_only_what_is_needed_leaves_it(server, tmp_path, kind):
    server.content = packed(kind)
    archive = archive_at(server, server.content)
    (path,) = fetch(archive, tmp_path / "data")
    assert path.read_bytes() == b"the data"
    assert [p.name for p in (tmp_path / "data").rglob("*") if p.is_file()] == ["wanted.gz"]
    assert not (tmp_path / "outside").exists()
    fetch(archive, tmp_path / "data")
    assert server.asked == 1, "what is there is not downloaded again"


def test_an_altered_download_is_never_used(server, tmp_path):
    whole = packed("zip")
    server.content = whole[:-1] + b"x"
    with pytest.raises(GradalignError, match="did not arrive as published") as error:
        fetch(archive_at(server, whole), tmp_path / "data")
    one_line(error)
    assert not list((tmp_path / "data").rglob("*"))


def test_another_error_that_speaks_of_a_hash_is_not_an_altered_download(server, tmp_path):
    def bar(received, total):
        raise ValueError("no hash mark fits here")

    server.content = packed("zip")
    with pytest.raises(ValueError, match="no hash mark fits here"):
        fetch(archive_at(server, server.content), tmp_path / "data", progress=bar)
    assert not list((tmp_path / "data").rglob("*"))


def test_an_interrupted_download_is_never_used_and_can_be_repeated(server, tmp_path):
    whole = packed("tar")
    server.content, server.promised = whole[: len(whole) // 2], len(whole)
    with pytest.raises(GradalignError) as error:
        fetch(archive_at(server, whole), tmp_path / "data")
    assert server.url in one_line(error)
    assert not list((tmp_path / "data").rglob("*"))
    server.content = whole
    assert fetch(archive_at(server, whole), tmp_path / "data")[0].read_bytes() == b"the data"


def test_a_server_that_is_not_there_and_a_member_that_is_missing(server, tmp_path):
    nowhere = Archive(url="http://127.0.0.1:9/a.zip", known_hash="md5:0", members={"a": "a"})
    with pytest.raises(GradalignError, match=r"cannot download http://127\.0\.0\.1:9/a\.zip"):
        fetch(nowhere, tmp_path / "data")
    server.content = packed("zip")
    with pytest.raises(GradalignError, match="holds no file gzip/absent"):
        fetch(archive_at(server, server.content, "gzip/absent"), tmp_path / "data")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(GradalignError, match="cannot write to the data folder"):
        fetch(nowhere, tmp_path / "file")
