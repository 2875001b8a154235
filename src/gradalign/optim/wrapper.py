"""A torch optimizer around another one: GradAlign's settings, and ranks that start from the first one's values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from gradalign.algorithms.schedule import Schedule, require, setting_of, value_at
from gradalign.errors import GradalignError
from gradalign.optim.gradients import are_shards, forget_derived_values
from gradalign.optim.pending import LastPart, PlainGradient
from gradalign.optim.ranks import Ranks, ShardedRanks
from gradalign.optim.two_passes import FrozenBuffers, RandomState, TwoPasses


class DdpWatch:
    """Sees every forward of DistributedDataParallel models: it is there that ``no_sync()`` decides who averages.

    It watches those that are, or are inside, the given model; without one, those that are called while averaging is
    refused. Known modules get a hook of their own: one for all modules would make compiled ones compile again.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.averages = False  # whether DistributedDataParallel averages the backward of the last forward seen
        self._everywhere = model is None
        self._trained: set[nn.Parameter] = set()
        self._refuse: Callable[[], object] | None = None
        self._hook: RemovableHandle | None = None
        for module in () if model is None else model.modules():
            if isinstance(module, DistributedDataParallel):
                module.register_forward_pre_hook(self._see)

    def refuse_averaging(
        self, parameters: Iterable[nn.Parameter], refuse: Callable[[], object], *, everywhere: bool = False
    ) -> None:
        """From now on call ``refuse``, which raises, before a forward whose backward would average these parameters."""
        self._trained, self._refuse = set(parameters), refuse
        if (self._everywhere or everywhere) and self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._see)

    @contextmanager
    def refusing(self, parameters: Iterable[nn.Parameter], refuse: Callable[[], object]) -> Iterator[None]:
        self.refuse_averaging(parameters, refuse, everywhere=True)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        self._trained, self._refuse, self.averages = set(), None, False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _see(self, module: nn.Module, _: object) -> None:
        if not isinstance(module, DistributedDataParallel) or not torch.is_grad_enabled():
            return
        self.averages = bool(module.require_backward_grad_sync)
        if self.averages and self._refuse is not None and not self._trained.isdisjoint(module.parameters()):
            self._refuse()


def delegated(name: str, to: str = "optimizer") -> Any:
    """Return a property that is read from and written to the object beside it."""

    def write(wrapper: Any, value: Any) -> None:
        setattr(getattr(wrapper, to), name, value)

    return property(lambda wrapper: getattr(getattr(wrapper, to), name), write)


class OptimizerWrapper(Optimizer):
    """Settings and ranks of a ``GradAlign``, explained there; groups, state and hooks are the wrapped optimizer's."""

    param_groups, state, defaults = delegated("param_groups"), delegated("state"), delegated("defaults")

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
        # Optimizer.__init__ is left out on purpose: it would make a second set of groups and state.
        if not isinstance(optimizer, Optimizer):
            raise GradalignError(f"GradAlign wraps a torch.optim optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, LBFGS | OptimizerWrapper):
            raise GradalignError(f"GradAlign cannot wrap {type(optimizer).__name__}; give SGD, Adam or the like")
        self.optimizer = optimizer
        sharded = are_shards(self.all_parameters(), model, process_group)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise GradalignError(f"every must be at least 1, a whole number of steps, got {every!r}")
        if reuse not in (None, "previous"):
            raise GradalignError(f'reuse must be "previous" or None, got {reuse!r}')
        if memory not in ("full", "low"):
            raise GradalignError(f'memory must be "full" or "low", got {memory!r}')
        inside = getattr(model, "_orig_mod", model)  # of a compiled model
        parallel = inside if isinstance(inside, DistributedDataParallel) else None
        if overlap and parallel is None:
            raise GradalignError("overlap=True needs model=..., a model wrapped in DistributedDataParallel")
        self.beta, self.every, self.reuse, self.memory = beta, every, reuse, memory
        self.same_randomness, self.overlap = same_randomness, overlap
        self.steps, self.skipped_steps = 0, 0
        self._model, self._parallel = model, parallel
        if process_group is None and parallel is not None and parallel.process_group is not dist.group.WORLD:
            process_group = parallel.process_group
        self._ranks = ShardedRanks(model, process_group) if sharded and model is not None else Ranks(process_group)
        self._buffers, self._watch = FrozenBuffers(model), DdpWatch(model)
        self._previous: dict[nn.Parameter, Tensor] | None = None
        self._passes: TwoPasses | None = None
        self._pending: LastPart | PlainGradient | None = None
        self._random: RandomState | None = None
        self._scaled = False
        self._finite: bool | None = None
        self._all_weight = 1.0
        self._told: set[str] = set()
        self._several = False  # whether there ever were several parts
        self._closure_of_trainer = False  # whether a closure given to step() is a trainer's, with its hooks
        self._meet_ranks()

    def __getattr__(self, name: str) -> Any:
        # Reached only for what this object lacks: torch's hook tables and the like live in the wrapped optimizer.
        if name == "optimizer":  # not yet there, while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "step"}  # a scheduler may have put it

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    @property
    def beta(self) -> float | Schedule:
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

    def all_parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def trained_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.all_parameters() if p.requires_grad]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer more parameters; all ranks take the first one's values."""
        self.optimizer.add_param_group(param_group)
        try:
            are_shards(self.all_parameters(), self._model, self._ranks.group)
        except GradalignError:
            self.param_groups.pop()
            raise
        self._meet_ranks()

    def _meet_ranks(self, *, after_a_pass: bool = False) -> None:
        """Take the first rank's values of what these ranks have not shared yet: at the beginning, everything.

        Where the process group was started after some steps, the first rank's optimizer state is taken as well.
        """
        if self._passes is not None or self._finite is not None:
            return
        parameters, strangers = self.all_parameters(), not self._ranks.met
        if not self._ranks.unshared(parameters):
            return
        are_shards(parameters, self._model, self._ranks.group)
        changed = self._ranks.share(parameters, [] if self._model is None else list(self._model.buffers()))
        forget_derived_values()
        steps, different = self._ranks.sums([float(self.steps), float(changed)], parameters[0].device)
        if strangers and steps:
            self.load_state_dict(self._ranks.share_object(self.state_dict()))
        if different and after_a_pass:
            raise GradalignError(
                "the ranks' parameters were different while the first backward was made, and are the first rank's "
                "now; call zero_grad() before it, or make the optimizer after init_process_group()"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=5)

    def _alone(self, parts: int, *, expected: bool = False) -> bool:
        """Whether there is a single part in all, which has nothing to be aligned with."""
        if parts * self._ranks.size > 1 or self.reuse:
            self._several = True
            return False
        if not (expected or self._several):  # what is left at the end of an epoch is nothing to warn of
            self._warn_once(
                "GradAlign has one part and nothing to align it with, so its steps are plain; give several parts"
                + (", each of which spans all ranks" if self._ranks.sharded else " or start several ranks")
            )
        return True
