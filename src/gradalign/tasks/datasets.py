"""The data sets of the paper's experiments, read from files in their usual layouts and kept decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.tasks.cache import Arrays, cached_arrays
from gradalign.tasks.folders import data_folder, find_file, missing
from gradalign.tasks.idx import read_idx
from gradalign.tasks.leaf import SEQUENCE, read_shakespeare
from gradalign.tasks.pickled import read_batch

EMNIST_CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
EMNIST_PLACES = ("EMNIST/raw", "EMNIST/raw/gzip", "EMNIST/gzip", "EMNIST", "emnist", "gzip", "raw", ".")
SHAKESPEARE_PLACES = ("shakespeare", "shakespeare/data", "data", ".")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Examples and labels, as bytes; the owner of each example where the data has owners.

    ``spans`` says which examples belong together, where some do: those that share a number from first to last.
    """

    inputs: Tensor
    labels: NDArray[np.uint8]
    owners: NDArray[np.int32] | None = None
    spans: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set as it was found on disk.

    Attributes:
        name: The name of its task.
        train: The training examples.
        test: The test examples.
        where: The folder that the files lie in.
        classes: The number of classes.
        full: The published numbers of training and test examples, where there are such.
        users: The names of the owners.
    """

    name: str
    train: Part
    test: Part
    where: Path
    classes: int
    full: tuple[int, int] | None = None
    users: tuple[str, ...] = ()

    def facts(self) -> dict[str, str]:
        """Return what a summary says about the data: how much of the published set it is."""
        found = (len(self.train.labels), len(self.test.labels))
        if self.full is None or found == self.full:
            return {}
        return {"subset": f"files with {found[0]:,} + {found[1]:,} of {self.full[0]:,} + {self.full[1]:,} examples"}


def _part(arrays: Arrays, split: str) -> Part:
    inputs = torch.from_numpy(arrays[f"{split}_x"])
    owners = arrays.get(f"{split}_owner")
    if f"{split}_start" in arrays and owners is not None:
        spans: NDArray[np.int64] | None = _text_spans(arrays[f"{split}_start"], owners)
    else:
        spans = arrays.get(f"{split}_alike")
    return Part(inputs=inputs, labels=arrays[f"{split}_y"], owners=owners, spans=spans)


def _text_spans(starts: NDArray[np.int32], owners: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the letters that belong to each window: its own, the next one, and as many again to keep windows apart."""
    reach = 2 * SEQUENCE
    text = int(starts.max()) + reach + 1  # longer than any, so that no two texts meet
    first = owners.astype(np.int64) * text + starts
    return np.stack([first, first + reach], axis=1)


def _alike(images: NDArray[np.uint8]) -> Arrays:
    """Return the span of each image: the first one that is the same picture; nothing when all differ."""
    first: dict[bytes, int] = {}
    digests = (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in images)
    found = np.array([first.setdefault(digest, row) for row, digest in enumerate(digests)], np.int64)
    return {} if len(first) == len(images) else {"train_alike": np.stack([found, found], axis=1)}


def emnist_data(named: str | None = None, *, extra: bool = False) -> DataSet:
    """Return EMNIST Balanced, upright.

    Args:
        named: The data folder; the usual one when None.
        extra: Use the ``emnist-balancedextra`` files too, which hold further images of the same classes.
    """
    folder = data_folder(named)
    kinds = ("balanced", "balancedextra") if extra else ("balanced",)
    files: dict[str, list[tuple[Path, Path]]] = {"train": [], "test": []}
    for kind in kinds:
        for split, pairs in files.items():
            pairs.append(
                (
                    _emnist_file(folder, f"emnist-{kind}-{split}-images-idx3-ubyte"),
                    _emnist_file(folder, f"emnist-{kind}-{split}-labels-idx1-ubyte"),
                )
            )
    sources = [path for pairs in files.values() for pair in pairs for path in pair]
    arrays = cached_arrays("emnist", sources, lambda: _read_emnist(files))
    return DataSet(
        name="emnist",
        train=_part(arrays, "train"),
        test=_part(arrays, "test"),
        where=sources[0].parent,
        classes=47,
        full=None if extra else (112_800, 18_800),
    )


def _emnist_file(folder: Path, name: str) -> Path:
    found = find_file(folder, EMNIST_PLACES, (f"{name}.gz", name))
    if found is None:
        advice = "run: gradalign data get emnist, or point GRADALIGN_DATA or --data-dir at a folder that has it"
        raise missing("EMNIST", folder, f"{name}.gz (nor in EMNIST/raw or gzip)", advice)
    return found


def _read_emnist(files: dict[str, list[tuple[Path, Path]]]) -> Arrays:
    arrays: Arrays = {}
    for split, pairs in files.items():
        images, labels = [], []
        for image_path, label_path in pairs:
            image, label = read_idx(image_path, 3), read_idx(label_path, 1)
            if image.shape[1:] != (28, 28):
                raise GradalignError(f"{image_path}: the images must be 28×28, got {image.shape[1]}×{image.shape[2]}")
            if len(image) != len(label):
                raise GradalignError(f"{label_path} has {len(label):,} labels for {len(image):,} images")
            if not len(label) or label.max() >= 47:
                what = f"the label {label.max()}" if len(label) else "no label"
                raise GradalignError(f"{label_path} must have labels from 0 to 46, it has {what}")
            images.append(image.transpose(0, 2, 1)[:, None])  # the files store every image transposed
            labels.append(label)
        arrays[f"{split}_x"], arrays[f"{split}_y"] = np.concatenate(images), np.concatenate(labels)
    return arrays | _alike(arrays["train_x"])


def cifar_data(classes: int, named: str | None = None) -> DataSet:
    """Return CIFAR-10 or CIFAR-100 (fine labels), whichever has this many classes."""
    folder = data_folder(named)
    home = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[classes]
    names = {
        10: {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]},
        100: {"train": ["train"], "test": ["test"]},
    }[classes]
    files: dict[str, list[Path]] = {}
    for split, batches in names.items():
        found = [find_file(folder, (home, "."), (name, f"{name}.xz")) for name in batches]
        files[split] = [path for path in found if path is not None]
        if not files[split]:
            advice = (
                f"run: gradalign data get cifar{classes}, or point GRADALIGN_DATA or --data-dir at a folder that has it"
            )
            raise missing(f"CIFAR-{classes}", folder, f"{home}/{batches[0]} or {batches[0]}.xz", advice)
    label_key = "labels" if classes == 10 else "fine_labels"
    sources = files["train"] + files["test"]
    arrays = cached_arrays(f"cifar{classes}", sources, partial(_read_cifar, files, label_key, classes))
    return DataSet(
        name=f"cifar{classes}",
        train=_part(arrays, "train"),
        test=_part(arrays, "test"),
        where=sources[0].parent,
        classes=classes,
        full=(50_000, 10_000),
    )


def _read_cifar(files: dict[str, list[Path]], label_key: str, classes: int) -> Arrays:
    arrays: Arrays = {}
    for split, paths in files.items():
        batches = [read_batch(path, label_key, classes) for path in paths]
        arrays[f"{split}_x"] = np.concatenate([images for images, _ in batches])
        arrays[f"{split}_y"] = np.concatenate([labels for _, labels in batches])
    return arrays | _alike(arrays["train_x"])


def shakespeare_data(named: str | None = None) -> DataSet:
    """Return LEAF's Shakespeare: windows of 80 letters, the letter that follows, and whose speech it is."""
    folder = data_folder(named)
    files: dict[str, list[Path]] = {}
    for split in ("train", "test"):
        found = (_json_files(folder / place / split) for place in SHAKESPEARE_PLACES)
        files[split] = next((paths for paths in found if paths), [])
        if not files[split]:
            advice = (
                "make it with LEAF's own scripts (see: gradalign data get shakespeare), "
                "and point GRADALIGN_DATA or --data-dir at it"
            )
            raise missing("Shakespeare", folder, f"shakespeare/{split}/*.json or *.json.gz", advice)
    sources = files["train"] + files["test"]
    arrays = cached_arrays("shakespeare", sources, lambda: _read_shakespeare(files))
    return DataSet(
        name="shakespeare",
        train=_part(arrays, "train"),
        test=_part(arrays, "test"),
        where=sources[0].parent.parent,
        classes=80,
        users=tuple(str(user) for user in arrays["users"]),
    )


def _json_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name.endswith((".json", ".json.gz")) and path.is_file())


def _read_shakespeare(files: dict[str, list[Path]]) -> Arrays:
    users, train = read_shakespeare(files["train"])
    test_users, test = read_shakespeare(files["test"])
    strangers = [user for user in test_users if user not in set(users)]
    if strangers:
        raise GradalignError(f"{files['test'][0]}: the user {strangers[0]} has test windows but no training windows")
    number = {user: index for index, user in enumerate(users)}
    renumbered = np.array([number[user] for user in test_users], np.int32)
    return {
        "users": np.array(users),
        **{f"train_{name}": array for name, array in train.items()},
        **{f"test_{name}": array for name, array in test.items()},
        "test_owner": renumbered[test["owner"]],
    }


DATA_SETS: dict[str, Callable[..., DataSet]] = {
    "emnist": emnist_data,
    "cifar10": partial(cifar_data, 10),
    "cifar100": partial(cifar_data, 100),
    "shakespeare": shakespeare_data,
}


def describe_data(name: str) -> dict[str, Any]:
    """Return what ``gradalign data`` lists of one data set, or why it cannot be used."""
    try:
        data = DATA_SETS[name]()
    except GradalignError as error:
        return {"name": name, "here": False, "why": str(error)}
    return {
        "name": name,
        "here": True,
        "train_examples": len(data.train.labels),
        "test_examples": len(data.test.labels),
        "classes": data.classes,
        "users": len(data.users) or None,
        "full": data.full,
        "where": str(data.where),
    }
