"""Metrics beside loss and accuracy: numbers of all predictions at once, such as F1 or AUC, which no mean of batches is.

A metric is a function of (outputs, targets) over all test examples, or a ``torchmetrics.Metric``. Predictions are
gathered in the examples' order from whoever made them, so the value does not depend on how many did.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradalign.errors import ClientError, GradalignError, need

Metric = Callable[[Tensor, Tensor], Any]
_OF_CLASSES = {
    "auc": "auroc",
    "average_precision": "average_precision",
    "f1": "f1_score",
    "precision": "precision",
    "recall": "recall",
    "mcc": "matthews_corrcoef",
}
_OF_NUMBERS = {"mae": "mean_absolute_error", "mse": "mean_squared_error", "r2": "r2_score"}
NAMED = (*_OF_CLASSES, *_OF_NUMBERS)
"""What a recipe may name, by torchmetrics' functions."""
_RANKED = ("auc", "average_precision")  # of a class, they compare its examples with others: both must be there
_SMALLER_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "drift")


def kept_prediction(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return a batch's predictions as metrics get them."""
    for name, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor) or value.ndim == 0:
            kind = "a single number" if isinstance(value, Tensor) else type(value).__name__
            raise GradalignError(f"Task.metrics needs {name} that are a tensor with an entry per example, got {kind}")
    return outputs.detach().cpu(), targets.detach().cpu()


def metrics_of(
    metrics: Mapping[str, Metric], predictions: Sequence[tuple[Tensor, Tensor]], *, lenient: bool = False
) -> dict[str, float]:
    """Return every metric over all predictions.

    ``lenient`` leaves out what is not defined on these examples: the AUC of a client with one class.
    """
    if not metrics or not predictions:
        return {}
    outputs, targets = (torch.cat(parts) for parts in zip(*predictions, strict=True))
    found = {}
    for name, metric in metrics.items():
        try:
            value = float(_value_of(metric, outputs, targets))
        except Exception as error:
            if lenient:
                continue
            raise ClientError(f'the metric "{name}" failed: {type(error).__name__}: {error}') from error
        if not lenient or math.isfinite(value):
            found[name] = value
    return found


def _value_of(metric: Any, outputs: Tensor, targets: Tensor) -> Any:
    if not is_gathering(metric):
        return metric(outputs, targets)
    metric.reset()
    metric.update(outputs, targets)
    return metric.compute()


def is_gathering(metric: Any) -> bool:
    """Return whether this is a torchmetrics.Metric, or an object like one, and no function."""
    return all(callable(getattr(metric, verb, None)) for verb in ("reset", "update", "compute"))


def larger_is_better(name: str, metric: Any = None) -> bool:
    """Return which way a metric gets better: what it says itself, else by its name."""
    known = getattr(metric, "higher_is_better", None)
    return known if isinstance(known, bool) else not name.endswith(_SMALLER_IS_BETTER) and name != "r"


def check_metrics(metrics: Any) -> None:
    """Refuse what is no table of metrics."""
    if not isinstance(metrics, Mapping):
        raise GradalignError(f"Task.metrics must be a dictionary of functions by name, got {metrics!r}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "accuracy"):
            problem = "is not a metric's name; use letters, digits and _, and not loss or accuracy"
            raise GradalignError(f"Task.metrics: {name!r} {problem}")
        if isinstance(metric, type) or not (callable(metric) or is_gathering(metric)):
            raise GradalignError(f"Task.metrics: {name} must be a function or a torchmetrics.Metric, got {metric!r}")


@dataclass(frozen=True)
class NamedMetric:
    """One of torchmetrics' functions by a short name; the number of classes is that of the outputs.

    Of classes it is the mean over those that occur ("macro"). One output, or none beside the examples, is a binary
    problem's.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMED:
            raise GradalignError(f'measure.metrics: "{self.name}" is not known; known are {", ".join(NAMED)}')
        need("torchmetrics", "metrics")

    @property
    def higher_is_better(self) -> bool:
        return self.name not in ("mae", "mse")

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        functions = need("torchmetrics.functional", "metrics")
        if self.name in _OF_NUMBERS:
            return getattr(functions, _OF_NUMBERS[self.name])(outputs.reshape(-1), targets.reshape(-1))
        function = getattr(functions, _OF_CLASSES[self.name])
        classes = outputs.shape[1] if outputs.ndim > 1 else 1
        if classes == 1:
            outputs, targets = outputs.reshape(-1).sigmoid(), targets.reshape(-1).long()
            return math.nan if self._ranks_nothing(targets) else function(outputs, targets, task="binary")
        options = {"task": "multiclass", "num_classes": classes}
        if self.name == "mcc":
            return function(outputs, targets, **options)
        if self.name not in _RANKED:
            return function(outputs, targets, **options, average="macro")
        with warnings.catch_warnings(action="ignore"):  # of classes without examples, which are left out
            each = function(outputs, targets, **options, average="none")
        counts = torch.bincount(targets.reshape(-1), minlength=classes)
        return each[(counts > 0) & (counts < counts.sum())].mean()

    def _ranks_nothing(self, targets: Tensor) -> bool:
        return self.name in _RANKED and len(targets.unique()) < 2
