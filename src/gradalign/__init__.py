"""Gradient alignment for mini-batches, GPUs and federated clients.

The names below are loaded when first used, so that ``import gradalign`` and ``gradalign --help`` do not wait for torch.
"""

from __future__ import annotations

from gradalign._version import __version__

TYPE_CHECKING = False  # type checkers know the name; importing typing for it would cost a command its first moments
if TYPE_CHECKING:
    from typing import Any

    from gradalign.algorithms import (
        FedAvg,
        FedDyn,
        FedGA,
        FedProx,
        LargeBatchSGD,
        LinearScaling,
        Scaffold,
    )
    from gradalign.errors import DivergedError, GradalignError
    from gradalign.experiment.api import run
    from gradalign.experiment.measure import Measure
    from gradalign.experiment.runner import Result
    from gradalign.experiment.trackers import TensorBoard, WeightsAndBiases
    from gradalign.experiment.tracking import RunInfo, Tracker
    from gradalign.optim import GradAlign
    from gradalign.schedule import Cosine, OffUntil, Steps, Warmup
    from gradalign.server import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerRule
    from gradalign.tasks.data import PartitionedClients
    from gradalign.tasks.holdout import hold_out
    from gradalign.tasks.task import Task
    from gradalign.training import LocalTraining

_HOMES = {
    "gradalign.algorithms": (
        "FedAvg",
        "FedDyn",
        "FedGA",
        "FedProx",
        "LargeBatchSGD",
        "LinearScaling",
        "Scaffold",
    ),
    "gradalign.errors": ("DivergedError", "GradalignError"),
    "gradalign.experiment.api": ("run",),
    "gradalign.experiment.measure": ("Measure",),
    "gradalign.experiment.runner": ("Result",),
    "gradalign.experiment.trackers": ("TensorBoard", "WeightsAndBiases"),
    "gradalign.experiment.tracking": ("RunInfo", "Tracker"),
    "gradalign.training": ("LocalTraining",),
    "gradalign.optim": ("GradAlign",),
    "gradalign.schedule": ("Cosine", "OffUntil", "Steps", "Warmup"),
    "gradalign.server": ("FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "ServerRule"),
    "gradalign.tasks.data": ("PartitionedClients",),
    "gradalign.tasks.holdout": ("hold_out",),
    "gradalign.tasks.task": ("Task",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cosine",
    "DivergedError",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedGA",
    "FedProx",
    "FedYogi",
    "GradAlign",
    "GradalignError",
    "LargeBatchSGD",
    "LinearScaling",
    "LocalTraining",
    "Measure",
    "OffUntil",
    "PartitionedClients",
    "Result",
    "RunInfo",
    "Scaffold",
    "ServerRule",
    "Steps",
    "Task",
    "TensorBoard",
    "Tracker",
    "Warmup",
    "WeightsAndBiases",
    "__version__",
    "hold_out",
    "run",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gradalign' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
