"""Lists of gradients, one entry per parameter: taken, put, added, looked at; and the points they lead to.

Whoever changes the parameters' values also makes torch forget what it derived from the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradalign.errors import GradalignError
from gradalign.optim.shards import as_held, held_values

Gradients = list[Tensor | None]
"""One entry per parameter; None where the parameter took no part in the loss, as in torch. Of shards, this rank's."""


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
    taken = [None if p.grad is None else held_values(p.grad) for p in parameters]
    put_gradients(parameters, [None] * len(parameters))
    return taken


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = as_held(p, g)


def add_gradients(total: Gradients, more: Gradients, share: float, *, in_place: bool) -> None:
    """Add share · more to the total; ``in_place`` uses up the memory of ``more`` where the total has none yet."""
    for j, (so_far, g) in enumerate(zip(total, more, strict=True)):
        if so_far is not None and g is not None:
            so_far.add_(g, alpha=share)
        elif g is not None:
            total[j] = g.mul_(share) if in_place else g * share


def all_finite(gradients: Gradients) -> bool:
    """Return whether no gradient holds NaN or infinity, with one wait for the device.

    A finite sum has finite terms, and costs a tenth of a look at each; only other sums are looked into.
    """
    given = [g for g in gradients if g is not None]
    sums = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)).float() for g in given]
    if not given or bool(torch.isfinite(torch.stack(sums)).all()):
        return True
    return bool(torch.stack([torch.isfinite(g).all() for g in given]).all())


@torch.no_grad()
def put_values(parameters: Sequence[nn.Parameter], values: Gradients) -> None:
    for p, value in zip(parameters, values, strict=True):
        if value is not None:
            held_values(p).copy_(value)
    forget_derived_values()


@torch.no_grad()
def _displace(p: nn.Parameter, mean: Tensor | None, own: Tensor | None, beta: float) -> Tensor | None:
    """Move a parameter to x − β(ḡ − g_i) and return x in the memory of g_i; None where it stays at x."""
    if mean is None:
        return None
    held = held_values(p).detach()
    point = torch.sub(held, mean, alpha=beta) if own is None else torch.add(held, own.sub_(mean), alpha=beta, out=own)
    x = held.clone()
    held.copy_(point)
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
