"""What ``self.optimizers()`` of a LightningModule can do when it is around a ``GradAlign``.

Lightning makes a class out of its wrapper and the optimizer's class, with an object beside the optimizer. Whatever is
asked of that object must reach the optimizer itself, and its ``step`` must take parts; nothing of Lightning is
imported for it.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradalign.errors import GradalignError
from gradalign.optim.wrapper import delegated


def is_lightnings(cls: type) -> bool:
    return hasattr(cls, "_to_lightning_optimizer")


def complete(cls: Any, optimizer_class: type) -> None:
    """Give a class of Lightning's, made for this class of optimizers, what it lacks."""
    wrapper = cls.__bases__[0]
    for name in dir(optimizer_class):
        if not name.startswith("__") and not hasattr(wrapper, name):
            setattr(cls, name, delegated(name, to="_optimizer"))

    def step(self: Any, closure: Any = None, *batch: Any, **options: Any) -> Any:
        """Take one of the optimizer's steps and count it, in all the forms of ``GradAlign.step``."""
        loss = None
        if self._strategy.lightning_module.automatic_optimization:
            loss = _hooked(wrapper, self, closure)
        else:
            if closure is not None or batch or options:
                loss = self._optimizer.align(closure, *batch, **options)
            _hooked(wrapper, self, None)
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        model = _parallel(self)
        if model is not None:  # GradAlign averages; Lightning sets it back after training_step
            model.require_backward_grad_sync = False
        self._optimizer.zero_grad(set_to_none)

    def collect(self: Any, weight: float | None = None, *, scale: float | None = None) -> None:
        _refuse_averaged(self)
        self._optimizer.collect(weight, scale=scale)

    def displace(self: Any, scaler: Any = None) -> bool:
        _refuse_averaged(self)
        moved: bool = self._optimizer.displace(scaler)
        return moved

    cls.step, cls.zero_grad, cls.collect, cls.displace = step, zero_grad, collect, displace


def _hooked(wrapper: Any, optimizer: Any, closure: Any) -> Any:
    """Let Lightning take the step: the closure that reaches GradAlign calls its hooks and is no part's loss."""
    inner = optimizer._optimizer
    inner._closure_of_trainer = True
    try:
        return wrapper.step(optimizer, closure)
    finally:
        inner._closure_of_trainer = False


def _parallel(optimizer: Any) -> DistributedDataParallel | None:
    """Return the DDP model of a module that optimizes by hand."""
    strategy = optimizer._strategy
    by_hand = strategy is not None and not strategy.lightning_module.automatic_optimization
    return strategy.model if by_hand and isinstance(strategy.model, DistributedDataParallel) else None


def _refuse_averaged(optimizer: Any) -> None:
    model = _parallel(optimizer)
    if model is not None and model.require_backward_grad_sync:
        raise GradalignError(
            "manual_backward() lets DistributedDataParallel average the first pass; call self.optimizers().zero_grad() "
            "before it, which leaves the averaging to GradAlign"
        )
