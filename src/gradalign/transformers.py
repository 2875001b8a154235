"""GradAlign in the Trainer of transformers: the micro-batches that it accumulates, on all ranks, are the parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradalign.algorithms.schedule import Schedule
from gradalign.errors import GradalignError
from gradalign.optim import GradAlign

try:
    from transformers import Trainer

    from gradalign.accelerate import leave_averaging
except (ImportError, GradalignError):
    raise GradalignError("gradalign.transformers needs transformers: pip install 'gradalign[transformers]'") from None

__all__ = ["Aligned", "AlignedTrainer"]


class Aligned:
    """Makes a Trainer align: ``class MyTrainer(Aligned, Seq2SeqTrainer)``; ``AlignedTrainer`` is it with ``Trainer``.

    Every micro-batch of ``gradient_accumulation_steps``, on every rank, is a part, weighted as the Trainer weighs it
    (by its labels where the model takes ``num_items_in_batch``, else alike). ``training_step`` runs once more for each.

    Args:
        *args: What the Trainer takes.
        beta: β ≥ 0 or a schedule of it, as in ``GradAlign``, which is put around the Trainer's optimizer.
        **options: What the Trainer takes.
    """

    optimizer: Any
    accelerator: Any

    def __init__(self, *args: Any, beta: float | Schedule, **options: Any) -> None:
        self.beta = beta
        self._parts: list[Any] = []
        super().__init__(*args, **options)

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Put GradAlign around the optimizer that the Trainer makes or was given."""
        super().create_optimizer(*args, **options)  # type: ignore[misc]
        if not isinstance(self.optimizer, GradAlign):
            self.optimizer = GradAlign(self.optimizer, self.beta)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Make a micro-batch's first pass; after the last one, all second passes."""
        opt: GradAlign = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.accelerator.scaler is not None or not isinstance(opt, GradAlign):
            raise GradalignError("AlignedTrainer works with float32 and bf16, on one device and with DDP")
        leave_averaging(model)
        first: Any = super().training_step  # type: ignore[misc]
        opt._mark_random()  # whatever the loader drew since the last step
        loss: Tensor = first(model, inputs, num_items_in_batch)
        if opt.aligning:
            opt.collect(scale=self._scale(inputs, num_items_in_batch))
            self._parts.append(inputs)
        if self.accelerator.sync_gradients:
            parts, self._parts = self._parts, []
            opt._second_passes(parts, lambda part: first(model, part, num_items_in_batch))
        return loss

    def _scale(self, inputs: Any, num_items: Any) -> float:
        """Return what the Trainer multiplies a micro-batch's mean loss with."""
        trainer: Any = self
        by_items = trainer.loss_is_scaled_for_ga
        if by_items is None:
            counted = trainer.model_accepts_loss_kwargs and num_items is not None  # None without labels
            by_items = counted or trainer.compute_loss_func is not None
        if not by_items or num_items is None:
            return 1.0 if by_items else 1.0 / float(trainer.current_gradient_accumulation_steps)
        args = trainer.args
        everywhere, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            own = float(trainer._get_num_items_in_batch([inputs], args.device))
        finally:
            args.average_tokens_across_devices = everywhere
        return own * (args.world_size if everywhere else 1) / float(num_items)


class AlignedTrainer(Aligned, Trainer):
    """transformers' Trainer with GradAlign: ``AlignedTrainer(model, args, train_dataset=data, beta=0.2)``."""
