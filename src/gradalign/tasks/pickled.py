"""Reads the pickled CIFAR batches without trusting them: nothing a pickle names is ever imported or called.

Such a file holds strings, whole numbers, lists and one array of bytes. The few names that such an array is pickled
under lead to stand-ins here, which take the array's bytes and nothing else; any other name ends the reading.
"""

from __future__ import annotations

import io
import lzma
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradalign.errors import GradalignError

_MOST_BYTES = 1 << 28  # the largest such file has 155 MB
_MOST_OPERATIONS = 2_000_000  # the largest such file has a few hundred thousand


class _ByteType:
    """Stands in for numpy.dtype and is only ever uint8."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        if name not in ("u1", b"u1", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"an array of type {name!r}")

    def __setstate__(self, _: Any) -> None:
        """Byte order and the like mean nothing for single bytes."""


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
        """Return the stand-in for a name, or stop at a name that has none."""
        try:
            return self._stand_ins[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such file needs") from None

    def encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """Stand in for codecs.encode."""
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


def _content(path: Path) -> bytes:
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (EOFError, lzma.LZMAError) as error:
        raise GradalignError(f"{path} is cut short or damaged: {error}") from None
    if len(content) > _MOST_BYTES:
        raise GradalignError(f"{path} holds more than {_MOST_BYTES:,} bytes, which no such file does")
    return content


def read_batch(path: Path, label_key: str, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read one CIFAR batch, plain or .xz.

    Args:
        path: The file.
        label_key: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.
        classes: The number of classes; labels lie below it.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both bytes.

    Raises:
        GradalignError: If the file is not such a batch, or is a pickle that holds anything else.
    """
    try:
        content = _content(path)
        _survey(content)
        batch = _Reader(content).load()
    except GradalignError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise GradalignError(f"{path} is not a CIFAR batch: {str(error) or type(error).__name__}") from None
    if isinstance(batch, dict):
        batch = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    if not isinstance(batch, dict) or "data" not in batch or label_key not in batch:
        raise GradalignError(f'{path} is not a CIFAR batch with "data" and "{label_key}"')
    data, labels = batch["data"], batch[label_key]
    pixels = data.value if isinstance(data, _Array) else None
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != 3072 or not len(pixels):
        shape = "no array" if pixels is None else f"shape {pixels.shape}"
        raise GradalignError(f"{path}: the images must be N rows of 3072 bytes, got {shape}")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise GradalignError(f"{path}: it must have one label for each of its {len(pixels)} images")
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise GradalignError(f"{path}: labels must be whole numbers from 0 to {classes - 1}")
    return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.uint8)
