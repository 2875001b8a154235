"""Torch's optimizers inside a train function that knows nothing of us: seen, corrected, or held back, step by step."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradalign.errors import GradalignError
from gradalign.flower.layout import Named


class Steps:
    """Looks at every step that a torch optimizer is about to take inside the ``with`` block.

    A parameter is known by its values: before its first step it has those of the array that it was loaded from.

    Args:
        arrays: The named arrays that are trained, as the train function was given them.
        still: Hold every step back and add up its gradient instead.
        constant: What to add to the gradients of these names.
        pull: μ; with it, μ·y is added, too.
    """

    def __init__(self, arrays: Named, *, still: bool = False, constant: Named | None = None, pull: float = 0.0) -> None:
        self._arrays, self._still, self._constant, self._pull = arrays, still, constant, pull
        self._names: dict[int, str] = {}
        self._parameters: list[Tensor] = []  # held, so that no id is given twice
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self._first: torch.optim.Optimizer | None = None
        self._velocity, self.lr = 0.0, math.nan  # lr: of the first step
        self.count, self.total = 0, 0.0  # of the steps, and of their sizes

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_pre_hook(self._before)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    @property
    def known(self) -> bool:
        """Whether any parameter was one of the arrays."""
        return any(self._names.values())

    def gradient(self) -> Named:
        """Return the mean gradient of the steps that were held back."""
        return {name: total / count for name, (total, count) in self._sums.items()}

    def total_step_size(self, weight_decay: float) -> float:
        """Return the sum of the step sizes that gradients were given: αK, and more with momentum.

        With them the server tells the mean gradient from the updates, less the weight decay that it knows of.
        """
        if self._first is None:
            raise GradalignError("the app's train function took no step with a torch optimizer; its steps are unknown")
        if not isinstance(self._first, torch.optim.SGD):
            raise GradalignError(
                f"the app trains with {type(self._first).__name__}, whose steps do not tell the size of a gradient; "
                "this algorithm needs torch.optim.SGD at the clients"
            )
        decay = float(self._first.param_groups[0]["weight_decay"])
        if decay != weight_decay:
            raise GradalignError(
                f"the app's optimizer has weight_decay {decay:g}, and the server reckons with {weight_decay:g}; "
                f"give AlignedStrategy(local=LocalTraining(weight_decay={decay:g})) or OneTrip(weight_decay={decay:g})"
            )
        return self.total

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._still and (len(args) > 1 or kwargs.get("closure") is not None):
            raise GradalignError("the app's optimizer steps with a closure; give ClientApp(gradient=...)")
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = self._name_of(p)
            if self._still:
                if name and p.grad is not None:
                    total, count = self._sums.get(name, (torch.zeros((), dtype=p.dtype), 0))
                    self._sums[name] = total + p.grad.cpu(), count + 1
                p.grad = None  # torch leaves such parameters where they are
            elif name and self._constant is not None:
                wanted = self._constant[name].to(p) + self._pull * p
                p.grad = wanted if p.grad is None else p.grad.add_(wanted)
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._measure(optimizer.param_groups[0])

    def _name_of(self, p: Tensor) -> str:
        """Return the array that a parameter was loaded from, or nothing for one that the server does not know."""
        if id(p) not in self._names:
            taken = set(self._names.values())
            alike = (name for name, a in self._arrays.items() if a.shape == p.shape and name not in taken)
            self._names[id(p)] = next((name for name in alike if torch.equal(self._arrays[name].to(p), p)), "")
            self._parameters.append(p)
        return self._names[id(p)]

    def _measure(self, group: dict[str, Any]) -> None:
        momentum = float(group.get("momentum", 0.0))
        weight = 1.0 - float(group.get("dampening", 0.0)) if self.count else 1.0
        self._velocity = momentum * self._velocity + weight  # of a gradient that is always 1
        ahead = 1.0 + momentum * self._velocity if group.get("nesterov") else self._velocity
        self.lr = self.lr if self.count else float(group["lr"])
        self.total += float(group["lr"]) * ahead
        self.count += 1
