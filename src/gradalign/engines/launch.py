"""Was this process started by torchrun? Answered from the environment alone, so that nobody has to import torch."""

from __future__ import annotations

import os

_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Return whether a launcher has made this process one rank of a job."""
    return all(name in os.environ for name in _SET_BY_TORCHRUN)


def rank() -> int:
    """Return this process's rank; 0 when it is alone."""
    return int(os.environ["RANK"]) if under_torchrun() else 0
