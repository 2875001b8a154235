"""Which tasks can be trained many clients at once, and the layers to do it with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gradalign.tasks.data import TensorExamples
from gradalign.tasks.task import Task, predict, share_correct

LARGEST_MODEL = 60_000
_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def layers_of(task: Task, model: nn.Module) -> list[nn.Module] | None:
    """Return the model's layers when this way of training applies to the task, else None."""
    plain_loss = task.loss is F.cross_entropy or (
        type(task.loss) is nn.CrossEntropyLoss
        and task.loss.weight is None
        and (task.loss.reduction, task.loss.label_smoothing, task.loss.ignore_index) == ("mean", 0.0, -100)
    )
    plain_task = task.predict is predict and task.accuracy is share_correct and task.augment is None
    if type(model) is not nn.Sequential or not plain_task or not plain_loss or not _labelled(task):
        return None
    layers = list(model)
    fits = all(type(layer) is nn.Linear or type(layer) in _ELEMENTWISE or _flattens(layer) for layer in layers)
    if not fits or not any(type(layer) is nn.Linear for layer in layers):
        return None
    parameters = list(model.parameters())
    same = all(p.requires_grad and p.dtype == parameters[0].dtype for p in parameters)
    distinct = len({id(p) for layer in layers for p in layer.parameters()}) == sum(
        len(list(layer.parameters())) for layer in layers
    )
    small = sum(p.numel() for p in parameters) <= LARGEST_MODEL
    return layers if same and distinct and small else None


def _labelled(task: Task) -> bool:
    """Return whether the clients' examples lie in tensors, features with class labels."""
    examples = task.client(0)
    if not isinstance(examples, TensorExamples) or len(examples.tensors) != 2 or examples.transform is not None:
        return False
    inputs, targets = examples.tensors
    return inputs.is_floating_point() and targets.ndim == 1 and targets.dtype == torch.int64


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
