"""What a GradAlign optimizer is made of: its settings, and ranks that start from the first one's values."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradalign.algorithms.schedule import Schedule, require, setting_of, value_at
from gradalign.errors import GradalignError
from gradalign.optim.averaging import DdpWatch
from gradalign.optim.pending import PendingGradient
from gradalign.optim.ranks import Ranks
from gradalign.optim.two_passes import FrozenBuffers, RandomState, TwoPasses
from gradalign.optim.vectors import forget_derived_values
from gradalign.optim.wrapper import OptimizerWrapper, refuse_sharded


class AlignedOptimizer(OptimizerWrapper):
    """Settings, state and ranks of a ``GradAlign``; the settings are explained there."""

    def __init__(
        self,
        optimizer: Optimizer,
        beta: float | Schedule,
        *,
        every: int = 1,
        reuse: Literal["previous"] | None = None,
        memory: Literal["full", "low"] = "full",
        same_randomness: bool = True,
        model: nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(optimizer)
        refuse_sharded(self.all_parameters() if model is None else [*self.all_parameters(), *model.parameters()])
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise GradalignError(f"every must be at least 1, a whole number of steps, got {every!r}")
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
        self._model, self._parallel = model, parallel
        if process_group is None and parallel is not None and parallel.process_group is not dist.group.WORLD:
            process_group = parallel.process_group
        self._ranks, self._buffers, self._watch = Ranks(process_group), FrozenBuffers(model), DdpWatch(model)
        self._previous: dict[nn.Parameter, Tensor] | None = None
        self._passes: TwoPasses | None = None
        self._pending: PendingGradient | None = None
        self._random: RandomState | None = None
        self._scaled = False
        self._finite: bool | None = None
        self._all_weight = 1.0
        self._told: set[str] = set()
        self._meet_ranks()

    @property
    def beta(self) -> float | Schedule:
        """β: a number, or a schedule over steps."""
        return self._beta

    @beta.setter
    def beta(self, beta: float | Schedule) -> None:
        require("beta", beta, least=0.0)
        setting = setting_of("beta", beta)
        value_at(setting, 0)  # a schedule in shares of a run is refused here: the number of steps is not known
        self._beta = setting

    @property
    def beta_now(self) -> float:
        """β of the step now being prepared; a schedule counts steps, the first is 0."""
        return value_at(self._beta, self.steps)

    @property
    def aligning(self) -> bool:
        """Whether the step now being prepared is an aligned one; when not, the second pass may be left out."""
        return self.beta_now != 0.0 and self.steps % self.every == 0

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=5)

    def _alone(self, parts: int, *, expected: bool = False) -> bool:
        """Whether there is a single part in all, which has nothing to be aligned with."""
        if parts * self._ranks.size > 1 or self.reuse:
            return False
        if not expected:
            self._warn_once(
                "GradAlign has one part and nothing to align it with, so its steps are plain; give several parts or "
                "start several ranks"
            )
        return True

    def _meet_ranks(self, *, after_a_pass: bool = False) -> None:
        """Take the first rank's values of what these ranks have not shared yet: at the beginning, everything.

        The process group may have been started after this optimizer was made, and even after some steps; then the
        first rank's optimizer state is taken as well.
        """
        if self._passes is not None or self._finite is not None:
            return
        parameters, strangers = self.all_parameters(), not self._ranks.met
        if not self._ranks.unshared(len(parameters)):
            return
        refuse_sharded(parameters)
        buffers = [] if self._model is None else list(self._model.buffers())
        changed = self._ranks.share([p.detach() for p in parameters], buffers)
        forget_derived_values()
        steps, different = self._ranks.sums([float(self.steps), float(changed)], parameters[0].device)
        if strangers and steps:
            self.load_state_dict(self._ranks.share_object(self.state_dict()))
        if different and after_a_pass:
            raise GradalignError(
                "the ranks' parameters were different while the first backward was made, and are the first rank's "
                "now; call zero_grad() before it, or make the optimizer after init_process_group()"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer more parameters; all ranks take the first one's values."""
        super().add_param_group(param_group)
        self._meet_ranks()
