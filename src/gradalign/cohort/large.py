"""A large linear weight of several clients at once: one start, and thin factors of what each client has added to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LargeWeight:
    """W_i = start + O_iᵀ·X_i of every client i; ``start`` is one matrix for all clients, or one for each.

    Args:
        start: (out, in) or (client, out, in).
        outwards: O, (client, row, out): what the clients have added before their first step.
        inputs: X, (client, row, in).
        factor: What a step multiplies the gradient with, −lr.
    """

    def __init__(self, start: Tensor, outwards: Tensor, inputs: Tensor, factor: float) -> None:
        self.start, self.outwards, self.inputs, self.factor = start, outwards, inputs, factor
        self.given = outwards.shape[1]

    @classmethod
    def at(cls, start: Tensor, clients: int, factor: float) -> LargeWeight:
        """Return the weight of clients that have added nothing."""
        out, into = start.shape[-2:]
        return cls(start, start.new_empty(clients, 0, out), start.new_empty(clients, 0, into), factor)

    def times(self, rows: Tensor, *, backward: bool) -> Tensor:
        """Return rows·Wᵀ for every client, or rows·W when going backward; rows are (client, example, feature)."""
        clients, examples, _ = rows.shape
        start = self.start if backward else self.start.mT
        shared = start.ndim == 2
        product = (rows.flatten(0, 1) @ start).view(clients, examples, -1) if shared else torch.bmm(rows, start)
        if self.inputs.shape[1]:
            first, second = (self.outwards, self.inputs) if backward else (self.inputs, self.outwards)
            product.baddbmm_(torch.bmm(rows, first.mT), second)
        return product

    def step(self, outwards: Tensor, inputs: Tensor) -> None:
        """Move every client's weight by factor·outwardsᵀ·inputs, its gradient being outwardsᵀ·inputs."""
        self.outwards = torch.cat([self.outwards, self.factor * outwards], dim=1)
        self.inputs = torch.cat([self.inputs, inputs], dim=1)

    def sum_of_steps(self, shares: Tensor, out: Tensor) -> None:
        """Write Σ w_i of what client i's steps have added to ``out``."""
        outwards = self.outwards[:, self.given :] * shares.view(-1, 1, 1)
        torch.mm(outwards.flatten(0, 1).t(), self.inputs[:, self.given :].flatten(0, 1), out=out)


class _LargeProduct(torch.autograd.Function):
    """A linear layer over all clients' rows that moves its weight by a step as soon as backward has passed it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: LargeWeight) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        return weight.times(inputs, backward=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (inputs,), weight = ctx.saved_tensors, ctx.weight
        inwards = weight.times(gradients[0], backward=True) if ctx.needs_input_grad[0] else None
        weight.step(gradients[0], inputs)
        return inwards, None


def large_product(rows: Tensor, weight: LargeWeight) -> Tensor:
    """Return each client's rows times its weight; backward takes the weight's step.

    The weight is not a tensor of autograd's: rows that need no gradient (a first layer's) are made to need one, or
    backward would never come by.
    """
    if not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    outputs: Tensor = _LargeProduct.apply(rows, weight)  # type: ignore[no-untyped-call]
    return outputs
