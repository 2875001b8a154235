"""Parameters of which every rank holds a shard: which of them GradAlign takes, and how it sees them.

Under ``fully_shard`` all ranks compute with the same gathered weights, so no rank is a part of its own: a part spans
all ranks, and its gradient arrives averaged, in shards. What GradAlign does to parameters and gradients is
elementwise, so every rank does it to its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradalign.errors import GradalignError


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
