"""Strict reader of IDX files, the format of MNIST and EMNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError

_UNSIGNED_BYTE = 0x08
# Far more than the largest file of this kind; a gzip bomb stops here instead of filling the memory.
_MOST_BYTES = 4 << 30
_MOST_ARRAY = 1 << 30  # the largest array of this kind, of all of NIST's letters and digits, has 550 MB


def read_bytes(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Return a file's content, decompressed when its name ends in .gz; refuse more than ``most`` bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise GradalignError(f"{path} is cut short or damaged: {error}") from None
    if len(content) > most:
        raise GradalignError(f"{path} holds more than {most:,} bytes, which no such file does")
    return content


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of bytes with this many dimensions.

    Args:
        path: The file; a name ending in .gz is decompressed.
        dimensions: 3 for images, 1 for labels.

    Raises:
        GradalignError: If the file is of another kind, cut short, or longer than its header says.
    """
    content = read_bytes(path, _MOST_ARRAY)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise GradalignError(f"{path} is cut short: {len(content)} bytes are not even its header")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    expected = (_UNSIGNED_BYTE << 8) | dimensions
    if magic != expected:
        kind = {1: "labels", 3: "images"}.get(dimensions, f"{dimensions}-dimensional")
        raise GradalignError(f"{path} is not an IDX file of {kind}: it starts with {magic}, not {expected}")
    size = int(np.prod(shape, dtype=object))
    if len(content) - header != size:
        found = "cut short" if len(content) - header < size else "too long"
        raise GradalignError(f"{path} is {found}: its header says {size:,} bytes, it has {len(content) - header:,}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
