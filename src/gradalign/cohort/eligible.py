"""Which tasks can be trained many clients at once, and the layers to do it with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gradalign.fast import is_hooked, pool_before_relu
from gradalign.outer import LARGE, has_hooks
from gradalign.tasks.data import TensorExamples
from gradalign.tasks.task import Task, predict, share_correct
from gradalign.training import LocalTraining

LARGEST_MODEL = 60_000  # parameters, of a model for cohorts
SMALL_BATCH = 32
_ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def layers_of(task: Task, model: nn.Module) -> list[nn.Module] | None:
    """Return the model's layers when clients can be trained in cohorts, else None."""
    if not _classifies(task, model) or not isinstance(model, nn.Sequential):
        return None
    layers = list(model)
    fits = all(type(layer) is nn.Linear or type(layer) in _ELEMENTWISE or _flattens(layer) for layer in layers)
    small = sum(p.numel() for p in model.parameters()) <= LARGEST_MODEL
    return layers if fits and small else None


def lockstep_model(task: Task, local: LocalTraining, seed: int) -> nn.Sequential | None:
    """Return a model of the task's when clients can and should be trained in lockstep, else None.

    That gains most where the batches are small and the model has a linear layer so large that reading it costs more
    than the arithmetic.
    """
    if local.batch_size is None or local.batch_size > SMALL_BATCH:
        return None
    model = task.make_model(seed)
    if not _classifies(task, model) or not isinstance(model, nn.Sequential):
        return None
    fits = all(type(layer) in (nn.Linear, *_ELEMENTWISE) or _flattens(layer) or _slides(layer) for layer in model)
    if not fits or not any(type(layer) is nn.Linear and layer.weight.numel() >= LARGE for layer in model):
        return None
    pool_before_relu(model)
    return model


def _classifies(task: Task, model: nn.Module) -> bool:
    """Return whether the model is a stack of layers without hooks or shared parts, trained by plain cross-entropy."""
    plain_loss = task.loss is F.cross_entropy or (
        type(task.loss) is nn.CrossEntropyLoss
        and task.loss.weight is None
        and (task.loss.reduction, task.loss.label_smoothing, task.loss.ignore_index) == ("mean", 0.0, -100)
    )
    plain_task = task.predict is predict and task.accuracy is share_correct and task.augment is None
    if type(model) is not nn.Sequential or not plain_task or not plain_loss or not _labelled(task):
        return False
    parameters = list(model.parameters())
    same = bool(parameters) and all(p.requires_grad and p.dtype == parameters[0].dtype for p in parameters)
    each = [p for layer in model for p in layer.parameters()]
    distinct = len({id(p) for p in each}) == len(each)
    hooked = any(is_hooked(part) for part in model.modules()) or any(has_hooks(p) for p in each)
    return same and distinct and not hooked


def _labelled(task: Task) -> bool:
    """Return whether the clients' examples lie in tensors, features with class labels."""
    examples = task.client(0)
    if not isinstance(examples, TensorExamples) or len(examples.tensors) != 2 or examples.transform is not None:
        return False
    inputs, targets = examples.tensors
    return inputs.is_floating_point() and targets.ndim == 1 and targets.dtype == torch.int64


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _slides(layer: nn.Module) -> bool:
    """Return whether a layer looks at each image by itself, through a window."""
    pools = type(layer) is nn.MaxPool2d and not layer.return_indices
    return pools or type(layer) is nn.AvgPool2d or type(layer) is nn.Conv2d
