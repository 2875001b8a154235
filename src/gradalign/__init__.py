"""Gradient alignment for mini-batches, GPUs and federated clients.

The names below are loaded when first used, so that ``import gradalign`` and ``gradalign --help`` do not wait for torch.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers know the name; importing typing for it would cost a command its first moments
if TYPE_CHECKING:
    from typing import Any

    from gradalign.algorithms import (
        FedAvg,
        FedCM,
        FedDyn,
        FedGA,
        FedInit,
        FedLESAM,
        FedProx,
        FedSAM,
        LargeBatchGradAlign,
        LargeBatchSGD,
        LinearScaling,
        Scaffold,
    )
    from gradalign.algorithms.plan import Algorithm
    from gradalign.algorithms.rules import ClientReport, FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerRule
    from gradalign.algorithms.schedule import Cosine, OffUntil, Steps, Warmup
    from gradalign.algorithms.view import ClientView, Plan
    from gradalign.api import Comparison, compare, run
    from gradalign.client import LocalTraining
    from gradalign.client.exchange import ClientScore
    from gradalign.errors import DivergedError, GradalignError
    from gradalign.optim import GradAlign
    from gradalign.server.measure import Measure
    from gradalign.server.monitor import STOP, EarlyStopping, StopTraining
    from gradalign.server.result import Result
    from gradalign.tasks.holdout import hold_out
    from gradalign.tasks.table import table_task
    from gradalign.tasks.task import PartitionedClients, Task
    from gradalign.tracking import RunInfo, Tracker
    from gradalign.tracking.services import TensorBoard, WeightsAndBiases

_HOMES = {
    "gradalign.algorithms": "FedAvg FedCM FedDyn FedGA FedInit FedLESAM FedProx FedSAM LargeBatchGradAlign "
    "LargeBatchSGD LinearScaling Scaffold",
    "gradalign.algorithms.plan": "Algorithm",
    "gradalign.algorithms.rules": "ClientReport FedAdagrad FedAdam FedAvgM FedYogi ServerRule",
    "gradalign.algorithms.schedule": "Cosine OffUntil Steps Warmup",
    "gradalign.algorithms.view": "ClientView Plan",
    "gradalign.api": "Comparison compare run",
    "gradalign.client": "LocalTraining",
    "gradalign.client.exchange": "ClientScore",
    "gradalign.errors": "DivergedError GradalignError",
    "gradalign.optim": "GradAlign",
    "gradalign.server.measure": "Measure",
    "gradalign.server.monitor": "STOP EarlyStopping StopTraining",
    "gradalign.server.result": "Result",
    "gradalign.tasks.holdout": "hold_out",
    "gradalign.tasks.table": "table_task",
    "gradalign.tasks.task": "PartitionedClients Task",
    "gradalign.tracking": "RunInfo Tracker",
    "gradalign.tracking.services": "TensorBoard WeightsAndBiases",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["STOP", "Algorithm", "ClientReport", "ClientScore", "ClientView", "Comparison", "Cosine", "DivergedError"]
__all__ += ["EarlyStopping", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedCM", "FedDyn", "FedGA", "FedInit"]
__all__ += ["FedLESAM", "FedProx", "FedSAM", "FedYogi", "GradAlign", "GradalignError", "LargeBatchGradAlign"]
__all__ += ["LargeBatchSGD", "LinearScaling", "LocalTraining", "Measure", "OffUntil", "PartitionedClients", "Plan"]
__all__ += ["Result", "RunInfo", "Scaffold", "ServerRule", "Steps", "StopTraining", "Task", "TensorBoard", "Tracker"]
__all__ += ["Warmup", "WeightsAndBiases", "__version__", "compare", "hold_out", "run", "table_task"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gradalign' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
