"""The data sets of the paper's experiments, read from files in their usual layouts and decoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.tasks.readers import LETTERS, SEQUENCE, read_batch, read_idx, read_shakespeare
from gradalign.tasks.storage import Arrays, cached_arrays, data_folder, find_file

CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "emnist": tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "shakespeare": tuple(LETTERS.replace("\n", "⏎").replace(" ", "␣")),
}
_EMNIST_PLACES = ("EMNIST/raw", "EMNIST/raw/gzip", "EMNIST/gzip", "EMNIST", "emnist", "gzip", "raw", ".")
_SHAKESPEARE_PLACES = ("shakespeare", "shakespeare/data", "data", ".")

Files = dict[str, list[Path]]
"""The files of the splits "train" and "test"."""
_Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Images and their labels."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Examples and labels, as bytes; the owner of each example where the data has owners.

    ``spans`` says which examples belong together, where some do: those that share a number from first to last.
    """

    inputs: Tensor
    labels: NDArray[np.uint8]
    owners: NDArray[np.int32] | None
    spans: NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set as it was found on disk, in the folder ``where``."""

    name: str
    train: Part
    test: Part
    where: Path
    classes: int
    full: tuple[int, int] | None = None
    """The published numbers of training and test examples, where there are such."""
    users: tuple[str, ...] = ()
    """The names of the owners."""

    def facts(self) -> dict[str, str]:
        """Return what a summary says about the data: how much of the published set it is."""
        found = (len(self.train.labels), len(self.test.labels))
        if self.full is None or found == self.full:
            return {}
        return {"subset": f"files with {found[0]:,} + {found[1]:,} of {self.full[0]:,} + {self.full[1]:,} examples"}


def _data_set(
    name: str, files: Files, decode: Callable[[Files], Arrays], classes: int, full: tuple[int, int] | None = None
) -> DataSet:
    """Return the data set of these files, decoded now or before."""
    sources = files["train"] + files["test"]
    arrays = cached_arrays(name, sources, partial(decode, files))
    users = tuple(str(user) for user in arrays.get("users", ()))
    train, test = (_part(arrays, split) for split in ("train", "test"))
    where = sources[0].parent.parent if users else sources[0].parent
    return DataSet(name=name, train=train, test=test, where=where, classes=classes, full=full, users=users)


def _part(arrays: Arrays, split: str) -> Part:
    owners, starts, spans = (arrays.get(f"{split}_{name}") for name in ("owner", "start", "alike"))
    if starts is not None and owners is not None:
        spans = _text_spans(starts, owners)
    return Part(inputs=torch.from_numpy(arrays[f"{split}_x"]), labels=arrays[f"{split}_y"], owners=owners, spans=spans)


def _text_spans(starts: NDArray[np.int32], owners: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the letters that belong to each window: its own, the next one, and as many again to keep windows apart."""
    reach = 2 * SEQUENCE
    text = int(starts.max()) + reach + 1  # longer than any, so that no two texts meet
    first = owners.astype(np.int64) * text + starts
    return np.stack([first, first + reach], axis=1)


def _read_images(read: Callable[[list[Path]], Iterable[_Labelled]], files: Files) -> Arrays:
    """Return what ``read`` makes of each split's files, and the training images' spans where some are the same picture.

    An image's span is the first image that is the same picture.
    """
    arrays: Arrays = {}
    for split, paths in files.items():
        images, labels = zip(*read(paths), strict=True)
        arrays[f"{split}_x"], arrays[f"{split}_y"] = np.concatenate(images), np.concatenate(labels)
    first: dict[bytes, int] = {}
    digests = (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in arrays["train_x"])
    found = np.array([first.setdefault(digest, row) for row, digest in enumerate(digests)], np.int64)
    return arrays if len(first) == len(found) else arrays | {"train_alike": np.stack([found, found], axis=1)}


def _missing(data_set: str, folder: Path, looked_for: str) -> GradalignError:
    get, point = f"gradalign data get {data_set.replace('-', '').lower()}", "point GRADALIGN_DATA or --data-dir at"
    advice = f"run: {get}, or {point} a folder that has it"
    if data_set == "Shakespeare":
        advice = f"make it with LEAF's own scripts (see: {get}), and {point} it"
    return GradalignError(f"{data_set} is not in {folder}: there is no {looked_for}; {advice}")


def emnist_data(named: str | None = None, *, extra: bool = False) -> DataSet:
    """Return EMNIST Balanced, upright.

    Args:
        named: The data folder; the usual one when None.
        extra: Use the ``emnist-balancedextra`` files too, which hold further images of the same classes.
    """
    folder = data_folder(named)
    files: Files = {"train": [], "test": []}
    for split, paths in files.items():
        for kind in ("balanced", "balancedextra") if extra else ("balanced",):
            for content in ("images-idx3", "labels-idx1"):
                name = f"emnist-{kind}-{split}-{content}-ubyte"
                found = find_file(folder, _EMNIST_PLACES, (f"{name}.gz", name))
                if found is None:
                    raise _missing("EMNIST", folder, f"{name}.gz (nor in EMNIST/raw or gzip)")
                paths.append(found)
    decode = partial(_read_images, _read_emnist)
    return _data_set("emnist", files, decode, 47, None if extra else (112_800, 18_800))


def _read_emnist(paths: list[Path]) -> Iterator[_Labelled]:
    for image_path, label_path in zip(paths[::2], paths[1::2], strict=True):
        images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
        if images.shape[1:] != (28, 28):
            raise GradalignError(f"{image_path}: the images must be 28×28, got {images.shape[1]}×{images.shape[2]}")
        if len(images) != len(labels):
            raise GradalignError(f"{label_path} has {len(labels):,} labels for {len(images):,} images")
        if not len(labels) or labels.max() >= 47:
            what = f"the label {labels.max()}" if len(labels) else "no label"
            raise GradalignError(f"{label_path} must have labels from 0 to 46, it has {what}")
        yield images.transpose(0, 2, 1)[:, None], labels  # the files store every image transposed


def cifar_data(classes: int, named: str | None = None) -> DataSet:
    """Return CIFAR-10 or CIFAR-100 (fine labels), whichever has this many classes."""
    folder = data_folder(named)
    home, label_key, train, test = {
        10: ("cifar-10-batches-py", "labels", [f"data_batch_{n}" for n in range(1, 6)], "test_batch"),
        100: ("cifar-100-python", "fine_labels", ["train"], "test"),
    }[classes]
    files: Files = {}
    for split, batches in (("train", train), ("test", [test])):
        found = [find_file(folder, (home, "."), (name, f"{name}.xz")) for name in batches]
        files[split] = [path for path in found if path is not None]
        if not files[split]:
            raise _missing(f"CIFAR-{classes}", folder, f"{home}/{batches[0]} or {batches[0]}.xz")
    decode = partial(_read_images, lambda paths: (read_batch(path, label_key, classes) for path in paths))
    return _data_set(f"cifar{classes}", files, decode, classes, (50_000, 10_000))


def shakespeare_data(named: str | None = None) -> DataSet:
    """Return LEAF's Shakespeare: windows of 80 letters, the letter that follows, and whose speech it is."""
    folder = data_folder(named)
    files: Files = {}
    for split in ("train", "test"):
        found = (_json_files(folder / place / split) for place in _SHAKESPEARE_PLACES)
        files[split] = next((paths for paths in found if paths), [])
        if not files[split]:
            raise _missing("Shakespeare", folder, f"shakespeare/{split}/*.json or *.json.gz")
    return _data_set("shakespeare", files, _read_shakespeare, 80)


def _json_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name.endswith((".json", ".json.gz")) and path.is_file())


def _read_shakespeare(files: Files) -> Arrays:
    users, train = read_shakespeare(files["train"])
    test_users, test = read_shakespeare(files["test"])
    number = {user: index for index, user in enumerate(users)}
    stranger = next((user for user in test_users if user not in number), None)
    if stranger is not None:
        raise GradalignError(f"{files['test'][0]}: the user {stranger} has test windows but no training windows")
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
