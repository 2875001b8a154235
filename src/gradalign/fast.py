"""Ways to make the same arithmetic faster on a CPU: the allocator, the memory format, the order of ReLU and pooling.

None of them changes what is computed, except for rounding. They act on the trainer's own copy of the model, never on
the user's, and ``fast=False`` turns them all off.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEEP_BYTES = 512 * 1024 * 1024
_PAD_BYTES = 64 * 1024 * 1024


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory instead of returning it to the kernel after every layer.

    For worker processes only: activations of some megabytes would otherwise be mapped, zeroed and unmapped at every
    step. Does nothing where there is no glibc.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_TOP_PAD, _PAD_BYTES)


def pool_before_relu(module: nn.Module) -> None:
    """Swap every ReLU with the max-pooling right after it, in place: max(relu(x)) = relu(max(x)), on fewer numbers.

    Exact, in value and in gradient: both keep the largest number of a window if it is positive and pass nothing back
    otherwise. Only plain ``nn.Sequential`` containers are touched, and only members without hooks.
    """
    for container in module.modules():
        if type(container) is not nn.Sequential:
            continue
        names = list(container._modules)
        for first, second in itertools.pairwise(names):
            relu, pool = container._modules[first], container._modules[second]
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
                if is_hooked(relu) or is_hooked(pool):
                    continue
                container._modules[first], container._modules[second] = pool, nn.ReLU()


_LANES = 8  # float32 numbers in a vector register


class _FilledConv2d(nn.Conv2d):
    """A convolution with channels of zeros behind its own, coming in or going out; its parameters stay as they are."""

    more_in: int = 0
    more_out: int = 0

    def forward(self, images: Tensor) -> Tensor:
        """Return the convolution: zeros coming in add nothing, and zeros go out."""
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, self.more_in, 0, self.more_out))
        bias = None if self.bias is None else F.pad(self.bias, (0, self.more_out))
        outputs: Tensor = self._conv_forward(images, weight, bias)
        return outputs


def fill_channels(module: nn.Module) -> None:
    """Fill the channels between two convolutions up to whole vector registers with zeros, in place.

    With the channels innermost, six are pooled one number at a time and eight in one go, which is worth more than
    the arithmetic on zeros costs. Only convolutions of a plain ``nn.Sequential`` with nothing but ReLU and max-pooling
    between them are touched: those keep channels apart, and zeros zero.
    """
    uses = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    for container in module.modules():
        if type(container) is not nn.Sequential:
            continue
        before: nn.Conv2d | None = None
        for layer in container:
            if isinstance(layer, nn.Conv2d):
                known = type(layer) in (nn.Conv2d, _FilledConv2d) and layer.groups == 1
                simple = known and uses[id(layer)] == 1 and not is_hooked(layer)
                if before is not None and simple:
                    _fill_between(before, layer)
                before = layer if simple else None
            elif type(layer) not in (nn.ReLU, nn.MaxPool2d) or is_hooked(layer):
                before = None


def _fill_between(first: nn.Conv2d, second: nn.Conv2d) -> None:
    more = -first.out_channels % _LANES
    if more and first.out_channels > more:
        first.__class__ = second.__class__ = _FilledConv2d
        first.more_out, second.more_in = more, more  # type: ignore[assignment]


def is_hooked(module: nn.Module) -> bool:
    """Return whether somebody watches what the module computes."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def gains_from_channels_last(module: nn.Module) -> bool:
    """Return whether the model has 2-d convolutions, which run faster with the channels innermost."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def to_channels_last(batch: Any) -> Any:
    """Lay every image batch out with the channels innermost; the numbers stay the same."""
    if isinstance(batch, Tensor):
        return batch.contiguous(memory_format=torch.channels_last) if batch.ndim == 4 else batch
    if isinstance(batch, dict):
        return {key: to_channels_last(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return type(batch)(to_channels_last(value) for value in batch)
    return batch
