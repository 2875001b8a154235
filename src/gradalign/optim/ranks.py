"""The ranks of a torch.distributed job as GradAlign sees them: weighted means, each sent as one flat vector.

Who they are is asked at every step, since a process group may be started, or started anew, after the optimizer was
made. Without a process group, or with a single rank, everything here is a no-op and costs nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradalign.errors import GradalignError

Gradients = list[Tensor | None]
"""One entry per parameter; None where the parameter took no part in the loss, as in torch."""


class Mean(NamedTuple):
    """A weighted mean over all ranks, and the sum of their weights."""

    gradients: Gradients
    loss: Tensor | None
    weight: float


class Ranks:
    """All ranks of a process group; the default group when none is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        # The group that this process has shared its parameters with, and how many they were.
        self._met: weakref.ref[dist.ProcessGroup] | None = None
        self._shared = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": self._group, "_met": None, "_shared": 0}  # a copy, elsewhere, has met nobody

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group as it is now."""
        if dist.is_available() and dist.is_initialized():
            return self._group if self._group is not None else dist.group.WORLD
        if self._group is not None:
            raise GradalignError("the process group given to GradAlign was destroyed; make the optimizer anew")
        return None

    @property
    def size(self) -> int:
        """The number of ranks now."""
        group = self.group
        return 1 if group is None else dist.get_world_size(group)

    @property
    def met(self) -> bool:
        """Whether these ranks have shared parameters before."""
        return self._met is not None and self._met() is self.group

    def unshared(self, parameters: int) -> int:
        """Return how many of so many parameters, the last ones, these ranks have not shared yet."""
        return 0 if self.size == 1 else parameters - (self._shared if self.met else 0)

    def share(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> bool:
        """Take the first rank's values for what was not shared yet; return whether any changed here."""
        group = self.group
        if group is None or self.size == 1:
            return False
        new = parameters[len(parameters) - self.unshared(len(parameters)) :]
        self._met, self._shared = weakref.ref(group), len(parameters)
        changed = False
        for tensor in (*new, *buffers):
            # Once, at the start: not worth a flat copy of everything.
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
            changed = changed or not torch.equal(sent, tensor)
            with torch.no_grad():
                tensor.copy_(sent)
        return changed

    def share_object(self, value: Any) -> Any:
        """Return the first rank's value."""
        group = self.group
        if group is None or self.size == 1:
            return value
        sent = [value]
        dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group=group)
        return sent[0]

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Return the sums over all ranks of a few numbers, from a small all-reduce."""
        if self.size == 1:
            return list(numbers)
        flat = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(flat, group=self.group)
        return list(flat.tolist())

    def mean(
        self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float, loss: Tensor | None
    ) -> Mean:
        """Return the ranks' weighted mean of gradients and loss, from a single all-reduce.

        The flat vector carries, behind the gradients, one mark per parameter (does any rank have a gradient for it?),
        the loss and the weight, so that nothing else need be sent. All ranks receive the same bits.
        """
        if self.size == 1:
            return Mean(gradients, loss, weight)
        # At least float32: a weight of thousands times a gradient would leave float16's range.
        kind = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
        device = parameters[0].device
        pieces = [
            torch.zeros(p.numel(), dtype=kind, device=device) if g is None else g.reshape(-1).to(kind)
            for p, g in zip(parameters, gradients, strict=True)
        ]
        tail = [float(g is not None) for g in gradients] + [0.0, 1.0]
        pieces.append(torch.tensor(tail, dtype=kind, device=device))
        if loss is not None:
            pieces[-1][-2] = loss.detach()
        flat = torch.cat(pieces)
        del pieces
        if weight != 1.0:
            flat.mul_(weight)
        dist.all_reduce(flat, group=self.group)
        total = float(flat[-1])
        flat.div_(flat[-1].clone())
        marks = flat[-len(tail) : -2].tolist()
        means: Gradients = []
        offset = 0
        for p, mark in zip(parameters, marks, strict=True):
            piece = flat[offset : offset + p.numel()].view(p.shape)
            # A mark that is not a number means a weight that is not: the gradient is kept so that it shows.
            means.append(None if mark == 0.0 else piece.to(p.dtype))
            offset += p.numel()
        return Mean(means, None if loss is None else flat[-2].clone(), total)


def positive_weight(weight: Any, what: str) -> float:
    """Return a weight as a float, or say that it is none."""
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise GradalignError(f"{what} must be a positive number, such as its number of examples, got {weight!r}")
    return number
