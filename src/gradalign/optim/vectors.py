"""Walks through gradients and parameters: taking, putting, adding, and going from one point to another.

Whoever changes the parameters' values here also makes torch forget what it derived from the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradalign.errors import GradalignError
from gradalign.optim.ranks import Gradients


def forget_derived_values() -> None:
    """Drop what torch keeps that was computed from the parameters: forwards would go on with the old point's values.

    Inside ``torch.autocast`` these are the weights' 16-bit copies, inside ``parametrize.cached()`` the weights that
    parametrizations gave.
    """
    torch.clear_autocast_cache()
    cached: dict[tuple[int, str], Tensor | None] = getattr(parametrize, "_cache", {})
    cached.clear()


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Take the gradients away from the parameters."""
    taken: Gradients = []
    for p in parameters:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise GradalignError(
                f"GradAlign needs dense gradients, got a {p.grad.layout} one for a parameter of shape "
                f"{tuple(p.shape)}; make its layer with sparse=False"
            )
        taken.append(p.grad)
    for p in parameters:
        p.grad = None
    return taken


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Make these the parameters' gradients."""
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g


def add_gradients(total: Gradients, more: Gradients, share: float) -> Gradients:
    """Return total + share · more; the memory of both is used up."""
    for j, g in enumerate(more):
        if g is not None:
            kept = total[j]
            total[j] = g.mul_(share) if kept is None else kept.add_(g, alpha=share)
    return total


def all_finite(gradients: Gradients) -> bool:
    """Return whether no gradient holds NaN or infinity, with one wait for the device."""
    checks = [torch.isfinite(g).all() for g in gradients if g is not None]
    return bool(torch.stack(checks).all()) if checks else True


@torch.no_grad()
def displaced_points(parameters: Sequence[nn.Parameter], mean: Gradients, own: Gradients, beta: float) -> Gradients:
    """Turn g_i into x − β(ḡ − g_i) in place; None where a parameter stays at x."""
    points: Gradients = []
    for p, m, g in zip(parameters, mean, own, strict=True):
        if m is None:
            points.append(None)
        elif g is None:
            points.append(torch.sub(p, m, alpha=beta))
        else:
            points.append(torch.add(p, g.sub_(m), alpha=beta, out=g))
    return points


@torch.no_grad()
def swap(parameters: Sequence[nn.Parameter], points: Gradients) -> None:
    """Exchange the parameters' values with these, exactly, through one parameter-sized piece of memory at a time."""
    for p, point in zip(parameters, points, strict=True):
        if point is not None:
            before = p.detach().clone()
            p.copy_(point)
            point.copy_(before)
    forget_derived_values()


@torch.no_grad()
def put_values(parameters: Sequence[nn.Parameter], values: Gradients) -> None:
    """Overwrite the parameters, where there is a value."""
    for p, value in zip(parameters, values, strict=True):
        if value is not None:
            p.copy_(value)
    forget_derived_values()


def put_copies(parameters: Sequence[nn.Parameter], memory: Gradients) -> None:
    """Overwrite these vectors with the parameters' values."""
    for p, vector in zip(parameters, memory, strict=True):
        if vector is not None:
            vector.copy_(p.detach())
