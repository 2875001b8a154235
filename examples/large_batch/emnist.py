"""A small reader for EMNIST Balanced in its original IDX files, gzip-compressed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEAN, STD = 0.1751, 0.3332


def _read(folder: Path, name: str, dimensions: int) -> np.ndarray:
    packed, plain = folder / f"{name}.gz", folder / name
    if not packed.exists() and not plain.exists():
        raise SystemExit(f"{folder} has no {name}; give the folder with the emnist-balanced-* files")
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    header = np.frombuffer(data, dtype=">u4", count=1 + dimensions)
    if header[0] != 0x0800 + dimensions:
        raise SystemExit(f"{name} is not an IDX file of bytes with {dimensions} dimensions")
    return np.frombuffer(data, dtype=np.uint8, offset=header.nbytes).reshape(header[1:])


def load(folder: Path, split: str, examples: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the first (images, labels) of a split, normalised."""
    images = torch.from_numpy(_read(folder, f"emnist-balanced-{split}-images-idx3-ubyte", 3)[:examples].copy())
    labels = torch.from_numpy(_read(folder, f"emnist-balanced-{split}-labels-idx1-ubyte", 1)[:examples].copy())
    return ((images / 255.0 - MEAN) / STD).flatten(1), labels.long()
