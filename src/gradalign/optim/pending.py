"""The step's gradient between the second passes and ``step()``: it lies complete in ``.grad``, where users clip it.

Gradients are changed on their way into ``.grad`` by hooks, so that it does not matter how often a part's backward is
called, nor whether someone cleared ``.grad`` before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gradalign.optim.ranks import Gradients
from gradalign.optim.vectors import put_gradients


@contextmanager
def scaled_gradients(parameters: Sequence[nn.Parameter], factor: float) -> Iterator[None]:
    """Multiply what arrives in ``.grad``, before anybody (DistributedDataParallel) sees it."""
    handles = [] if factor == 1.0 else [p.register_hook(lambda g: g * factor) for p in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class PendingGradient:
    """Watches what arrives in ``.grad``, and whether something else changes it afterwards."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.arrived: set[nn.Parameter] = set()
        self._noted: dict[Tensor, tuple[int, int]] = {}
        self._handles = [p.register_hook(partial(self._arrive, p)) for p in parameters]
        self._handles += [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        self.arrived.add(parameter)
        return self.instead(parameter, gradient)

    def instead(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return what is to be added to ``.grad`` in the place of this gradient."""
        raise NotImplementedError

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._noted[parameter] = id(parameter.grad), parameter.grad._version

    def changed(self, allowed: int) -> bool:
        """Return whether ``.grad`` was written to, more often than allowed, since the last backward."""
        return any(
            p.grad is not None and (id(p.grad) != name or p.grad._version > version + allowed)
            for p, (name, version) in self._noted.items()
        )

    def close(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self) -> None:
        """Let go, and see to it that ``.grad`` is the step's gradient."""
        raise NotImplementedError


class LastPart(PendingGradient):
    """Adds the last part's gradient, times its share, to the sum of the parts before."""

    def __init__(self, parameters: Sequence[nn.Parameter], so_far: Gradients, share: float) -> None:
        super().__init__(parameters)
        self._share = share
        self._waiting = {p: g for p, g in zip(parameters, so_far, strict=True) if g is not None}
        self._placed: set[nn.Parameter] = set()

    def instead(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the gradient times its share; the first time, with the other parts' sum."""
        rest = self._waiting.pop(parameter, None)
        if rest is not None:
            return rest.add_(gradient, alpha=self._share)
        return gradient if self._share == 1.0 else gradient * self._share

    def _note(self, parameter: Tensor) -> None:
        super()._note(parameter)
        # Parameters that only other parts used may never be reached by this backward.
        for p in [p for p in self._waiting if p.grad is None]:
            p.grad = self._waiting.pop(p)
            self._placed.add(p)
            super()._note(p)

    @torch.no_grad()
    def finish(self) -> None:
        """Let go; weigh and add where a gradient was put by hand, past the hooks."""
        self.close()
        for p in self.parameters:
            if p.grad is not None and p not in self.arrived and p not in self._placed:
                p.grad.mul_(self._share)
        for p, rest in self._waiting.items():
            p.grad = rest if p.grad is None else rest.add_(p.grad)


class PlainGradient(PendingGradient):
    """The gradient of a step that has no displaced points: second passes, if they are made, add nothing to it."""

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
        super().__init__(parameters)
        self._gradients = dict(zip(parameters, gradients, strict=True))
        self.put()

    def put(self) -> None:
        """Make it ``.grad``, again when someone cleared that."""
        put_gradients(self.parameters, list(self._gradients.values()))
        for p in self.parameters:
            self._note(p)

    def instead(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return zero, or this gradient when it is no longer there."""
        own = self._gradients[parameter]
        return torch.zeros_like(gradient) if own is None or parameter.grad is not None else own

    def finish(self) -> None:
        """Let go."""
        self.close()
        for p, own in self._gradients.items():
            if own is None or p.grad is None:
                p.grad = own
