"""Shared memory through which a pool's server and its workers hand each other vectors, and how they write of them."""

from __future__ import annotations

import io
import math
import mmap
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gradalign.algorithms.plan import Combination
from gradalign.client.exchange import Broadcast, CachedGradient, Gradient
from gradalign.client.flat import Point
from gradalign.errors import GradalignError

_LINE = 16  # numbers that fill whole lines of the cache, in any precision


RowOfGradient = tuple[int, int, int | None, Gradient | None]
"""A remembered gradient in a message: its row, how many numbers it has there, and what CachedGradient has beside it.

Plain numbers: there is one for every client of a round, and a tensor takes a hundred times as long to write and read.
"""


class SharedBuffers:
    """All shared memory of a pool: what is broadcast, slots for groups of up to ``width`` clients, and gradients.

    A slot has a row for each client. Inputs and output lie apart: when a worker dies half-way, its successor finds the
    inputs unharmed. What is made after a worker was started is not seen by it.
    """

    def __init__(self, point: Point, slots: int, width: int, *, forked: bool = False) -> None:
        self._slots, self._width, self._forked = slots, width, forked
        self.rooms: dict[str, Tensor] = {}
        vectors = point._asdict().items()
        self.point = Point(*(self._room(name, vector.numel(), like=vector) for name, vector in vectors))
        self.mean = self._vectors("mean")
        self.shared: dict[str, Tensor] = {}
        """s by label."""
        self.kept: dict[str, Tensor] = {}
        """k_i by label, rows in each slot."""
        self.out = self._vectors("out", slots, width)
        self.floats = self._room("floats out", slots, width, point.floats.numel(), like=point.floats)
        self.ints = self._room("ints out", slots, width, point.ints.numel(), like=point.ints)
        self.gradients = self._vectors("gradients", 0, length=0)
        """A row for each client of a phase, where its gradient waits for the round's second phase."""

    def _room(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """Return zeros that workers see; most systems give them memory only where they are touched."""
        size = math.prod(shape) * like.dtype.itemsize
        if self._forked and size:
            room = torch.frombuffer(mmap.mmap(-1, size), dtype=like.dtype)
        else:
            room = torch.empty(0, dtype=like.dtype)
            room.set_(torch.UntypedStorage._new_shared(size))  # the kernel's fresh pages are zeros
        self.rooms[name] = room
        return room.view(shape)

    def _vectors(self, name: str, *shape: int, length: int | None = None) -> Tensor:
        """Return vectors that all begin lines of the cache: products written to other places may round differently."""
        length = self.point.x.numel() if length is None else length
        return self._room(name, *shape, -(-length // _LINE) * _LINE, like=self.point.x)[..., :length]

    def make_room(self, algorithm: Combination, shared: Iterable[str] = ()) -> bool:
        """Make room for what an algorithm's parts share and keep; return whether some was missing."""
        keepers = {part.label for part in algorithm.keepers} - self.kept.keys()
        sent = {part.label for part in algorithm.parts if part.extra_down}  # before there is an s to send
        missing = ({*shared} | keepers | sent) - self.shared.keys()
        self.kept |= {label: self._vectors(f"kept {label}", self._slots, self._width) for label in keepers}
        self.shared |= {label: self._vectors(f"shared {label}") for label in missing}
        return bool(keepers or missing)

    def make_room_for_gradients(self, clients: int, length: int) -> bool:
        """Make room for so many clients' gradients, or factors of them; return whether some was missing."""
        there, long = self.gradients.shape
        if there >= clients and long >= length:
            return False
        try:
            self.gradients = self._vectors("gradients", max(clients, there), length=max(length, long))
        except OSError as error:
            raise GradalignError(f"no memory for the gradients of {clients} clients: {error}") from error
        return True

    def row_of(self, vector: Tensor) -> int:
        """Return the row of a gradient that lies here."""
        return (vector.data_ptr() - self.gradients.data_ptr()) // (self.gradients.stride(0) * vector.itemsize)

    def written(self, entries: Mapping[int, CachedGradient]) -> dict[int, RowOfGradient]:
        """Return clients' gradients, which lie here, as they stand in a message."""
        return {
            client: (self.row_of(one.vector), one.vector.numel(), one.rows, one.reply)
            for client, one in entries.items()
        }

    def read(self, rows: Mapping[int, RowOfGradient]) -> dict[int, CachedGradient]:
        """Return the gradients that a message speaks of."""
        return {
            client: CachedGradient(self.gradients[row, :size], factor_rows, reply)
            for client, (row, size, factor_rows, reply) in rows.items()
        }

    def told(self, told: Broadcast) -> Broadcast:
        """Return a broadcast with its vectors in shared memory."""
        self.point.copy_(told.point)
        return replace(
            told,
            point=self.point,
            mean=None if told.mean is None else self.mean.copy_(told.mean),
            shared={label: self.shared[label].copy_(vector) for label, vector in told.shared.items()},
        )


def changed_settings(now: Combination, known: Combination | None) -> dict[str, dict[str, Any]] | None:
    """Return what a round's algorithm has set otherwise than the one known elsewhere; None if its classes differ.

    So only numbers are sent: an algorithm of the user's own may be of a class that cannot be sent.
    """
    if known is None or [type(part) for part in now.parts] != [type(part) for part in known.parts]:
        return None
    settings = {part.label: part.values() for part in known.parts}
    return {
        part.label: {name: value for name, value in part.values().items() if value is not settings[part.label][name]}
        for part in now.parts
    }


def vector_at(name: str, start: int, length: int) -> Tensor:
    """Stands, in what is written, for a vector in shared memory."""
    raise NotImplementedError("only Messages can read this")


def algorithm_with(settings: dict[str, dict[str, Any]]) -> Combination:
    """Stands, in what is written, for the known algorithm with some settings changed."""
    raise NotImplementedError("only Messages can read this")


class Messages:
    """How the server and its workers write to each other: vectors as places in shared memory, algorithms as settings.

    Both sides know the same rooms and the same algorithm.
    """

    def __init__(self, buffers: SharedBuffers, algorithm: Combination | None) -> None:
        self._rooms, self.algorithm = buffers.rooms, algorithm
        self._starts = sorted((room.data_ptr(), name) for name, room in buffers.rooms.items() if room.numel())

    def place_of(self, vector: Tensor) -> tuple[str, int, int] | None:
        """Return where a vector lies in shared memory, None if it does not."""
        if not vector.numel():
            return "floats" if vector.is_floating_point() else "ints", 0, 0
        after = bisect_right(self._starts, vector.data_ptr(), key=itemgetter(0))
        first, name = self._starts[after - 1]
        start, room = vector.data_ptr() - first, self._rooms[name]
        inside = after and start + vector.nbytes <= room.nbytes
        return (name, start // room.itemsize, vector.numel()) if inside else None

    def vector_at(self, name: str, start: int, length: int) -> Tensor:
        return self._rooms[name][start : start + length]

    def written(self, value: object) -> bytes:
        file = io.BytesIO()
        _Writer(file, self).dump(value)
        return file.getvalue()

    def read(self, data: bytes) -> Any:
        """Return what was written, its vectors being views of shared memory."""
        known = {} if self.algorithm is None else {"algorithm_with": self.algorithm.with_values}
        return _Reader(io.BytesIO(data), known | {"vector_at": self.vector_at}).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, messages: Messages) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._messages = messages

    def reducer_override(self, value: Any) -> Any:
        """Return what is written instead of a value, NotImplemented for one that is written as it is."""
        if isinstance(value, Tensor) and (place := self._messages.place_of(value)) is not None:
            return vector_at, place
        if isinstance(value, Combination):
            return algorithm_with, (changed_settings(value, self._messages.algorithm),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """Give what stands for vectors and algorithms its meaning."""
        return self._known[name] if module == __name__ else super().find_class(module, name)
