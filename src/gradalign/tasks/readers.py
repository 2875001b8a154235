"""Strict readers of data files, none of which trusts its file: IDX (EMNIST), pickles (CIFAR), LEAF's JSON.

What is compressed or declared large is read up to a bound. Nothing that a pickle names is ever imported or called: a
CIFAR batch holds strings, whole numbers, lists and one array of bytes, and the few names that such an array is pickled
under lead to stand-ins, which take the array's bytes and nothing else. Any other name ends the reading.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import pickle
import pickletools
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's vocabulary; a letter's code is its place in it."""
SEQUENCE = 80

# Far more than the largest file of each kind; a compressed bomb stops here instead of filling the memory.
_MOST_TEXT = 4 << 30
_MOST_ARRAY = 1 << 30  # the largest array of IDX, of all of NIST's letters and digits, has 550 MB
_MOST_PICKLE = 1 << 28  # the largest batch has 155 MB
_MOST_OPERATIONS = 2_000_000  # the largest batch has a few hundred thousand

_UNKNOWN = 255
_CODES = np.full(256, _UNKNOWN, np.uint8)
_CODES[np.frombuffer(LETTERS.encode("latin1"), np.uint8)] = np.arange(len(LETTERS), dtype=np.uint8)


def _read_bytes(path: Path, most: int) -> bytes:
    """Return a file's content, decompressed when its name ends in .gz or .xz; refuse more than ``most`` bytes."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise GradalignError(f"{path} is cut short or damaged: {error}") from None
    if len(content) > most:
        raise GradalignError(f"{path} holds more than {most:,} bytes, which no such file does")
    return content


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, plain or gzipped, with this many dimensions: 3 for images, 1 for labels."""
    content, header = _read_bytes(path, _MOST_ARRAY), 4 + 4 * dimensions
    if len(content) < header:
        raise GradalignError(f"{path} is cut short: {len(content)} bytes are not even its header")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    expected = 0x0800 | dimensions  # 8 stands for unsigned bytes
    if magic != expected:
        kind = {1: "labels", 3: "images"}.get(dimensions, f"{dimensions}-dimensional")
        raise GradalignError(f"{path} is not an IDX file of {kind}: it starts with {magic}, not {expected}")
    size, found = math.prod(shape), len(content) - header
    if found != size:
        fault = "cut short" if found < size else "too long"
        raise GradalignError(f"{path} is {fault}: its header says {size:,} bytes, it has {found:,}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


class _ByteType:
    """Stands in for numpy.dtype and is only ever uint8."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        if name not in ("u1", b"u1", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"an array of type {name!r}")

    def __setstate__(self, _: Any) -> None:
        """Ignore byte order and the like."""


class _ArrayKind:
    """Stands in for numpy.ndarray, which pickles only name."""


class _Array:
    """Stands in for an array that is being unpickled; ``value`` is the array once its state has come."""

    value: NDArray[np.uint8] | None = None

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if fortran or not isinstance(kind, _ByteType):
            raise pickle.UnpicklingError("an array of an unusual layout")
        raw = self._reader.encode(raw) if isinstance(raw, str) else raw
        if not isinstance(raw, bytes | bytearray):
            raise pickle.UnpicklingError("an array without bytes")
        self.value = np.frombuffer(raw, np.uint8).reshape([int(side) for side in shape])


class _Reader(pickle.Unpickler):
    """Builds nothing but strings, numbers, lists and arrays, and no more of them than such a file has bytes for."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._left = 2 * len(content)  # bytes that texts may be turned into
        self._stand_ins: dict[tuple[str, str], Any] = {
            ("numpy", "dtype"): _ByteType,
            ("numpy", "ndarray"): _ArrayKind,
            ("_codecs", "encode"): self.encode,
        }
        for module in ("numpy.core", "numpy._core"):
            self._stand_ins[f"{module}.multiarray", "_reconstruct"] = self._reconstruct
            self._stand_ins[f"{module}.numeric", "_frombuffer"] = self._from_buffer

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._stand_ins:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file needs")
        return self._stand_ins[module, name]

    def encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError("text of an unusual encoding")
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it repeats its content over and over")
        return text.encode("latin1")

    def _reconstruct(self, kind: Any, *_: Any) -> _Array:
        if kind is not _ArrayKind:
            raise pickle.UnpicklingError("an array of an unusual class")
        return _Array(self)

    def _from_buffer(self, buffer: Any, kind: Any, shape: Any, order: Any) -> _Array:
        array = _Array(self)
        array.__setstate__((1, shape, kind, order != "C", buffer))
        return array


def _survey(content: bytes) -> None:
    """Go over a pickle's operations without carrying any out, and stop at what would take memory for nothing.

    Python's reader makes room for as many bytes as an operation declares and for as many memo places as it names,
    before it looks whether they are there.
    """
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if count >= _MOST_OPERATIONS:
                raise pickle.UnpicklingError(f"it has more than {_MOST_OPERATIONS:,} operations")
            if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= count + 1:
                raise pickle.UnpicklingError(f"it numbers its {count}th operation {argument}")
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from None


def read_batch(path: Path, label_key: str, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read one CIFAR batch, plain or .xz: images (N, 3, 32, 32) and labels (N,), both bytes.

    ``label_key`` is "labels" for CIFAR-10 and "fine_labels" for CIFAR-100.
    """
    try:
        content = _read_bytes(path, _MOST_PICKLE)
        _survey(content)
        batch = _Reader(content).load()
    except GradalignError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise GradalignError(f"{path} is not a CIFAR batch: {str(error) or type(error).__name__}") from None
    found = batch if isinstance(batch, dict) else {}
    found = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    if "data" not in found or label_key not in found:
        raise GradalignError(f'{path} is not a CIFAR batch with "data" and "{label_key}"')
    data, labels = found["data"], found[label_key]
    pixels = data.value if isinstance(data, _Array) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != 3072 or not len(pixels):
        shape = "no array" if pixels is None else f"shape {pixels.shape}"
        raise GradalignError(f"{path}: the images must be N rows of 3072 bytes, got {shape}")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise GradalignError(f"{path}: it must have one label for each of its {len(pixels)} images")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise GradalignError(f"{path}: labels must be whole numbers from 0 to {classes - 1}")
    return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.uint8)


def _encode(text: str, where: str) -> NDArray[np.uint8]:
    """Return the codes of all letters of a text."""
    try:
        codes = _CODES[np.frombuffer(text.encode("latin1"), np.uint8)]
        strange = np.flatnonzero(codes == _UNKNOWN)[:1].tolist()
    except UnicodeEncodeError as error:
        strange = [error.start]
    if strange:
        raise GradalignError(f"{where} has the letter {text[strange[0]]!r}, which LEAF's vocabulary lacks")
    return codes


def _windows(data: Any, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return one user's windows (n, 80) and the letters that follow (n,)."""
    if not isinstance(data, Mapping) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        raise GradalignError(f'{where} must have the lists "x" and "y"')
    x, y = data["x"], data["y"]
    if len(x) != len(y):
        raise GradalignError(f"{where} has {len(x)} windows but {len(y)} next letters")
    if not all(isinstance(window, str) and len(window) == SEQUENCE for window in x):
        raise GradalignError(f"{where} has a window that is not a text of {SEQUENCE} letters")
    if not all(isinstance(letter, str) and len(letter) == 1 for letter in y):
        raise GradalignError(f"{where} has a next letter that is not one letter")
    return _encode("".join(x), where).reshape(-1, SEQUENCE), _encode("".join(y), where)


def window_starts(letters: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return where in its text each window begins, given windows with the letter that follows, in the text's order.

    A window begins as much later as the one before it must be moved to agree with it. Windows that agree at no shift
    are taken for neighbours in the text.
    """
    length = letters.shape[1]
    steps = np.full(max(len(letters) - 1, 0), length, np.int64)
    open_ = np.arange(len(steps))
    for shift in range(1, length):
        agree = (letters[open_, shift:] == letters[open_ + 1, : length - shift]).all(axis=1)
        steps[open_[agree]] = shift
        open_ = open_[~agree]
        if not len(open_):
            break
    return np.concatenate([[0], np.cumsum(steps)])[: len(letters)]


def _leaf_content(path: Path) -> Mapping[str, Any]:
    text = _read_bytes(path, _MOST_TEXT)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GradalignError(f"{path} is cut short or not JSON: {error}") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("user_data"), Mapping):
        raise GradalignError(f'{path} is not a LEAF file: it has no "user_data"')
    users, counts = content.get("users"), content.get("num_samples")
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise GradalignError(f'{path} is not a LEAF file: it needs "users" and as many "num_samples"')
    if not all(isinstance(user, str) for user in users) or set(users) != set(content["user_data"]):
        raise GradalignError(f'{path}: "users" and "user_data" name different users')
    return content


def read_shakespeare(paths: Sequence[Path]) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """Read LEAF files, plain or gzipped, as one set; a user may occur in one of them only.

    Returns:
        The users in the order of the files, and arrays: ``x`` (N, 80) and ``y`` (N,) letter codes, ``owner`` (N,) the
        number of the user in that order, ``start`` (N,) where in the user's text each window begins.
    """
    users: list[str] = []
    xs, ys = [], []
    for path in paths:
        content = _leaf_content(path)
        for user, count in zip(content["users"], content["num_samples"], strict=True):
            where = f"{path}: the user {user}"
            x, y = _windows(content["user_data"][user], where)
            if len(x) != count:
                raise GradalignError(f'{where} has {len(x)} windows, but "num_samples" says {count}')
            users.append(user)
            xs.append(x)
            ys.append(y)
    twice = [user for user, times in Counter(users).items() if times > 1]
    if twice:
        raise GradalignError(f"{paths[0].parent}: the user {twice[0]} occurs twice")
    if not any(map(len, ys)):
        raise GradalignError(f"{paths[0].parent}: there are no windows of text")
    starts = [window_starts(np.concatenate([x, y[:, None]], axis=1)) for x, y in zip(xs, ys, strict=True)]
    return users, {
        "x": np.concatenate(xs),
        "y": np.concatenate(ys),
        "owner": np.repeat(np.arange(len(users), dtype=np.int32), [len(y) for y in ys]),
        "start": np.concatenate(starts).astype(np.int32),
    }
