"""One local step, parameter by parameter: what is done with a batch's gradient once backward has left it.

Backward hands over fresh gradient tensors instead of adding to a vector of zeros: a large model's parameters are
read and written as few times as the formula needs, and a small one's cost is that of calling torch at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gradalign.algorithms.view import Plan
from gradalign.client import LocalTraining
from gradalign.client.flat import FlatModel

Factors = list[tuple[Tensor, Tensor]]
"""Thin matrices (G, X) with a row for each example; the gradient is the sum of all Gᵀ·X."""


class RecordingLayer(Protocol):
    """A layer that leaves its weight's gradient as factors while ``recorded`` is a list."""

    weight: Tensor
    recorded: Factors | None


class FactoredGradients:
    """The gradients of large weights that layers leave as factors; of no layers unless ``fast.linear`` gives some."""

    def __init__(self, layers: Iterable[RecordingLayer] = ()) -> None:
        self._layers = {id(layer.weight): layer for layer in layers}

    @contextmanager
    def recording(self) -> Iterator[None]:
        for layer in self._layers.values():
            layer.recorded = []
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.recorded = None

    def take(self, weight: Tensor) -> Factors:
        layer = self._layers.get(id(weight))
        if layer is None or not layer.recorded:
            return []
        recorded, layer.recorded = layer.recorded, []
        return recorded


def set_out(
    y: Tensor, plan: Plan, displacement: Tensor | None, correction: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Bring y, where gradients are taken, from x to where a plan begins; return z, the constant and a shift.

    z is what steps: y itself or, with the displacement inside every step, z = y − shift. The constant is c − μx.
    """
    constant = correction
    if plan.pull:
        constant = -plan.pull * y if correction is None else correction - plan.pull * y
    if displacement is None:
        return y, constant, None
    return (y.clone(), constant, displacement) if plan.every_step else (y.add_(displacement), constant, None)


class LocalStep:
    """z ← z − α ( clip(∇f(y)) + decay·y + constant ), with heavy-ball momentum on request.

    ``decay`` and ``constant`` are the step's affine part: wd·y + c + μ(y − x) = (wd + μ)·y + (c − μx).
    With an optimizer of torch's, z moves as that says, given what is in the brackets; wd is then its own affair.
    """

    def __init__(
        self,
        flat: FlatModel,
        factored: FactoredGradients,
        z: Tensor,
        constant: Tensor | None,
        *,
        lr: float,
        decay: float,
        local: LocalTraining,
    ) -> None:
        self._flat, self._factored, self._lr, self._decay = flat, factored, lr, decay
        self._momentum, self._clip = local.momentum, local.clip_norm
        self._y, self._z = flat.views(flat.vector), flat.views(z)
        self._constant = None if constant is None else flat.views(constant)
        self._velocity: list[Tensor] | None = None
        self._optimizer = local.make_optimizer(self._z, lr) if local.optimizer else None
        # Whether factors may go straight into z: nothing has to see the gradient itself, and decay acts on z.
        plain = self._optimizer is None and not self._momentum and self._clip is None
        self._straight = plain and (z is flat.vector or not decay)
        self._shrink = _Shrink(1.0 - lr * decay, z.dtype)

    @torch.no_grad()
    def take(self) -> None:
        """Move z by the gradients that backward has left in the parameters, and take those away."""
        if self._straight:
            self._shrink.go_on()
            for place, parameter in enumerate(self._flat.parameters):
                self._move(place, parameter.grad, self._factored.take(parameter))
                parameter.grad = None
            return
        directions = [self._gradient(parameter) for parameter in self._flat.parameters]
        if self._clip is not None:
            _shorten(directions, self._clip)
        for place, direction in enumerate(directions):
            self._add_affine_part(place, direction)
        if self._optimizer is not None:
            for direction, z in zip(directions, self._z, strict=True):
                z.grad = direction
            self._optimizer.step()
            return
        if self._velocity is not None:
            for velocity, direction in zip(self._velocity, directions, strict=True):
                velocity.mul_(self._momentum).add_(direction)
            directions = self._velocity
        elif self._momentum:
            self._velocity = directions
        for direction, z in zip(directions, self._z, strict=True):
            z.add_(direction, alpha=-self._lr)

    def _move(self, place: int, gradient: Tensor | None, factors: Factors) -> None:
        z, lr = self._z[place], self._lr
        if not factors:
            direction = _dense(gradient, z)
            self._add_affine_part(place, direction)
            z.add_(direction, alpha=-lr)
            return
        shrink = self._shrink.now
        if shrink is None:  # as without factors: decay is added to the gradient before the step is taken
            (grad_output, inputs), *factors = factors
            z.sub_(torch.addmm(z, grad_output.t(), inputs, beta=self._decay), alpha=lr)
            shrink = 1.0
        for grad_output, inputs in factors:
            z.addmm_(grad_output.t(), inputs, beta=shrink, alpha=-lr)
            shrink = 1.0
        if gradient is not None:
            z.add_(_dense(gradient, z), alpha=-lr)
        if self._constant is not None:
            z.add_(self._constant[place], alpha=-lr)

    def _gradient(self, parameter: Tensor) -> Tensor:
        """Return a parameter's whole gradient, in a tensor that may be changed, and take it away."""
        gradient = _dense(parameter.grad, parameter)
        parameter.grad = None
        for grad_output, inputs in self._factored.take(parameter):
            gradient.addmm_(grad_output.t(), inputs)
        return gradient

    def _add_affine_part(self, place: int, direction: Tensor) -> None:
        if self._decay:
            direction.add_(self._y[place], alpha=self._decay)
        if self._constant is not None:
            direction.add_(self._constant[place])


class _Shrink:
    """The factor 1 − α·decay of every step in the weights' precision, so that the product of many factors is right.

    A factor near 1 is rounded to a multiple of the precision, and always to the same side: what a step's factor lacks
    is left to the next one's. So near to 1 that even the weights' own rounding goes to one side, there is none.
    """

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        self._factor, self._dtype, self._owed = factor, dtype, 1.0
        self._none = 0.0 < abs(1.0 - factor) < 16 * torch.finfo(dtype).eps
        self.now: float | None = None
        """This step's factor; None where there is none."""

    def go_on(self) -> None:
        if self._none:
            return
        owed = self._owed * self._factor
        self.now = float(torch.tensor(owed, dtype=self._dtype))
        self._owed = owed / self.now if self.now else 1.0


@torch.no_grad()
def hand_over_gradients(flat: FlatModel, factored: FactoredGradients, views: list[Tensor], *, add: bool) -> None:
    """Write or add the gradients that backward has left in the parameters to ``views``, and take them away."""
    for parameter, view in zip(flat.parameters, views, strict=True):
        thin = factored.take(parameter)
        if parameter.grad is not None or not thin:
            dense = _dense(parameter.grad, parameter)
            view.add_(dense) if add else view.copy_(dense)
        written = add or parameter.grad is not None
        for grad_output, inputs in thin:
            torch.addmm(view, grad_output.t(), inputs, beta=float(written), out=view)
            written = True
        parameter.grad = None


def _dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like, requires_grad=False)
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _shorten(gradients: list[Tensor], longest: float) -> None:
    """Scale the gradients, seen as one vector, down to ``longest`` when they are longer."""
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
    if norm > longest:
        for gradient in gradients:
            gradient.mul_(longest / norm)
