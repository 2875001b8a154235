"""Small data sets in the original formats, written by the tests themselves."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle
import struct
from pathlib import Path

import numpy as np

from gradalign.tasks.readers import LETTERS, SEQUENCE


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes(), 1))


def write_emnist(folder: Path, per_class: int = 4, place: str = "EMNIST/raw") -> None:
    """Write 47 classes; image and label tell each other, so that readers cannot mix them up."""
    rng = np.random.default_rng(0)
    for split, count in (("train", per_class), ("test", 1)):
        labels = rng.permutation(np.repeat(np.arange(47), count))
        images = rng.integers(0, 200, (len(labels), 28, 28))
        images[:, 0, 1] = labels + 200  # row 0, column 1 as stored; row 1, column 0 upright
        write_idx(folder / place / f"emnist-balanced-{split}-images-idx3-ubyte.gz", images)
        write_idx(folder / place / f"emnist-balanced-{split}-labels-idx1-ubyte.gz", labels)


def cifar_batch(count: int, classes: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    labels = [int(label) for label in rng.permutation(np.arange(count) % classes)]
    data = rng.integers(0, 256, (count, 3072)).astype(np.uint8)
    data[:, 0] = labels
    names = {"labels": labels} if classes == 10 else {"fine_labels": labels, "coarse_labels": [0] * count}
    return {"data": data, "batch_label": "part", "filenames": ["a.png"] * count, **names}


def write_pickle(path: Path, content: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = pickle.dumps(content, protocol=protocol)
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


def write_cifar(folder: Path, suffix: str = ".xz") -> None:
    for number in range(1, 6):
        write_pickle(folder / f"cifar-10-batches-py/data_batch_{number}{suffix}", cifar_batch(20, 10, number))
    write_pickle(folder / f"cifar-10-batches-py/test_batch{suffix}", cifar_batch(20, 10, 6))
    write_pickle(folder / f"cifar-100-python/train{suffix}", cifar_batch(300, 100, 7))
    write_pickle(folder / f"cifar-100-python/test{suffix}", cifar_batch(100, 100, 8))


def leaf_content(users: int, windows: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    names = [f"PLAY_ROLE{number}" for number in range(users)]
    data = {}
    for number, name in enumerate(names):
        text = "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), SEQUENCE + windows + number))
        starts = range(len(text) - SEQUENCE)
        data[name] = {"x": [text[i : i + SEQUENCE] for i in starts], "y": [text[i + SEQUENCE] for i in starts]}
    return {"users": names, "num_samples": [len(data[name]["y"]) for name in names], "user_data": data}


def write_shakespeare(folder: Path, suffix: str = ".json.gz") -> None:
    for split, windows, seed in (("train", 8, 0), ("test", 2, 1)):
        path = folder / f"shakespeare/{split}/all_data_niid_0_keep_0_{split}_8{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(leaf_content(12, windows, seed)).encode()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)


def write_all(folder: Path) -> None:
    write_emnist(folder)
    write_cifar(folder)
    write_shakespeare(folder)
