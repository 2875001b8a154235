"""Ways to make the same arithmetic faster on a CPU: the allocator, the memory format, the order of ReLU and pooling.

None of them changes what is computed, except for rounding. They act on the trainer's own copy of the model, never on
the user's, and ``fast=False`` turns them all off.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import torch
from torch import Tensor, nn

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
                if _hooked(relu) or _hooked(pool):
                    continue
                container._modules[first], container._modules[second] = pool, nn.ReLU()


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


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
