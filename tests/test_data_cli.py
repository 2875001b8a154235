"""``gradalign data``: listing, getting, showing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from gradalign.tasks import storage as download
from small_files import write_emnist
from test_cli import call
from test_data_files import archive_at, packed, server  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_data_lists_counts_and_places(small_data):
    found = json.loads(call("data", "--json").stdout)
    assert found["folder"] == str(small_data)
    emnist, cifar10, cifar100, shakespeare = found["data"]
    assert (emnist["train_examples"], emnist["test_examples"]) == (188, 47)
    assert cifar10["train_examples"] == 100
    assert cifar100["classes"] == 100
    assert shakespeare["users"] == 12
    assert "188 of 112,800" in " ".join(call("data").stdout.split())


def test_data_says_what_is_missing_and_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    write_emnist(tmp_path / "d")
    (tmp_path / "d/EMNIST/raw/emnist-balanced-train-images-idx3-ubyte.gz").write_bytes(b"x")
    found = json.loads(call("data", "--data-dir", "d", "--json").stdout)
    assert [data["here"] for data in found["data"]] == [False] * 4
    assert "damaged" in found["data"][0]["why"]
    assert "gradalign data get cifar10" in found["data"][1]["why"]


def test_data_get_downloads_into_the_data_folder(server, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADALIGN_DATA", raising=False)
    monkeypatch.setitem(download.ARCHIVES, "emnist", _small_archive(server, tmp_path))
    out = call("data", "get", "emnist").stdout
    assert "188" in out
    assert (tmp_path / "cache/data/EMNIST/raw/emnist-balanced-train-images-idx3-ubyte.gz").is_file()
    assert server.asked == 1
    call("data", "get", "emnist")
    assert server.asked == 1
    call("data", "get", "emnist", "--data-dir", "new/folder")
    assert Path("new/folder/EMNIST/raw/emnist-balanced-train-images-idx3-ubyte.gz").is_file()
    assert "does not exist" in call("data", "--data-dir", "nowhere", code=2).stderr
    server.content = b"altered"
    call("data", "get", "emnist", "--data-dir", "other", code=2)
    assert not Path("other").exists()
    Path("file").touch()
    assert "is no folder" in call("data", "get", "emnist", "--data-dir", "file", code=2).stderr


def _small_archive(server, tmp_path):  # noqa: F811
    import io
    import zipfile

    write_emnist(tmp_path / "made", place="gzip")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted((tmp_path / "made/gzip").iterdir()):
            archive.write(path, f"gzip/{path.name}")
    server.content = file.getvalue()
    known = "md5:" + hashlib.md5(server.content).hexdigest()
    members = download.ARCHIVES["emnist"].members
    return download.Archive(url=server.url, known_hash=known, members=members)


def test_data_get_refuses_in_one_line(server, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("GRADALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADALIGN_DATA", raising=False)
    server.content = packed("zip") + b"altered"
    monkeypatch.setitem(download.ARCHIVES, "cifar10", archive_at(server, packed("zip")))
    for name, message in (
        ("cifar10", "did not arrive as published"),
        ("shakespeare", "make it with LEAF's scripts"),
        ("mnist", 'there is no data set "mnist"'),
    ):
        error = call("data", "get", name, code=2).stderr
        assert message in error
        assert len(error.strip().splitlines()) == 1


def test_published_archives_are_the_papers():
    assert download.ARCHIVES["emnist"].known_hash == "md5:58c8d27c78d21e728a6bc7b3cc06412e"
    assert all(len(archive.known_hash.split(":")[1]) in (32, 64) for archive in download.ARCHIVES.values())


@pytest.mark.parametrize(
    ("name", "words", "clients"),
    [
        ("emnist", ("--partition", "one-class"), 47),
        ("emnist", ("--partition", "dirichlet", "--clients", 6, "--set", "alpha=0.1"), 6),
        ("cifar100", (), 50),
        ("shakespeare", (), 12),
        ("digits", ("--partition", "sorted", "--set", "iid_share=0.2"), 20),
    ],
)
def test_data_show_counts_and_draws(small_data, name, words, clients):
    found = json.loads(call("data", "show", name, *words, "--out", "p.png", "--json").stdout)
    counts = np.array(found["counts"])
    assert counts.shape[0] == clients
    assert counts.sum() == found["task"]["train_examples"]
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_data_show_prints_a_table(small_data):
    out = call("data", "show", "emnist", "--partition", "one-class").stdout
    assert "and 35 clients more" in out
    assert Path("emnist-one-class.png").exists()
    assert "task.partition must be one of" in call("data", "show", "emnist", "--partition", "odd", code=2).stderr
    assert '"mnist" is not a task' in call("data", "show", "mnist", code=2).stderr
