"""GradAlign with accelerate: its wrapper around the optimizer takes parts and has the verbs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradalign.errors import GradalignError
from gradalign.optim import GradAlign

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError:
    raise GradalignError("gradalign.accelerate needs accelerate: pip install 'gradalign[accelerate]'") from None

__all__ = ["AlignedOptimizer", "leave_averaging", "prepare"]


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepare models, optimizers, loaders and schedulers as ``accelerator.prepare`` does, and make GradAlign usable.

    The optimizers that wrap a ``GradAlign`` become ``AlignedOptimizer``. DistributedDataParallel models no longer
    average gradients: GradAlign does, in its step. So prepare a model together with its own optimizer.
    """
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    given = prepared if len(objects) > 1 else (prepared,)
    aligned = [one for one in given if isinstance(one, AcceleratedOptimizer) and isinstance(one.optimizer, GradAlign)]
    if not aligned:
        raise GradalignError("prepare() was given no GradAlign optimizer; use accelerator.prepare() for all others")
    for optimizer in aligned:
        optimizer.__class__ = AlignedOptimizer  # the accelerator and its schedulers know this object already
    for one in given:
        leave_averaging(one)
    return prepared


def leave_averaging(model: Any) -> None:
    """Let DistributedDataParallel leave the averaging over ranks to GradAlign, in whatever context it runs."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False


class AlignedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's optimizer around a ``GradAlign``: all its methods, and ``step`` with parts.

    As with every optimizer of accelerate, ``step`` and ``zero_grad`` do nothing within ``accumulate`` until the last
    micro-batch.
    """

    optimizer: GradAlign
    _is_overflow: bool

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not yet there, while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in self.__dict__ or not hasattr(self.optimizer, name) or hasattr(AcceleratedOptimizer, name)
        object.__setattr__(self if is_own else self.optimizer, name, value)

    def step(self, closure: Any = None, *batch: Any, **options: Any) -> Tensor | None:
        """Take one step in the forms of ``GradAlign.step``; return the mean loss at x when there is a closure."""
        loss = None
        if self.gradient_state.sync_gradients and (closure is not None or batch or options):
            loss = self.optimizer.align(closure, *batch, **options)
        skipped = self.optimizer.skipped_steps
        super().step()
        overflow = self.scaler is not None and self._is_overflow
        self._is_overflow = overflow or self.optimizer.skipped_steps > skipped  # schedulers wait then
        return loss

    def collect(self, weight: float | None = None, *, scale: float | None = None) -> None:
        """Take ``.grad`` as one part's gradient; ``accelerator.backward`` divides by the accumulation steps."""
        if scale is None and self.gradient_state.num_steps > 1:
            scale = 1.0 / self.gradient_state.num_steps
        self.optimizer.collect(weight, scale=scale)

    def displace(self) -> bool:
        """Move to the next part's displaced point, as ``GradAlign.displace`` does, with the accelerator's scaler."""
        return self.optimizer.displace(self.scaler)
