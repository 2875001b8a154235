"""The Task: all that training needs to know about what is trained, and on whose data."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from gradalign.errors import GradalignError, named_failure
from gradalign.seeding import Purpose, global_stream
from gradalign.tasks.batches import Examples, TensorExamples, Transform, as_examples, example_count
from gradalign.tasks.metrics import Metric, NamedMetric, check_metrics


def with_metrics(task: Task, names: Sequence[str]) -> Task:
    """Return the task with torchmetrics' metrics of these names beside its own, which come first where names meet."""
    added = {name: NamedMetric(name) for name in names if name not in task.metrics}
    return replace(task, metrics={**task.metrics, **added}) if added else task


def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return (outputs, targets) of a batch that is an (inputs, targets) pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise GradalignError("a batch must be an (inputs, targets) pair; for any other shape give Task(predict=...)")
    inputs, targets = batch
    return model(inputs), targets


def share_correct(outputs: Any, targets: Any) -> Tensor | None:
    """Return the share of right classes, or None where outputs and targets are not class scores and labels."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if outputs.ndim != targets.ndim + 1 or outputs.ndim < 2:
        return None
    # Classes along the second axis, as torch's losses have them, or along the last, as models of text give them.
    for axis in (1, outputs.ndim - 1):
        rest = outputs.shape[:axis] + outputs.shape[axis + 1 :]
        if rest == targets.shape and outputs.shape[axis] > 1:
            return (outputs.argmax(dim=axis) == targets).double().mean()
    return None


def plain_value(value: Any) -> Any:
    """Return a value that JSON and TOML can hold: numbers, words, lists and tables; anything else as its text."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # NumPy's and torch's numbers and arrays
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else str(value)


def _require_whole(model: nn.Module) -> None:
    """Refuse a model with lazy layers that have not seen a batch yet, or whose state cannot be read."""
    states = (*model.named_parameters(), *model.named_buffers())
    lazy = next((name for name, value in states if is_lazy(value)), None)
    if lazy is not None:
        raise GradalignError(
            f"the model's {lazy} has no shape yet, as in nn.LazyLinear; give its sizes, or let the function that makes "
            "the model run one batch through it"
        )
    with named_failure("the model's state", "cannot be read"):  # by a get_extra_state or a hook of the user's own
        model.state_dict()


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
        text = repr(part)
        shown = text if len(text) <= 80 else f"{text[:77]}..."
        raise GradalignError(f"a partition needs lists of row numbers; client {client} has {shown}")
    return rows.to(torch.int64)


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

    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


def _entry(entries: Sequence[Any], index: int, seed: int, *keys: int) -> Any:
    """Return one entry; a sequence that makes them on demand draws from a stream of the entry's own."""
    if isinstance(entries, PartitionedClients | list | tuple):
        return entries[index]
    with global_stream(seed, Purpose.CLIENT, index, *keys):
        return entries[index]


@dataclass(frozen=True, kw_only=True, repr=False)
class Task:
    """What is trained and on whose data.

    Attributes:
        model: A function that makes the model, or a model to start from (it is copied).
        clients: One entry per client: (inputs, targets) tensors or arrays, or a map-style dataset. Any sequence
            will do, so entries may also be made on demand.
        test: The test examples, in the same forms; None when there are none.
        loss: ``loss(outputs, targets)``, a scalar: the mean over the batch.
        predict: ``predict(model, batch)`` gives (outputs, targets); replace it for batches of another shape.
        augment: ``augment(batch)`` returns a changed batch, in local steps only: never in the gradient phase, never in
            evaluation. It draws from torch's (or NumPy's) global generator, which then follows the run's seed.
        accuracy: ``accuracy(outputs, targets)`` gives the batch's mean accuracy, or None where it has none.
        scored_on: What the test examples are called in the metrics: "validation" where ``hold_out`` put held-out
            training examples in their place.
        client_tests: Each client's own test examples, one entry per client in the same forms, None for a client that
            has none. With them a run also tells how every client fares; nobody's examples are taken in their stead.
            ``hold_out`` gives every client those that were held out from it.
        metrics: Further metrics by name, beside loss and accuracy: ``metric(outputs, targets)`` over all test examples
            at once, or a ``torchmetrics.Metric``. The column of "f1" is ``test_f1``.
        groups: Which examples belong together, where some do: one entry per client with, for each of its examples, a
            whole number, a name, or a pair (first, last) of whole numbers. ``hold_out`` never puts examples that share
            a number on both sides: pictures of one patient, or windows of text, whose pairs are the letters they cover.
        client_names: What the clients are called in the report, one name each; by default their numbers.
        class_names: What the classes are called in pictures of who holds which; by default their numbers.
        name: The task's name in run folders and tables.
        facts: Anything worth printing beside the results, such as the partition or the size of a subset.
    """

    model: Callable[[], nn.Module] | nn.Module
    clients: Sequence[Any]
    test: Any = None
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    predict: Callable[[nn.Module, Any], tuple[Any, Any]] = predict
    augment: Callable[[Any], Any] | None = None
    accuracy: Callable[[Any, Any], Tensor | float | None] = share_correct
    scored_on: Literal["test", "validation"] = "test"
    client_tests: Sequence[Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    groups: Sequence[Any] | None = None
    client_names: Sequence[str] | None = None
    class_names: Sequence[str] = ()
    name: str = "custom"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "loss", "predict", "accuracy", "augment"):
            given = getattr(self, name)
            if not callable(given) and not (name == "augment" and given is None):
                raise GradalignError(f"Task.{name} must be a function, got {given!r}")
        if self.scored_on not in ("test", "validation"):
            raise GradalignError(f'Task.scored_on must be "test" or "validation", got {self.scored_on!r}')
        if not isinstance(self.name, str):
            raise GradalignError(f"Task.name must be a text, got {self.name!r}")
        if not isinstance(self.facts, Mapping):
            raise GradalignError(f"Task.facts must be a dictionary, got {self.facts!r}")
        if not hasattr(self.clients, "__len__") or not hasattr(self.clients, "__getitem__"):
            raise GradalignError(f"Task.clients must be a sequence with one entry per client, got {self.clients!r}")
        count = len(self.clients)
        if count == 0:
            raise GradalignError(f"the task {self.name} has no clients")
        for name in ("groups", "client_tests", "client_names"):
            given = getattr(self, name)
            if given is not None and (not hasattr(given, "__len__") or len(given) != count):
                raise GradalignError(f"Task.{name} must be a sequence with one entry for each of {count} clients")
        check_metrics(self.metrics)
        for client, entry in enumerate(self.client_tests if isinstance(self.client_tests, list | tuple) else ()):
            try:
                _ = entry is None or example_count(entry)
            except GradalignError as error:
                raise GradalignError(f"Task.client_tests, client {client}: {error}") from None
        # A list is all there already: look at it now. A lazy sequence is looked at client by client.
        if self.sizes is not None and not self.sizes.all():
            raise self._has_none(int(self.sizes.argmin()))

    def __repr__(self) -> str:
        """Return name and counts: data and models are long."""
        words = [f"{len(self.clients):,} client{'s' * (len(self.clients) != 1)}"]
        if (sizes := self.sizes) is not None:
            words.append(f"{int(sizes.sum()):,} training examples")
        if self.test_examples is not None:
            words.append(f"{len(self.test_examples):,} {self.scored_on} examples")
        words += ["tests of clients"] * (self.client_tests is not None) + list(self.metrics)
        return f"<Task {self.name}: {', '.join(words)}>"

    def _has_none(self, client: int) -> GradalignError:
        return GradalignError(f"client {client} of the task {self.name} has no examples; every client needs some")

    def client(self, index: int, seed: int = 0) -> Examples:
        """Return one client's examples; a sequence that makes them on demand draws from a stream of its own."""
        examples = as_examples(_entry(self.clients, index, seed))
        if len(examples) == 0:
            raise self._has_none(index)
        return examples

    def client_test(self, index: int, seed: int = 0) -> Examples | None:
        """Return one client's own test examples, None where it has none; made on demand as clients may be."""
        if self.client_tests is None:
            return None
        # Another stream than the client's: examples drawn from the same one would be its training examples.
        entry = _entry(self.client_tests, index, seed, 1)
        return None if entry is None else as_examples(entry) or None

    @cached_property
    def sizes(self) -> NDArray[np.int64] | None:
        """The number of examples of every client; None where they are made on demand. Counted once."""
        if isinstance(self.clients, PartitionedClients):
            return self.clients.sizes()
        if isinstance(self.clients, list | tuple):
            return np.array([example_count(entry) for entry in self.clients], np.int64)
        return None

    @cached_property
    def test_examples(self) -> Examples | None:
        """The test examples behind one interface."""
        return None if self.test is None else as_examples(self.test) or None

    def make_model(self, seed: int, device: torch.device | str = "cpu") -> nn.Module:
        """Make the model from this seed, in training mode."""
        if isinstance(self.model, nn.Module):
            _require_whole(self.model)
            model = copy.deepcopy(self.model)
        else:
            failure = named_failure(f"the model of the task {self.name}", "could not be made")
            with failure, global_stream(seed, Purpose.INIT):
                model = self.model()
        if not isinstance(model, nn.Module):
            raise GradalignError(f"Task.model must make a torch.nn.Module, got {type(model).__name__}")
        _require_whole(model)
        try:
            return model.to(device).train()
        except (RuntimeError, AssertionError) as error:
            raise GradalignError(f'the model cannot be put on the device "{device}": {error}') from error

    def describe(self) -> dict[str, Any]:
        """Return counts and facts for summaries."""
        counts: dict[str, Any] = {"name": self.name, "clients": len(self.clients)}
        if (sizes := self.sizes) is not None:
            counts["train_examples"] = int(sizes.sum())
            counts["examples_per_client"] = [int(sizes.min()), int(np.median(sizes)), int(sizes.max())]
        counts["test_examples"] = 0
        counts[f"{self.scored_on}_examples"] = 0 if self.test_examples is None else len(self.test_examples)
        for name, value in self.facts.items():
            # A fact named like one of these counts stands beside it.
            counts[f"{name} (fact)" if name in counts else str(name)] = plain_value(value)
        return counts
