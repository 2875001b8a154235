"""Where the model runs: a device that torch knows and this machine has."""

from __future__ import annotations

import torch

from gradalign.errors import GradalignError


def check_device(device: torch.device | str) -> torch.device:
    """Return the device, or say in one sentence why nothing can run there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise GradalignError(f'"{device}" is not a device; give for example "cpu" or "cuda:0"') from None
    if found.type == "meta":
        raise GradalignError('the device "meta" holds no numbers; give for example "cpu" or "cuda:0"')
    try:
        torch.zeros(1, device=found).add_(1)
    except Exception as error:  # every backend has errors of its own for not being here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise GradalignError(f'the device "{device}" cannot be used here: {reason}; give for example "cpu"') from None
    return found
