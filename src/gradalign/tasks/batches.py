"""Examples from which batches are drawn, and the one walker over batches.

A batch is tensors in tuples, named tuples, lists and dictionaries, nested in any way. ``torch.utils._pytree`` walks
over most of these too, but takes 14 µs longer for a pair, which every local step would pay, and does not know a user's
own mappings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from gradalign.errors import GradalignError

Transform = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
"""What is done to a batch of tensors when it is drawn, such as bytes to normalised floats; never random."""
_DIFFERENT = "the clients' examples differ in form and cannot be joined"


class Examples(ABC):
    """A set of examples that can hand out any batch of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, index: Tensor) -> Any:
        """Return the examples at these positions, collated."""

    def select(self, rows: Tensor) -> Examples:
        """Return some of these examples, without a copy."""
        return Rows(self, rows)


class Rows(Examples):
    """Some rows of other examples."""

    def __init__(self, examples: Examples, rows: Tensor) -> None:
        self.examples, self.rows = examples, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> Any:
        return self.examples.batch(self.rows[index])


class TensorExamples(Examples):
    """Examples that lie in tensors; ``rows`` selects and orders them without copying.

    ``transform`` acts on each batch as it is drawn, so that images can lie in memory as bytes, once for everyone.
    """

    def __init__(
        self, tensors: tuple[Tensor, ...], rows: Tensor | None = None, transform: Transform | None = None
    ) -> None:
        lengths = {t.shape[0] for t in tensors}
        if len(lengths) != 1:
            raise GradalignError(f"inputs and targets must have the same length, got {sorted(lengths)}")
        self.tensors, self.rows, self.transform = tensors, rows, transform
        self._count = lengths.pop() if rows is None else len(rows)

    def __len__(self) -> int:
        return self._count

    def batch(self, index: Tensor) -> tuple[Tensor, ...]:
        rows = index if self.rows is None else self.rows[index]
        batch = tuple(t.index_select(0, rows) for t in self.tensors)
        return batch if self.transform is None else self.transform(batch)

    def select(self, rows: Tensor) -> TensorExamples:
        return TensorExamples(self.tensors, rows if self.rows is None else self.rows[rows], self.transform)


class DatasetExamples(Examples):
    """Examples of a map-style dataset, collated as a DataLoader would."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: Tensor) -> Any:
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
        arrays = (np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part for part in data)
        # A named tuple's batches have its names too.
        return TensorExamples(tuple(map(torch.as_tensor, arrays)), transform=getattr(type(data), "_make", None))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | Mapping):
        return DatasetExamples(data)
    raise GradalignError(
        f"cannot read examples from {type(data).__name__}: give (inputs, targets) tensors or a map-style dataset"
    )


def example_count(data: Any) -> int:
    """Return how many examples an entry of ``Task.clients`` has; quick, because there may be 200,000 of them."""
    if type(data) in (tuple, list) and data and all(type(part) is Tensor and part.ndim for part in data):
        count: int = data[0].shape[0]
        if all(part.shape[0] == count for part in data):
            return count
    return len(as_examples(data))  # says what is wrong, where something is


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch in the same form with every tensor changed; what is no tensor stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    parts = _parts(batch)
    return batch if parts is None else _rebuilt(batch, [map_tensors(change, part) for part in parts])


def take_examples(batch: Any, index: Tensor) -> Any:
    """Return the batch of these examples out of a larger one."""
    if isinstance(batch, Tensor):
        return batch.index_select(0, index)
    if _is_texts(batch):
        return _rebuilt(batch, [batch[int(i)] for i in index])
    parts = _parts(batch)
    return batch if parts is None else _rebuilt(batch, [take_examples(part, index) for part in parts])


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the examples of all, in the form of the first; they hold tensors and texts alone."""
    first = batches[0]
    if isinstance(first, Tensor):
        shapes = {tuple(part.shape[1:]) if isinstance(part, Tensor) and part.ndim else None for part in batches}
        if len(shapes) > 1 or None in shapes:
            raise GradalignError("the clients' examples differ in shape and cannot be joined")
        return torch.cat(list(batches))
    if _parts(first) is None:
        raise GradalignError(
            f"batches that hold a {type(first).__name__} cannot be joined; make them of tensors in tuples, named "
            "tuples, lists or dictionaries"
        )
    if any(type(batch) is not type(first) for batch in batches):
        raise GradalignError(_DIFFERENT)
    if _is_texts(first):
        return _rebuilt(first, [text for batch in batches for text in batch])
    places = [list(batch) if isinstance(batch, Mapping) else list(range(len(batch))) for batch in batches]
    if any(set(own) != set(places[0]) for own in places):
        raise GradalignError(_DIFFERENT)
    return _rebuilt(first, [join_batches([batch[place] for batch in batches]) for place in places[0]])


def batch_length(batch: Any) -> int:
    """Return how many examples a batch has: the length of its first tensor."""
    found: list[int] = []
    map_tensors(lambda tensor: found.append(len(tensor)) or tensor, batch)  # type: ignore[func-returns-value]
    if not found:
        raise GradalignError("a batch without any tensor has no examples")
    return found[0]


def _is_texts(batch: Any) -> bool:
    """Return whether this is a column of texts, one for each example."""
    return isinstance(batch, tuple | list) and bool(batch) and all(isinstance(value, str | bytes) for value in batch)


def _parts(batch: Any) -> list[Any] | None:
    """Return what a container holds; None for anything else."""
    if isinstance(batch, tuple | list):
        return list(batch)
    return list(batch.values()) if isinstance(batch, Mapping) else None


def _rebuilt(like: Any, values: list[Any]) -> Any:
    """Return a container of the same kind with other values."""
    if isinstance(like, Mapping):
        named = dict(zip(like, values, strict=True))
        if type(like) is dict:
            return named
        same = copy(like)  # keeps what else a mapping of one's own may carry
        try:
            same.update(named)  # type: ignore[attr-defined]
        except AttributeError:
            return named
        return same
    if hasattr(like, "_make"):
        return like._make(values)
    try:
        return type(like)(values)
    except TypeError:  # a sequence with a constructor of its own
        return tuple(values) if isinstance(like, tuple) else values
