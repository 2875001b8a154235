"""GradAlign under Lightning's automatic optimization.

With manual optimization nothing is needed from here: ``self.optimizers()`` takes all the forms of ``GradAlign.step``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradalign.errors import GradalignError
from gradalign.optim import GradAlign
from gradalign.optim.two_passes import RandomState, random_state

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    raise GradalignError("gradalign.lightning needs Lightning: pip install 'gradalign[lightning]'") from None

__all__ = ["Alignment"]


class Alignment(Callback):
    """Aligns the micro-batches between two optimizer steps, on all ranks: ``Trainer(callbacks=[Alignment()])``.

    Every micro-batch of ``accumulate_grad_batches``, on every rank, is a part. ``training_step`` runs once more for
    each, at its displaced point, just before the optimizer's step; ``self.log`` is silent there. Clipping, schedulers
    and ``global_step`` are Lightning's. Callbacks that look at gradients before the step come after it in the list.
    """

    def __init__(self) -> None:
        self._now: tuple[Any, int, RandomState] | None = None
        self._parts: list[tuple[Any, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizer, and leave averaging over the ranks to it."""
        if not pl_module.automatic_optimization:
            raise GradalignError(
                "Alignment() is for automatic optimization; with manual optimization call "
                "self.optimizers().step(loss_fn, inputs, targets, parts=8)"
            )
        if len(trainer.optimizers) != 1 or not isinstance(trainer.optimizers[0], GradAlign):
            raise GradalignError("Alignment() needs configure_optimizers() to return one GradAlign optimizer")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise GradalignError('Alignment() does not scale losses; use precision="bf16-mixed" or "32-true"')
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = False
        elif model is not pl_module:
            raise GradalignError(
                f"Alignment() works on one device and with DDP, not with {type(trainer.strategy).__name__}"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember the batch and the random numbers it begins with."""
        self._now = batch, batch_idx, random_state(pl_module.device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the gradient of a micro-batch as a part's."""
        opt: Any = trainer.optimizers[0]
        if self._now is None or not opt.aligning:
            return
        *batch, opt._random = self._now
        opt.collect(scale=1.0 / trainer.accumulate_grad_batches)
        self._parts.append((batch[0], batch[1]))
        self._now = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Make the second passes, and complete the gradient before Lightning clips it."""
        parts, self._parts = self._parts, []
        optimizer._second_passes(parts, lambda part: self._run_again(trainer, pl_module, *part))

    def _run_again(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        module.log = lambda *_, **__: None  # type: ignore[method-assign]  # the first pass has logged
        try:
            output = trainer.strategy.training_step(batch, *([batch_idx] if takes_index else []))
        finally:
            del module.log
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise GradalignError("training_step() returned a loss in the first pass and none in the second")
        with torch.enable_grad():
            module.backward(loss / trainer.accumulate_grad_batches)
