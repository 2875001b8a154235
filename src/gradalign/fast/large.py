"""A large linear weight of several clients at once: one start, and thin factors of what each client has added to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LargeWeight:
    """W_i = s_i·start + Σ_n s_in·O_inᵀ·X_in of every client i; ``start`` is one matrix for all, or one for each.

    s_i and s_in are what weight decay has left of the start and of each row n, in float64: 1 − lr·decay of a single
    step may be no number of the weight's precision. Without decay they are 1 and not kept.

    Args:
        start: (out, in) or (client, out, in).
        grad_output: O, (client, row, out): what the clients have added before their first step.
        inputs: X, (client, row, in).
        factor: What a step multiplies the gradient with, −lr.
    """

    def __init__(self, start: Tensor, grad_output: Tensor, inputs: Tensor, factor: float) -> None:
        self.start, self.grad_output, self.inputs, self.factor = start, grad_output, inputs, factor
        self.given = grad_output.shape[1]
        self.left: Tensor | None = None
        """(client, 1 + row): s_i, then every s_in."""
        self.keep: Tensor | None = None
        """What the next step leaves of each client's weight, 1 − lr·decay: (client, 1), in float64; None for all."""

    @classmethod
    def at(cls, start: Tensor, clients: int, factor: float) -> LargeWeight:
        """Return the weight of clients that have added nothing."""
        out, into = start.shape[-2:]
        return cls(start, start.new_empty(clients, 0, out), start.new_empty(clients, 0, into), factor)

    def by_client(self, rows: Tensor) -> Tensor:
        """Return rows, client after client, as (client, example, feature)."""
        return rows.view(len(self.inputs), -1, rows.shape[-1])

    def times(self, rows: Tensor, *, backward: bool) -> Tensor:
        """Return rows·Wᵀ, or rows·W when going backward; rows are the clients' examples, client after client."""
        start = self.start if backward else self.start.mT
        product, each = rows.new_empty(len(rows), start.shape[-1]), self.by_client(rows)
        if start.ndim == 2:
            torch.mm(rows, start, out=product)
        else:
            torch.bmm(each, start, out=self.by_client(product))
        if self.left is not None:
            self.by_client(product).mul_(self.left[:, :1].unsqueeze(2).to(product.dtype))
        if self.inputs.shape[1]:
            first, second = (self.grad_output, self.inputs) if backward else (self.inputs, self.grad_output)
            self.by_client(product).baddbmm_(self._decayed(torch.bmm(each, first.mT)), second)
        return product

    def _decayed(self, by_row: Tensor) -> Tensor:
        """Return numbers (client, …, row) times what decay has left of each row."""
        return by_row if self.left is None else by_row * self.left[:, None, 1:].to(by_row.dtype)

    def step(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Move every client's weight by factor·outwardsᵀ·inputs, its gradient being outwardsᵀ·inputs, after decay."""
        more = self.by_client(self.factor * grad_output)
        if self.keep is not None:
            clients, rows = self.grad_output.shape[:2]
            left = self.keep.new_ones(clients, 1 + rows) if self.left is None else self.left
            self.left = torch.cat([left * self.keep, left.new_ones(clients, more.shape[1])], dim=1)
        self.grad_output = torch.cat([self.grad_output, more], dim=1)
        self.inputs = torch.cat([self.inputs, self.by_client(inputs)], dim=1)

    def sum_of_steps(self, shares: Tensor, out: Tensor) -> None:
        """Write Σ w_i of what client i's steps have added to ``out``: W_i at the end less what it was at first."""
        if self.left is None:
            grad_output = self.grad_output[:, self.given :] * shares.view(-1, 1, 1)
            torch.mm(grad_output.flatten(0, 1).t(), self.inputs[:, self.given :].flatten(0, 1), out=out)
            return
        # Of the start and of what was given, decay has taken some away; of the steps, it has left some.
        factors = self.left.clone()
        factors[:, : 1 + self.given] -= 1
        factors *= shares.double().unsqueeze(1)
        grad_output = self.grad_output * factors[:, 1:].unsqueeze(2).to(out.dtype)
        torch.mm(grad_output.flatten(0, 1).t(), self.inputs.flatten(0, 1), out=out)
        if self.start.ndim == 2:
            out.add_(self.start, alpha=float(factors[:, 0].sum()))
        else:
            out.add_(torch.tensordot(factors[:, 0].to(out.dtype), self.start, dims=1))


class _LargeProduct(torch.autograd.Function):
    """A linear layer over all clients' rows that moves its weight by a step as soon as backward has passed it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: LargeWeight, needs_grad_input: bool) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.needs_grad_input = weight, needs_grad_input
        return weight.times(inputs, backward=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (inputs,), weight, grad_output = ctx.saved_tensors, ctx.weight, gradients[0].contiguous()
        grad_input = weight.times(grad_output, backward=True) if ctx.needs_grad_input else None
        weight.step(grad_output, inputs)
        return grad_input, None, None


def large_product(rows: Tensor, weight: LargeWeight) -> Tensor:
    """Return each client's rows times its weight, client after client; backward takes the weight's step.

    The weight is not a tensor of autograd's: rows that need no gradient (a first layer's) are made to need one, or
    backward would never come by.
    """
    wanted = rows.requires_grad
    rows = rows if wanted else rows.detach().requires_grad_()
    outputs: Tensor = _LargeProduct.apply(rows, weight, wanted)  # type: ignore[no-untyped-call]
    return outputs
