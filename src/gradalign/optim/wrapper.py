"""A torch optimizer around another one: everything that is not the step itself belongs to the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradalign.errors import GradalignError


def _delegated(name: str) -> Any:
    def read(self: OptimizerWrapper) -> Any:
        return getattr(self.optimizer, name)

    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(read, write, doc=f"The wrapped optimizer's ``{name}``.")


def refuse_sharded(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters of which a rank holds a shard only: a shard is no point to start from, nor one to displace."""
    for p in parameters:
        if getattr(p, "_fsdp_flattened", False):
            kind = "parameters sharded by FullyShardedDataParallel"
        elif hasattr(type(p), "placements"):  # a DTensor, told without importing its module
            kind = "DTensor parameters (fully_shard or tensor parallel)"
        else:
            continue
        raise GradalignError(
            f"GradAlign needs whole parameters on every rank, got {kind}; use DistributedDataParallel, or no wrapper"
        )


class OptimizerWrapper(Optimizer):
    """Shares parameter groups, state, defaults and hooks with ``optimizer``, so that schedulers see one optimizer."""

    param_groups = _delegated("param_groups")
    state = _delegated("state")
    defaults = _delegated("defaults")

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ is left out on purpose: it would make a second set of groups and state.
        if not isinstance(optimizer, Optimizer):
            raise GradalignError(f"GradAlign wraps a torch.optim optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, LBFGS | OptimizerWrapper):
            raise GradalignError(f"GradAlign cannot wrap {type(optimizer).__name__}; give SGD, Adam or the like")
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this object lacks: torch's hook tables and the like live in the wrapped optimizer.
        if name == "optimizer":  # not yet there, while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def all_parameters(self) -> list[nn.Parameter]:
        """Return all parameters, in the order of their groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient now, in the order of their groups."""
        return [p for p in self.all_parameters() if p.requires_grad]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer more parameters."""
        self.optimizer.add_param_group(param_group)
        try:
            refuse_sharded(self.param_groups[-1]["params"])
        except GradalignError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Take a step."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "step"}  # a scheduler may have put it

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
