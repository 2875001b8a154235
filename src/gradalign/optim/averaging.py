"""Who averages a backward over the ranks: DistributedDataParallel decides it in the forward, by ``no_sync()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class DdpWatch:
    """Sees every forward of the DistributedDataParallel models that are, or are inside, the given model.

    Without a model it sees those that are called between ``refuse_averaging`` and ``stop``. It is a hook of the modules
    themselves where they are known: one for all modules would make compiled ones compile again.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.averages = False
        """Whether DistributedDataParallel averages the backward of the last forward seen."""
        self._everywhere = model is None
        self._trained: set[nn.Parameter] = set()
        self._refuse: Callable[[], object] | None = None
        self._hook: RemovableHandle | None = None
        for module in () if model is None else model.modules():
            if isinstance(module, DistributedDataParallel):
                module.register_forward_pre_hook(self._see)

    def refuse_averaging(self, parameters: Iterable[nn.Parameter], refuse: Callable[[], object]) -> None:
        """From now on call ``refuse``, which raises, before a forward whose backward would average these parameters."""
        self._trained, self._refuse = set(parameters), refuse
        if self._everywhere and self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(self._see)

    def stop(self) -> None:
        """Refuse nothing any more, and forget what was seen."""
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
