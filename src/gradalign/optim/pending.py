"""The step's gradient while it waits in ``.grad`` for ``step()``, where users look at it and clip it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradalign.optim.gradients import Gradients, as_held, held_values, is_shard


class PendingGradient:
    """The step's gradient between the second passes and ``step()``: it lies complete in ``.grad``, where users clip it.

    Gradients are changed on their way into ``.grad`` by hooks, so that it does not matter how often a part's backward
    is called, nor whether someone cleared ``.grad`` before it. Shards come past the first of these hooks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self.sharded = parameters, any(is_shard(p) for p in parameters)
        self._noted: dict[Tensor, tuple[int, int | Tensor]] = {}
        self._handles = [p.register_hook(partial(self._arrive, p)) for p in parameters]
        self._handles += [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        raise NotImplementedError  # what is to be added to .grad in the place of this gradient

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._noted[parameter] = id(parameter.grad), self._mark(parameter.grad)

    def _mark(self, gradient: Tensor) -> int | Tensor:
        """Return what changes when it is written to: the version, which DTensors do not count, or the sum."""
        return held_values(gradient).sum() if self.sharded else gradient._version

    def changed(self, allowed: int) -> bool:
        """Return whether ``.grad`` was written to, more often than allowed, since the last backward."""
        if self.sharded and allowed:
            return False
        return any(
            p.grad is not None and (id(p.grad) != name or not 0 <= self._mark(p.grad) - mark <= allowed)
            for p, (name, mark) in self._noted.items()
        )

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class LastPart(PendingGradient):
    """Adds the last part's gradient, times its share, to the sum of the parts before."""

    def __init__(self, parameters: Sequence[nn.Parameter], so_far: Gradients, share: float) -> None:
        super().__init__(parameters)
        self._share = share
        self._waiting = {p: g for p, g in zip(parameters, so_far, strict=True) if g is not None}
        self._arrived: set[nn.Parameter] = set()

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self._arrived.add(parameter)
        rest = self._waiting.pop(parameter, None)
        if rest is not None:
            return rest.add_(gradient, alpha=self._share)
        return gradient if self._share == 1.0 else gradient * self._share

    def _note(self, parameter: Tensor) -> None:
        super()._note(parameter)
        if self.sharded:  # the others' shards are still to come
            return
        # Parameters that only other parts used may never be reached by this backward.
        for p in [p for p in self._waiting if p.grad is None]:
            p.grad = self._waiting.pop(p)
            self._arrived.add(p)
            super()._note(p)

    @torch.no_grad()
    def finish(self) -> None:
        """Let go; weigh and add where a gradient was put by hand, past the hooks."""
        self.close()
        for p in self.parameters:
            if p.grad is not None and p not in self._arrived:
                held_values(p.grad).mul_(self._share)
        for p, rest in self._waiting.items():
            p.grad = as_held(p, rest if p.grad is None else rest.add_(held_values(p.grad)))


class PlainGradient(PendingGradient):
    """The gradient of a step that has no displaced points: second passes, if they are made, add nothing to it."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
        super().__init__(parameters)
        self._gradients: dict[Tensor, Tensor | None] = dict(zip(parameters, gradients, strict=True))
        self.put()

    def put(self) -> None:
        """Make it ``.grad``, again when someone cleared that."""
        for p in self._gradients:
            self._put(p)

    def _put(self, parameter: Tensor) -> None:
        own = self._gradients[parameter]
        # fully_shard adds to .grad where it lies.
        parameter.grad = as_held(parameter, own.clone() if self.sharded and own is not None else own)
        super()._note(parameter)

    def _note(self, parameter: Tensor) -> None:
        if self.sharded:
            self._put(parameter)
        super()._note(parameter)

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        own = self._gradients[parameter]
        return torch.zeros_like(gradient) if own is None or parameter.grad is not None else own

    def finish(self) -> None:
        """Let go; what was cleared or came where nothing belongs is put right."""
        self.close()
        for p, own in self._gradients.items():
            if own is None or p.grad is None:
                p.grad = as_held(p, own)
