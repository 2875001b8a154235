"""Lists of gradients, one entry per parameter: taken, put and added here, and averaged over the ranks of a job.

Whoever changes the parameters' values also makes torch forget what it derived from the old ones.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradalign.errors import GradalignError

Gradients = list[Tensor | None]
"""One entry per parameter; None where the parameter took no part in the loss, as in torch."""


def forget_derived_values() -> None:
    """Drop what torch derived from the parameters and remembers: forwards would go on with the old point's values."""
    torch.clear_autocast_cache()  # the weights' 16-bit copies
    cached: dict[tuple[int, str], Tensor | None] = getattr(parametrize, "_cache", {})
    cached.clear()  # inside parametrize.cached(): the weights that parametrizations gave


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    for p in parameters:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise GradalignError(
                f"GradAlign needs dense gradients, got a {p.grad.layout} one for a parameter of shape "
                f"{tuple(p.shape)}; make its layer with sparse=False"
            )
    taken = [p.grad for p in parameters]
    put_gradients(parameters, [None] * len(parameters))
    return taken


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g


def add_gradients(total: Gradients, more: Gradients, share: float, *, in_place: bool) -> None:
    """Add share · more to the total; ``in_place`` uses up the memory of ``more`` where the total has none yet."""
    for j, (so_far, g) in enumerate(zip(total, more, strict=True)):
        if so_far is not None and g is not None:
            so_far.add_(g, alpha=share)
        elif g is not None:
            total[j] = g.mul_(share) if in_place else g * share


def all_finite(gradients: Gradients) -> bool:
    """Return whether no gradient holds NaN or infinity, with one wait for the device."""
    checks = [torch.isfinite(g).all() for g in gradients if g is not None]
    return bool(torch.stack(checks).all()) if checks else True


@torch.no_grad()
def put_values(parameters: Sequence[nn.Parameter], values: Gradients) -> None:
    for p, value in zip(parameters, values, strict=True):
        if value is not None:
            p.copy_(value)
    forget_derived_values()


@torch.no_grad()
def _displace(p: nn.Parameter, mean: Tensor | None, own: Tensor | None, beta: float) -> Tensor | None:
    """Move a parameter to x − β(ḡ − g_i) and return x in the memory of g_i; None where it stays at x."""
    if mean is None:
        return None
    point = torch.sub(p, mean, alpha=beta) if own is None else torch.add(p, own.sub_(mean), alpha=beta, out=own)
    x = p.detach().clone()
    p.copy_(point)
    return point.copy_(x)


@contextmanager
def displaced(parameters: Sequence[nn.Parameter], mean: Gradients, own: Gradients, beta: float) -> Iterator[None]:
    """Be at x − β(ḡ − g_i) in this block, and back at x, to the bit, after it; the memory of ``own`` is used up."""
    home = [_displace(p, m, g, beta) for p, m, g in zip(parameters, mean, own, strict=True)]
    forget_derived_values()
    try:
        yield
    finally:
        put_values(parameters, home)


class Ranks:
    """All ranks of a process group; the default group when none is given.

    Who they are is asked at every step, since a group may be started, or started anew, after the optimizer was made.
    Without one, or with a single rank, everything here is a no-op and costs nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        # The group that this process has shared its parameters with, and how many they were.
        self._met: weakref.ref[dist.ProcessGroup] | None = None
        self._shared = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": self._group, "_met": None, "_shared": 0}  # a copy, elsewhere, has met nobody

    @property
    def group(self) -> dist.ProcessGroup | None:
        if dist.is_available() and dist.is_initialized():
            return self._group if self._group is not None else dist.group.WORLD
        if self._group is not None:
            raise GradalignError("the process group given to GradAlign was destroyed; make the optimizer anew")
        return None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def met(self) -> bool:
        """Whether these ranks have shared parameters before."""
        return self._met is not None and self._met() is self.group

    def unshared(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Return those parameters, the last ones, that these ranks have not shared yet."""
        return () if self.size == 1 else parameters[self._shared if self.met else 0 :]

    @torch.no_grad()
    def share(self, parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> bool:
        """Take the first rank's values for what was not shared yet; return whether any changed here."""
        new, group = self.unshared(parameters), self.group
        if group is None:
            return False
        self._met, self._shared = weakref.ref(group), len(parameters)
        changed = False
        for tensor in (*new, *buffers):
            # Once, at the start: not worth a flat copy of everything.
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
            changed = changed or not torch.equal(sent, tensor)
            tensor.copy_(sent)
        return changed

    def share_object(self, value: Any) -> Any:
        sent = [value]
        if self.group is not None:
            dist.broadcast_object_list(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return sent[0]

    def sums(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        if self.size == 1:
            return list(numbers)
        flat = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(flat, group=self.group)
        return list(flat.tolist())

    @torch.no_grad()
    def mean(
        self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float, loss: Tensor | None
    ) -> tuple[Gradients, Tensor | None, float]:
        """Return the ranks' weighted mean of gradients and loss, and the sum of weights, from a single all-reduce.

        The flat vector carries, behind the gradients, one mark per parameter (does any rank have a gradient for it?),
        the loss and the weight, so that nothing else need be sent. All ranks receive the same bits.
        """
        if self.size == 1:
            return gradients, loss, weight
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
        cut = flat[: -len(tail)].split([p.numel() for p in parameters])
        # A mark that is not a number means a weight that is not: the gradient stays so that it shows.
        means: Gradients = [
            None if mark == 0.0 else piece.view(p.shape).to(p.dtype)
            for p, piece, mark in zip(parameters, cut, marks, strict=True)
        ]
        return means, None if loss is None else flat[-2].clone(), total


def positive_weight(weight: Any, what: str) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise GradalignError(f"{what} must be a positive number, such as its number of examples, got {weight!r}")
    return number
