"""Lists of gradients, one entry per parameter: taken, put, added, looked at; and the points they lead to.

Whoever changes the parameters' values also makes torch forget what it derived from the old ones.

Under ``fully_shard`` all ranks compute with the same gathered weights, so no rank is a part of its own: a part spans
all ranks, and its gradient arrives averaged, in shards. What GradAlign does to parameters and gradients is
elementwise, so every rank does it to its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradalign.errors import GradalignError

Gradients = list[Tensor | None]
"""One entry per parameter; None where the parameter took no part in the loss, as in torch. Of shards, this rank's."""


def is_shard(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, told without importing its module."""
    return hasattr(type(tensor), "placements")


@torch.no_grad()
def held_values(tensor: Any) -> Tensor:
    """Return what this rank holds of a parameter or a gradient, in the same memory."""
    local: Tensor = tensor.to_local() if is_shard(tensor) else tensor
    return local


@torch.no_grad()
def as_held(parameter: Any, values: Tensor | None) -> Tensor | None:
    """Return this rank's values as a tensor of the parameter's kind, in the same memory."""
    if values is None or not is_shard(parameter):
        return values
    from torch.distributed.tensor import DTensor

    shape, stride = parameter.shape, parameter.stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    whole: Tensor = DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
    return whole


def gathering_modules(model: nn.Module | None) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to."""
    if model is None or not any(is_shard(p) for p in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _one_dimension(placements: Iterable[Any]) -> bool:
    """Return whether this is fully_shard's own layout: more dimensions of shards are tensor parallel's."""
    shards = [placement for placement in placements if not placement.is_replicate()]
    return len(shards) == 1 and bool(shards[0].is_shard())


def are_shards(parameters: Iterable[Any], model: nn.Module | None, group: dist.ProcessGroup | None) -> bool:
    """Return whether these are shards that GradAlign can displace; refuse those that it cannot."""
    given = list(parameters)
    known = [] if model is None else list(model.parameters())
    kind, shards = "", [p for p in given if is_shard(p)]
    if any(getattr(p, "_fsdp_flattened", False) for p in (*given, *known)):
        kind = "parameters sharded by FullyShardedDataParallel"
    elif shards:
        gathered = {p for module in gathering_modules(model) for p in module.parameters()}
        if not all(p in gathered and _one_dimension(p.placements) for p in shards):
            kind = "DTensor parameters (tensor parallel, or fully_shard without model=model)"
        elif any(p.device_mesh.size() != dist.get_world_size(group) for p in shards):
            kind = "DTensor parameters on a mesh of some of the ranks only"
    if not kind and len(shards) < len(given) and (shards or any(is_shard(p) for p in known)):
        kind = "DTensor parameters beside whole ones"
    if kind:
        raise GradalignError(
            f"GradAlign needs whole parameters on every rank, got {kind}; use DistributedDataParallel, or fully_shard "
            "with GradAlign(..., model=model)"
        )
    return bool(shards)


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
