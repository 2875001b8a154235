"""Large linear layers: a weight's gradient stays the two thin matrices it is a product of, until the step is taken.

The gradient of a linear layer's weight is Gᵀ·X, with a row for each example of the batch in both. For a small batch and
a large weight, writing the product out and reading it again costs more than the arithmetic; ``W.addmm_(Gᵀ, X)`` does
neither. ``ProductLinear`` does so for one client, ``LargeWeight`` for several that started from the same weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from gradalign.client.exchange import CachedGradient
from gradalign.client.step import FactoredGradients, Factors
from gradalign.fast.stacks import has_hooks, is_hooked, is_plain_stack

LARGE = 2**17  # numbers in a weight: smaller ones stay in the processor's cache


def is_large(layer: nn.Module) -> bool:
    """Return whether a layer's weight is so large that reading it costs more than the arithmetic with few rows."""
    return isinstance(layer, nn.Linear) and layer.weight.numel() >= LARGE


class _Product(torch.autograd.Function):
    """A linear layer that hands (G, X) to ``recorded`` instead of giving the weight a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, recorded: Factors) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.recorded = recorded
        return F.linear(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        grad_output = gradients[0]
        rows = grad_output.reshape(-1, weight.shape[0])
        ctx.recorded.append((rows, inputs.reshape(-1, weight.shape[1])))
        needs_inputs, _, needs_bias, _ = ctx.needs_input_grad
        return grad_output @ weight if needs_inputs else None, None, rows.sum(0) if needs_bias else None, None


class ProductLinear(nn.Linear):
    """A linear layer that leaves its weight's gradient as factors while ``recorded`` is a list."""

    recorded: Factors | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.recorded is None or not torch.is_grad_enabled():
            return F.linear(inputs, self.weight, self.bias)
        outputs: Tensor = _Product.apply(inputs, self.weight, self.bias, self.recorded)  # type: ignore[no-untyped-call]
        return outputs


def record_factors(module: nn.Module) -> FactoredGradients:
    """Make the large linear layers of a plain stack of torch's own layers leave gradients as factors, in place.

    In such a stack nothing but backward can ask for a weight's gradient, and each weight is used once. Other models are
    left as they are: a model that differentiates itself, or a hook on a layer or a weight, would miss the gradient.
    """
    parts = list(module.modules())
    own = all(type(part).__module__.startswith("torch.nn.") and not is_hooked(part) for part in parts)
    if not own or not is_plain_stack(module):
        return FactoredGradients()
    stacked = [layer for stack in parts if is_plain_stack(stack) for layer in stack.children()]
    names = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    for part in stacked:
        if type(part) is nn.Linear and is_large(part):
            weight = part.weight
            if weight.requires_grad and names.count(id(weight)) == 1 and not has_hooks(weight):
                part.__class__ = ProductLinear
    return FactoredGradients([part for part in parts if isinstance(part, ProductLinear)])


class LargeWeight:
    """W_i = s_i·start + Σ_n s_in·O_inᵀ·X_in of every client i; ``start`` is one matrix for all, or one for each.

    s_i and s_in are what weight decay has left of the start and of each row n, in float64: 1 − lr·decay of a single
    step may be no number of the weight's precision. Without decay they are 1 and not stored.

    Args:
        start: (out, in) or (client, out, in).
        grad_output: O, (client, row, out): what the clients have added before their first step.
        inputs: X, (client, row, in).
        factor: What a step multiplies the gradient with, −lr.
    """

    def __init__(self, start: Tensor, grad_output: Tensor, inputs: Tensor, factor: float) -> None:
        self.start, self.grad_output, self.inputs, self.factor = start, grad_output, inputs, factor
        self.given = grad_output.shape[1]
        self.remaining: Tensor | None = None
        """(client, 1 + row): s_i, then every s_in."""
        self.shrink: Tensor | None = None
        """What the next step leaves of each client's weight, 1 − lr·decay: (client, 1), in float64; None for all."""

    @classmethod
    def at(cls, start: Tensor, clients: int, factor: float) -> LargeWeight:
        out_features, in_features = start.shape[-2:]
        return cls(start, start.new_empty(clients, 0, out_features), start.new_empty(clients, 0, in_features), factor)

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
        if self.remaining is not None:
            self.by_client(product).mul_(self.remaining[:, :1].unsqueeze(2).to(product.dtype))
        if self.inputs.shape[1]:
            first, second = (self.grad_output, self.inputs) if backward else (self.inputs, self.grad_output)
            self.by_client(product).baddbmm_(self._decayed(torch.bmm(each, first.mT)), second)
        return product

    def _decayed(self, by_row: Tensor) -> Tensor:
        """Return numbers (client, …, row) times what decay has left of each row."""
        return by_row if self.remaining is None else by_row * self.remaining[:, None, 1:].to(by_row.dtype)

    def step(self, grad_output: Tensor, inputs: Tensor) -> None:
        """Move every client's weight by factor·Gᵀ·X after decay, its gradient being Gᵀ·X."""
        more = self.by_client(self.factor * grad_output)
        if self.shrink is not None:
            clients, rows = self.grad_output.shape[:2]
            left = self.shrink.new_ones(clients, 1 + rows) if self.remaining is None else self.remaining
            self.remaining = torch.cat([left * self.shrink, left.new_ones(clients, more.shape[1])], dim=1)
        self.grad_output = torch.cat([self.grad_output, more], dim=1)
        self.inputs = torch.cat([self.inputs, self.by_client(inputs)], dim=1)

    def sum_of_steps(self, shares: Tensor, out: Tensor) -> None:
        """Write Σ w_i of what client i's steps have added to ``out``: W_i at the end less what it was at first."""
        if self.remaining is None:
            grad_output = self.grad_output[:, self.given :] * shares.view(-1, 1, 1)
            torch.mm(grad_output.flatten(0, 1).t(), self.inputs[:, self.given :].flatten(0, 1), out=out)
            return
        # Of the start and of what was given, decay has taken some away; of the steps, it has left some.
        factors = self.remaining.clone()
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


Own = list[Tensor | LargeWeight]
"""Every parameter of all clients: (client, ...) or a large weight."""


class GradientFactors:
    """How a gradient lies in one flat vector: each parameter in turn, a large weight as its rows G, then X."""

    def __init__(self, shapes: Sequence[torch.Size], large: Sequence[bool]) -> None:
        self.shapes, self.large = shapes, large

    def _sizes(self, rows: int) -> list[int]:
        return [rows * sum(s) if big else s.numel() for s, big in zip(self.shapes, self.large, strict=True)]

    def length(self, rows: int) -> int:
        return sum(self._sizes(rows))

    def parts(self, gradients: Own, client: int, rows: int) -> Iterator[Tensor]:
        """Yield what a client's gradient is made of, one after the other; it has so many rows in the factors."""
        for each in gradients:
            if isinstance(each, LargeWeight):
                yield each.grad_output[client, :rows]
                yield each.inputs[client, :rows]
            else:
                yield each[client]

    def _read(self, gradient: CachedGradient) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield a gradient's parts: a parameter's, or the views (rows, out) and (rows, in) of a large weight."""
        rows = gradient.rows or 0
        for part, shape, large in zip(gradient.vector.split(self._sizes(rows)), self.shapes, self.large, strict=True):
            if large:
                first, second = part.split([rows * features for features in shape])
                yield first.view(rows, shape[0]), second.view(rows, shape[1])
            else:
                yield part.view(shape)

    def dense(self, gradient: CachedGradient) -> Tensor:
        """Return the gradient itself."""
        parts = [part[0].t() @ part[1] if isinstance(part, tuple) else part for part in self._read(gradient)]
        return torch.cat([part.reshape(-1) for part in parts])

    def displace(self, own: Own, along: float, gradients: Sequence[CachedGradient]) -> Own:
        """Return the clients' parameters moved by ``along`` times their gradients."""
        moved: Own = []
        for each, *parts in zip(own, *[self._read(gradient) for gradient in gradients], strict=True):
            if isinstance(each, LargeWeight):
                # (client, row, feature), short clients filled up with rows of zeros.
                grad_output, inputs = (pad_sequence(list(side), batch_first=True) for side in zip(*parts, strict=True))
                moved.append(LargeWeight(each.start, grad_output.mul_(along), inputs, each.factor))
            else:
                for value, part in zip(each, parts, strict=True):
                    value.add_(part, alpha=along)
                moved.append(each)
        return moved
