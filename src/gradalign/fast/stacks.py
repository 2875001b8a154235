"""Stacks of torch's own layers, run faster: channels innermost, pooling before ReLU, whole vector registers, spectra.

What is changed is how a plain ``nn.Sequential`` is carried out when it is called as a whole, and nothing else. Its
layers stay as they are, wherever a model's own code uses one of them, or some, by itself. A run of layers whose results
do not depend on the order in which memory holds an image is given images in the plain order and gives such ones back;
whatever comes after it (dropout, ``view``, a loss) sees what it always saw. So it is the same function by the stack's
structure alone, up to rounding, in training and in evaluation, whatever the rest of the model does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from gradalign.fast.spectrum import convolve

Step = Callable[[Tensor], Tensor]
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)
_BLIND = (*ELEMENTWISE, nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_LANES = 8  # float32 numbers in a vector register


def is_hooked(module: nn.Module) -> bool:
    """Return whether somebody watches what the module computes, or has replaced how it does."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    replaced = "forward" in vars(module) and not isinstance(module.forward, FasterStack | FasterConvolution)
    return bool(watched) or replaced or _has_any_global_hook()


def has_hooks(parameter: Tensor) -> bool:
    """Return whether somebody watches the parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_plain_stack(module: nn.Module) -> bool:
    """Return whether a module does nothing but call its members one after the other."""
    return type(module) is nn.Sequential and not is_hooked(module)


def run_stacks_faster(model: nn.Module) -> None:
    """Let every convolution of a model, and every plain stack with some in it, be carried out faster, in place."""
    for part in model.modules():
        if isinstance(part, nn.Sequential) and is_plain_stack(part):
            if any(type(layer) is nn.Conv2d for layer in part):
                part.forward = FasterStack(part)  # type: ignore[method-assign]
        elif type(part) is nn.Conv2d and not is_hooked(part):
            part.forward = FasterConvolution(part)  # type: ignore[method-assign]


def pooled_first(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers with every ReLU after the max-pooling that follows it: max(relu(x)) = relu(max(x)), on less.

    Exact, in value and in gradient: both keep the largest number of a window if it is positive and pass nothing back
    otherwise. A threshold at zero is a ReLU whose result may be changed in place, as that of pooling may.
    """
    found = list(layers)
    for place, (first, second) in enumerate(itertools.pairwise(layers)):
        if type(first) is nn.ReLU and pools(second):
            found[place], found[place + 1] = second, nn.Threshold(0.0, 0.0)
    return found


def pools(layer: nn.Module) -> bool:
    """Return whether a layer is max-pooling that gives images and nothing else."""
    return type(layer) is nn.MaxPool2d and not layer.return_indices


def is_blind(layer: nn.Module) -> bool:
    """Return whether a layer gives the same numbers however its images lie in memory."""
    return (type(layer) in _BLIND or pools(layer)) and not is_hooked(layer)


def flattens(layer: nn.Module) -> bool:
    """Return whether a layer makes one row of every example."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and not is_hooked(layer)


class FasterConvolution:
    """How a convolution that is called by itself is carried out; takes the place of its ``forward``."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if type(layer) is nn.Conv2d and _is_usual(input):
            return convolve(layer, input, layer.weight, layer.bias).contiguous()
        outputs: Tensor = type(layer).forward(layer, input)
        return outputs


class FasterStack:
    """How a stack is carried out; takes the place of its ``forward``."""

    def __init__(self, stack: nn.Sequential) -> None:
        self._stack = stack
        self._known: list[tuple[nn.Module, type, bool]] = []
        self._steps: list[Step] = []

    def __call__(self, input: Tensor) -> Tensor:
        # A model's own code may watch, replace or re-parametrise a layer at any time.
        members = (layer for layer in self._stack._modules.values() if layer is not None)
        present = [(layer, type(layer), is_hooked(layer)) for layer in members]
        if present != self._known:
            self._known, self._steps = present, _steps([layer for layer, _, _ in present])
        for step in self._steps:
            input = step(input)
        return input


def _steps(layers: Iterable[nn.Module]) -> list[Step]:
    """Return the layers, those from a convolution up to the first that may see how images lie in memory as one run."""
    steps: list[Step] = []
    run: list[nn.Module] = []
    for layer in layers:
        if run and flattens(layer):
            steps += _as_run([*run, layer])
            run = []
        elif is_blind(layer) and (run or type(layer) is nn.Conv2d):
            run.append(layer)
        else:
            steps += [*_as_run(run), layer]
            run = []
    return [*steps, *_as_run(run)]


def _as_run(layers: list[nn.Module]) -> Sequence[Step]:
    """Return the layers as one run where that pays: laying images out anew costs more than it gains without pooling."""
    return [Run(layers)] if any(pools(layer) for layer in layers) else layers


class Run:
    """A run of layers that begins with a convolution, whose result is its own: no later layer changes the inputs."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        ordered = pooled_first(layers)
        more = filled_channels(ordered)
        self._steps: list[Step] = [
            partial(_convolution, layer, more[place], more[place + 1]) if type(layer) is nn.Conv2d else layer
            for place, layer in enumerate(ordered)
        ]

    def __call__(self, images: Tensor) -> Tensor:
        if not _is_usual(images):
            for layer in self._layers:
                images = layer(images)
            return images
        images = _innermost(images)
        for step in self._steps:
            images = step(images)
        return images.contiguous()


def _is_usual(images: Tensor) -> bool:
    """Return whether images are a batch in the plain order, which nobody has laid out or wrapped on purpose."""
    if type(images) is not Tensor or images.ndim != 4 or images.device.type != "cpu":
        return False
    _, channels, height, width = images.shape
    plain = images.stride() == (channels * height * width, height * width, width, 1)
    forward_mode = forward_ad._current_level >= 0
    return plain and not forward_mode and not torch._C._are_functorch_transforms_active()


def filled_channels(layers: Sequence[nn.Module]) -> list[int]:
    """Return how many channels of zeros come into each layer, and at the end how many come out of the last: none.

    With the channels innermost, six are pooled one number at a time and eight in one go, which is worth more than the
    arithmetic on zeros costs. Channels are filled up between two convolutions with nothing but ReLU and max-pooling
    between them: those keep channels apart, and zeros zero.
    """
    more = [0] * (len(layers) + 1)
    first, channels = 0, 0  # of the convolution before; none when it has no channels
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Conv2d):
            wanted = -channels % _LANES
            if layer.groups == 1 and channels > wanted:
                more[first + 1 : place + 1] = [wanted] * (place - first)
            first, channels = place, layer.out_channels if layer.groups == 1 else 0
        elif type(layer) not in (nn.ReLU, nn.Threshold, nn.MaxPool2d):
            channels = 0
    return more


def _convolution(layer: nn.Conv2d, more_in: int, more_out: int, images: Tensor) -> Tensor:
    """Return the convolution with channels of zeros behind its own: those coming in add nothing, and zeros go out."""
    weight, bias = layer.weight, layer.bias
    if more_in or more_out:
        weight = F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))
        bias = None if bias is None else F.pad(bias, (0, more_out))
    return convolve(layer, images, _innermost(weight), bias)


class _Innermost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        # contiguous() would leave images of one channel as they are, and pooling after them slow.
        return torch.empty_like(values, memory_format=torch.channels_last).copy_(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _innermost(values: Tensor) -> Tensor:
    """Return images or a weight with the channels innermost; their gradient comes back in the plain order."""
    moved: Tensor = _Innermost.apply(values)  # type: ignore[no-untyped-call]
    return moved
