"""The two verbs: ``displace()`` after the first backward, ``step()`` after the second, in a loop of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradalign.errors import GradalignError
from gradalign.optim.ranks import Gradients, Ranks
from gradalign.optim.twopass import FrozenBuffers, RandomState, TwoPasses, random_state
from gradalign.optim.vectors import all_finite, put_gradients, take_gradients
from gradalign.optim.wrapper import OptimizerWrapper
from gradalign.schedule import require


class TwoVerbs(OptimizerWrapper):
    """Everything of ``GradAlign`` but the step with a closure and the state dict; its settings are explained there."""

    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to step()

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        beta: float,
        every: int = 1,
        reuse: Literal["previous"] | None = None,
        memory: Literal["full", "low"] = "full",
        same_randomness: bool = True,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(optimizer)
        require("beta", beta, least=0.0)
        if every < 1:
            raise GradalignError(f"every must be at least 1, got {every}")
        if reuse not in (None, "previous"):
            raise GradalignError(f'reuse must be "previous" or None, got {reuse!r}')
        if memory not in ("full", "low"):
            raise GradalignError(f'memory must be "full" or "low", got {memory!r}')
        parallel = model if isinstance(model, DistributedDataParallel) else None
        if overlap and parallel is None:
            raise GradalignError("overlap=True needs model=..., a model wrapped in DistributedDataParallel")
        self.beta, self.every, self.reuse, self.memory = beta, every, reuse, memory
        self.same_randomness, self.overlap = same_randomness, overlap
        self.steps, self.skipped_steps = 0, 0
        self._parallel = parallel
        self._ranks, self._buffers = Ranks(process_group), FrozenBuffers(model)
        self._previous: dict[nn.Parameter, Tensor] | None = None
        self._passes: TwoPasses | None = None
        self._random: RandomState | None = None
        self._scaled = False
        self._finite: bool | None = None
        everything = [p.detach() for group in self.param_groups for p in group["params"]]
        self._ranks.broadcast(everything + ([] if model is None else list(model.buffers())))

    @property
    def aligning(self) -> bool:
        """Whether the step now being prepared is an aligned one; when not, the second pass may be left out."""
        return self.beta != 0.0 and self.steps % self.every == 0

    def _alone(self, parts: int) -> bool:
        """Whether there is a single part in all, which has nothing to be aligned with."""
        if parts * self._ranks.size > 1 or self.reuse:
            return False
        warnings.warn(
            "GradAlign has one part and nothing to align it with, so its steps are plain; give several parts or start "
            "several ranks",
            stacklevel=4,
        )
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; the random numbers of a first pass are counted from here on."""
        super().zero_grad(set_to_none)
        if self._passes is None:
            self._mark_random()

    def _mark_random(self) -> None:
        parameters = self.trained_parameters()
        self._random = random_state(parameters[0].device) if parameters else None

    def collect(self, weight: float = 1.0) -> None:
        """Keep what lies in ``.grad`` as the gradient of one part, after that part's first backward.

        Only for several parts in one process; a single one is collected by ``displace``.
        """
        if self._passes is None:
            self._passes = TwoPasses(self.trained_parameters(), self._ranks, self._buffers)
        if self._passes.displaced or self._finite is not None:
            raise GradalignError("collect() belongs to the first pass; call step() or restore() before the next one")
        self._passes.collect(weight, self._random or random_state(self._passes.device))
        self._mark_random()

    def displace(self, scaler: GradScaler | None = None) -> bool:
        """Move the parameters to the next part's displaced point, ready for its second forward and backward.

        Call it after the first backward; with several collected parts once for each, in the same order. ``.grad``
        is cleared. Under DistributedDataParallel the first forward and backward belong inside ``model.no_sync()``.

        Args:
            scaler: The GradScaler, when the losses are scaled by one.

        Returns:
            Whether there is a point to go to. If not (β is 0, ``every`` says so, or the gradient is not finite) the
            second pass may be left out, unless there is a scaler; when made, nothing comes of it.
        """
        if self._finite is not None:
            raise GradalignError("the step is prepared already; call step() before the next displace()")
        passes = self._passes
        if passes is None or not passes.parts:
            self.collect()
            passes = self._passes
        assert passes is not None
        if passes.staying:
            return False
        if not passes.displaced:
            self._unscale_first_pass(passes, scaler)
            return self._begin(passes)
        if passes.visited == len(passes.parts):
            raise GradalignError("every part was displaced already; call step(), or restore() to give the step up")
        passes.gather()
        passes.visit(self.same_randomness)
        return True

    def _begin(self, passes: TwoPasses) -> bool:
        """Find ḡ and go to the first displaced point, or stay when this step has none."""
        if not self.aligning or self._alone(len(passes.parts)):
            passes.stay()
            return False
        mean = self._take_previous(passes.parameters)
        if mean is None:
            mean, _ = self._ranks.mean(passes.parameters, passes.local_mean(), passes.weight, None)
            lost = not all_finite(mean)
        else:
            # Only this rank knows; the others will hear of it with the displaced gradients.
            lost = passes.spoiled = not all(all_finite(part.vectors) for part in passes.parts)
        if lost:
            passes.stay()
            return False
        self._warn_of_equal_ranks(passes, mean)
        passes.aim(self.beta, mean)
        passes.visit(self.same_randomness)
        return True

    def _unscale_first_pass(self, passes: TwoPasses, scaler: GradScaler | None) -> None:
        self._scaled = scaler is not None and scaler.is_enabled()
        if scaler is None or not self._scaled:
            return
        if len(passes.parts) > 1:
            raise GradalignError("a GradScaler works with one part in each process; collect() was used for several")
        for g in passes.parts[0].vectors:
            if g is not None:
                g.div_(scaler.get_scale())

    def _warn_of_equal_ranks(self, passes: TwoPasses, mean: Gradients) -> None:
        if self.steps or self._ranks.size == 1 or len(passes.parts) > 1:
            return
        pairs = zip(passes.parts[0].vectors, mean, strict=True)
        if all(g is None or m is None or torch.allclose(g, m) for g, m in pairs):
            warnings.warn(
                "all ranks have the same gradient, so there is nothing to align; was the first pass, forward and "
                "backward, inside model.no_sync(), and has every rank its own part?",
                stacklevel=4,
            )

    def restore(self) -> None:
        """Give up a step half-way: the parameters go back to x exactly, and what was collected is forgotten."""
        if self._passes is not None:
            self._passes.go_home(self.same_randomness)
        self._passes, self._finite, self._scaled = None, None, False

    def _finish(self) -> None:
        """End the passes: back to x, and the step's gradient in ``.grad``."""
        passes = self._passes
        if passes is None:  # a plain step, with what lies in .grad
            parameters = self.trained_parameters()
            self._unscale(parameters)
            if self._ranks.size > 1 and not self.overlap:
                self._put_mean(parameters, take_gradients(parameters), 1.0)
        elif passes.displaced:
            self._end_second_pass(passes)
            if self.overlap:
                put_gradients(passes.parameters, passes.total())
            else:
                self._put_mean(passes.parameters, passes.total(), passes.weight)
        else:  # the gradients at x are the step's; a second pass, if one was made, found the same ones
            take_gradients(passes.parameters)
            passes.go_home(self.same_randomness)
            self._refuse_unknown_scale()
            gradients = passes.total() if passes.spoiled else passes.local_mean()
            self._put_mean(passes.parameters, gradients, passes.weight)
        self._ready()

    def _end_second_pass(self, passes: TwoPasses) -> None:
        self._unscale(passes.parameters)
        found = passes.gather()
        passes.go_home(self.same_randomness)
        problem = None
        if not found:
            problem = "step() came after displace() without a second backward"
        elif passes.visited < len(passes.parts):
            problem = f"step() came after {passes.visited} of {len(passes.parts)} parts were displaced"
        if problem:
            self.restore()
            raise GradalignError(problem)
        self._refuse_unknown_scale()

    def _refuse_unknown_scale(self) -> None:
        if getattr(self, "grad_scale", None) is not None and not self._scaled:
            self.restore()
            raise GradalignError("the losses are scaled: give the scaler to displace(scaler=scaler)")

    def _put_mean(self, parameters: Sequence[nn.Parameter], gradients: Gradients, weight: float) -> None:
        mean, _ = self._ranks.mean(parameters, gradients, weight, None)
        put_gradients(parameters, mean)

    @torch.no_grad()
    def _unscale(self, parameters: Sequence[nn.Parameter]) -> None:
        """Undo GradScaler's scale; it hands it over as an attribute while its step() runs."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))

    def _ready(self) -> None:
        """Look at the gradient that the step will be taken with."""
        parameters = self.trained_parameters()
        self._finite = all_finite([p.grad for p in parameters])
        if self.reuse:
            kept = {p: p.grad.detach().clone() for p in parameters if p.grad is not None}
            self._previous = kept if self._finite else None

    def _take_previous(self, parameters: Sequence[nn.Parameter]) -> Gradients | None:
        """Return the ḡ kept from the step before, to be used up."""
        kept, self._previous = self._previous, None
        return None if kept is None else [kept.get(p) for p in parameters]
