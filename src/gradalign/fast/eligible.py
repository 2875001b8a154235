"""Who may enter the ways of training several clients at once: decided here, by structure alone, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradalign.client.trainer import Setup
from gradalign.fast.linear import is_large
from gradalign.fast.stacks import ELEMENTWISE, flattens, has_hooks, is_hooked, is_plain_stack, pooled_first, pools
from gradalign.tasks.batches import Examples, TensorExamples
from gradalign.tasks.task import Task, predict, share_correct

LARGEST_MODEL = 60_000  # parameters, of a model for cohorts
SMALL_BATCH = 32


def cohort_layers(task: Task, model: nn.Module) -> list[nn.Module] | None:
    """Return the model's layers when clients can be trained in cohorts, else None."""
    model = nn.Sequential(model) if type(model) is nn.Linear else model
    if not isinstance(model, nn.Sequential) or not _classifies(task, model):
        return None
    images = any(_slides(layer) for layer in model)
    small = sum(p.numel() for p in model.parameters()) <= LARGEST_MODEL
    return list(model) if small and not images else None


def lockstep_model(setup: Setup) -> nn.Sequential | None:
    """Return a model of the task's when clients can and should be trained in lockstep, else None.

    That gains most where the batches are small and the model has a linear layer so large that reading it costs more
    than the arithmetic.
    """
    task, local = setup.task, setup.local
    if local.momentum or local.clip_norm is not None or local.batch_size is None or local.batch_size > SMALL_BATCH:
        return None
    model = task.make_model(setup.seed)
    if not isinstance(model, nn.Sequential) or not _classifies(task, model):
        return None
    return nn.Sequential(*pooled_first(list(model))) if any(is_large(layer) for layer in model) else None


def side_by_side(examples: Sequence[Examples]) -> list[TensorExamples] | None:
    """Return the clients' examples when they lie in tensors of one kind, features with class labels, else None."""
    found = [one for one in examples if type(one) is TensorExamples and len(one.tensors) == 2]
    if len(found) < len(examples):
        return None
    shape, dtype = found[0].tensors[0].shape[1:], found[0].tensors[0].dtype
    for one in found:
        inputs, targets = one.tensors
        labelled = targets.ndim == 1 and targets.dtype == torch.int64
        if one.transform is not None or inputs.shape[1:] != shape or inputs.dtype != dtype or not labelled:
            return None
    return found if dtype.is_floating_point else None


def _classifies(task: Task, model: nn.Sequential) -> bool:
    """Return whether a plain stack of known layers is trained by plain cross-entropy, and nobody looks inside."""
    plain_loss = task.loss is cross_entropy or (
        type(task.loss) is nn.CrossEntropyLoss
        and not is_hooked(task.loss)
        and task.loss.weight is None
        and (task.loss.reduction, task.loss.label_smoothing, task.loss.ignore_index) == ("mean", 0.0, -100)
    )
    plain_task = task.predict is predict and task.accuracy is share_correct and task.augment is None
    first = side_by_side([task.client(0)])
    if not is_plain_stack(model) or not plain_task or not plain_loss or first is None:
        return False
    return _plain(model) and _fit_together(model, first[0].tensors[0].ndim)


def _plain(model: nn.Sequential) -> bool:
    """Return whether the model is nothing but its layers' weights and biases, each used once, all of them trained."""
    each = [p for layer in model for p in layer.parameters(recurse=False)]
    every = list(model.parameters())
    names = {name for layer in model for name, _ in layer.named_parameters()}
    whole = len(each) == len(every) == len({id(p) for p in each}) and names <= {"weight", "bias"}
    kinds = {p.dtype for p in each}
    trained = all(p.requires_grad and not has_hooks(p) for p in each)
    watched = any(is_hooked(part) for part in model.modules())
    precise = kinds in ({torch.float32}, {torch.float64})
    return whole and trained and precise and not watched and not list(model.buffers())


def _fit_together(model: nn.Sequential, dimensions: int) -> bool:
    """Return whether all layers are known ones and each is given what it treats example by example.

    Inputs begin with so many dimensions, the batch's included.
    """
    for layer in model:
        if _slides(layer):
            known = dimensions == 4
        elif type(layer) is nn.Linear:
            known = dimensions == 2
        elif flattens(layer):
            known, dimensions = True, 2
        else:
            known = type(layer) in ELEMENTWISE
        if not known:
            return False
    return dimensions == 2


def _slides(layer: nn.Module) -> bool:
    """Return whether a layer looks at each image by itself, through a window."""
    return pools(layer) or type(layer) in (nn.AvgPool2d, nn.Conv2d)
