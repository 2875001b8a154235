"""The one walker over batches: tensors in tuples, named tuples, lists and dictionaries, nested in any way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from gradalign.errors import GradalignError

_Texts = str | bytes


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch in the same form with every tensor changed; what is no tensor stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _rebuilt(batch, [map_tensors(change, value) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return _rebuilt(batch, [map_tensors(change, value) for value in batch])
    return batch


def join_batches(batches: Sequence[Any]) -> Any:
    """Return one batch with the examples of all, in the form of the first.

    Raises:
        GradalignError: If their forms or shapes differ, or if they hold anything but tensors and texts.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return _joined_tensors(batches)
    if not isinstance(first, Mapping | tuple | list):
        raise GradalignError(
            f"batches that hold a {type(first).__name__} cannot be joined; make them of tensors in tuples, named "
            "tuples, lists or dictionaries"
        )
    if any(type(batch) is not type(first) for batch in batches) or (
        isinstance(first, Mapping) and any(batch.keys() != first.keys() for batch in batches)
    ):
        raise GradalignError("the clients' examples differ in form and cannot be joined")
    if isinstance(first, tuple | list) and first and all(isinstance(value, _Texts) for value in first):
        return _rebuilt(first, [text for batch in batches for text in batch])  # a column of texts, one per example
    if len({len(batch) for batch in batches}) > 1:
        raise GradalignError("the clients' examples differ in form and cannot be joined")
    places = list(first) if isinstance(first, Mapping) else range(len(first))
    return _rebuilt(first, [join_batches([batch[place] for batch in batches]) for place in places])


def take_examples(batch: Any, index: Tensor) -> Any:
    """Return the batch of these examples out of a larger one."""
    if isinstance(batch, tuple | list) and batch and all(isinstance(value, _Texts) for value in batch):
        return _rebuilt(batch, [batch[int(i)] for i in index])
    if isinstance(batch, Mapping):
        return _rebuilt(batch, [take_examples(value, index) for value in batch.values()])
    if isinstance(batch, tuple | list):
        return _rebuilt(batch, [take_examples(value, index) for value in batch])
    return batch.index_select(0, index) if isinstance(batch, Tensor) else batch


def batch_length(batch: Any) -> int:
    """Return how many examples a batch has: the length of its first tensor."""
    found: list[int] = []
    map_tensors(lambda tensor: found.append(len(tensor)) or tensor, batch)  # type: ignore[func-returns-value]
    if not found:
        raise GradalignError("a batch without any tensor has no examples")
    return found[0]


def _joined_tensors(tensors: Sequence[Any]) -> Tensor:
    shapes = {tuple(tensor.shape[1:]) if isinstance(tensor, Tensor) and tensor.ndim else None for tensor in tensors}
    if len(shapes) > 1 or None in shapes:
        raise GradalignError("the clients' examples differ in shape and cannot be joined")
    return torch.cat(list(tensors))


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
