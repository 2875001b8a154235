"""One local step, parameter by parameter: what is done with a batch's gradient once backward has left it.

Backward hands over fresh gradient tensors instead of adding to a vector of zeros: a large model's parameters are
read and written as few times as the formula needs, and a small one's cost is that of calling torch at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradalign.flat import FlatModel


class LocalStep:
    """z ← z − α ( clip(∇f(y)) + decay·y + constant ), with heavy-ball momentum on request.

    ``decay`` and ``constant`` are the step's affine part: wd·y + c + μ(y − x) = (wd + μ)·y + (c − μx).
    """

    def __init__(
        self,
        flat: FlatModel,
        z: Tensor,
        *,
        lr: float,
        decay: float = 0.0,
        constant: Tensor | None = None,
        momentum: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        self._flat, self._lr, self._decay, self._momentum, self._clip = flat, lr, decay, momentum, clip_norm
        self._y, self._z = flat.views(flat.vector), flat.views(z)
        self._constant = None if constant is None else flat.views(constant)
        self._velocity: list[Tensor] | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Move z by the gradients that backward has left in the parameters, and take those away."""
        directions = self._flat.take_gradients()
        if self._clip is not None:
            _shorten(directions, self._clip)
        if self._decay:
            for direction, y in zip(directions, self._y, strict=True):
                direction.add_(y, alpha=self._decay)
        if self._constant is not None:
            for direction, constant in zip(directions, self._constant, strict=True):
                direction.add_(constant)
        for direction, z in zip(self._with_momentum(directions), self._z, strict=True):
            z.add_(direction, alpha=-self._lr)

    def _with_momentum(self, directions: list[Tensor]) -> list[Tensor]:
        if not self._momentum:
            return directions
        if self._velocity is None:
            self._velocity = directions
        else:
            for velocity, direction in zip(self._velocity, directions, strict=True):
                velocity.mul_(self._momentum).add_(direction)
        return self._velocity


def _shorten(gradients: list[Tensor], longest: float) -> None:
    """Scale the gradients, seen as one vector, down to ``longest`` when they are longer."""
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
    if norm > longest:
        for gradient in gradients:
            gradient.mul_(longest / norm)
