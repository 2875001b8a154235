"""Examples from which batches are drawn: tensors, arrays or any map-style dataset, one interface."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from gradalign.errors import GradalignError

Transform = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""What is done to a batch of tensors when it is drawn, such as bytes to normalised floats; never random."""


class Examples(ABC):
    """A set of examples that can hand out any batch of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, index: Tensor) -> Any:
        """Return the examples at these positions, collated."""


class TensorExamples(Examples):
    """Examples that lie in tensors; ``rows`` selects and orders them without copying.

    ``transform`` acts on each batch as it is drawn, so that images can lie in memory as bytes, once for everyone.
    """

    def __init__(
        self, tensors: tuple[Tensor, ...], rows: Tensor | None = None, transform: Transform | None = None
    ) -> None:
        first = tensors[0].shape[0] if tensors else 0
        if not tensors or any(t.shape[0] != first for t in tensors):
            lengths = {len(t) for t in tensors}
            raise GradalignError(f"inputs and targets must have the same length, got {sorted(lengths)}")
        self.tensors, self.rows, self.transform = tensors, rows, transform
        self._count = first if rows is None else len(rows)

    def __len__(self) -> int:
        return self._count

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        """Return the selected rows of every tensor."""
        rows = index if self.rows is None else self.rows[index]
        batch = tuple(t.index_select(0, rows) for t in self.tensors)
        return batch if self.transform is None else self.transform(batch)


class DatasetExamples(Examples):
    """Examples of a map-style dataset, collated as a DataLoader would."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: Tensor) -> Any:
        """Return the dataset's items at these positions, collated."""
        return default_collate([self.dataset[int(i)] for i in index])


def as_examples(data: Any) -> Examples:
    """Accept (inputs, targets) tensors or arrays, a map-style dataset, or Examples."""
    if isinstance(data, Examples):
        return data
    if type(data) is tuple and len(data) == 2 and type(data[0]) is type(data[1]) is Tensor:  # by far the most common
        inputs, targets = data
        if inputs.ndim and targets.ndim:
            return TensorExamples(data)
    if isinstance(data, TensorDataset):
        return TensorExamples(tuple(data.tensors))
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        if any(part.ndim == 0 for part in data):
            raise GradalignError("inputs and targets must have one entry per example, got a single number")
        # Arrays with negative strides are valid NumPy, but torch cannot see them.
        arrays = [np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part for part in data]
        # A named tuple's batches have its names too.
        names = getattr(type(data), "_make", None)
        return TensorExamples(tuple(torch.as_tensor(part) for part in arrays), transform=names)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | Mapping):
        return DatasetExamples(data)
    raise GradalignError(
        f"cannot read examples from {type(data).__name__}: give (inputs, targets) tensors or a map-style dataset"
    )


def _row_numbers(client: int, part: Any) -> Tensor:
    """Return a client's list of rows, which must be whole numbers: 0.5 is no row, and True is not row 1."""
    try:
        rows = torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        rows = torch.empty(0, 0)
    if rows.shape == (0,):
        return rows.to(torch.int64)
    mixed = isinstance(part, list | tuple) and bool in map(type, part)
    if rows.ndim != 1 or rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex() or mixed:
        raise GradalignError(f"a partition needs lists of row numbers; client {client} has {_brief(part)}")
    return rows.to(torch.int64)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def example_count(data: Any) -> int:
    """Return how many examples an entry of ``Task.clients`` has, without setting up more than it takes to know."""
    if type(data) in (tuple, list) and data and all(type(part) is Tensor and part.ndim for part in data):
        count: int = data[0].shape[0]
        if all(part.shape[0] == count for part in data):
            return count
    return len(as_examples(data))  # says what is wrong, where something is


class PartitionedClients(Sequence[Examples]):
    """Clients cut from one pool of tensors: client i holds the rows listed for it.

    The pool is stored once and the lists as one vector with offsets, so a hundred thousand clients cost no more
    than their rows.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        parts: Iterable[Sequence[int] | np.ndarray | Tensor],
        transform: Transform | None = None,
    ) -> None:
        lists = [_row_numbers(client, part) for client, part in enumerate(parts)]
        if not lists:
            raise GradalignError("a partition needs at least one client")
        self.tensors, self.transform = tensors, transform
        self.rows = torch.cat(lists)
        self.offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in lists])])
        pool = len(tensors[0])
        if len(self.rows) and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < pool:
            raise GradalignError(f"a partition names rows outside the pool of {pool} examples")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        client = operator.index(client)
        if not -len(self) <= client < len(self):
            raise IndexError(f"there are {len(self)} clients, and no client {client}")
        client %= len(self)
        start, stop = self.offsets[client], self.offsets[client + 1]
        return TensorExamples(self.tensors, self.rows[start:stop], self.transform)

    def sizes(self) -> np.ndarray:
        """Return the number of examples of every client."""
        return np.diff(self.offsets)
