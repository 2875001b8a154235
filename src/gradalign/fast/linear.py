"""Large linear layers: keep a weight's gradient as the two thin matrices it is a product of, until the step is taken.

The gradient of a linear layer's weight is Gᵀ·X, with a row for each example of the batch in both. For a small batch and
a large weight, writing the product out and reading it again costs more than the arithmetic; ``W.addmm_(Gᵀ, X)`` does
neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradalign.fast.stacks import is_hooked, is_plain_stack

LARGE = 2**17  # numbers in a weight: smaller ones stay in the processor's cache


class _Product(torch.autograd.Function):
    """A linear layer that hands (G, X) to ``kept`` instead of giving the weight a gradient."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.kept = kept
        return F.linear(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        grad_output = gradients[0]
        rows = grad_output.reshape(-1, weight.shape[0])
        ctx.kept.append((rows, inputs.reshape(-1, weight.shape[1])))
        needs_inputs, _, needs_bias, _ = ctx.needs_input_grad
        return grad_output @ weight if needs_inputs else None, None, rows.sum(0) if needs_bias else None, None


class ProductLinear(nn.Linear):
    """A linear layer that keeps its weight's gradient as a product while ``kept`` is a list."""

    kept: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return W·x + b for every row."""
        if self.kept is None or not torch.is_grad_enabled():
            return F.linear(inputs, self.weight, self.bias)
        outputs: Tensor = _Product.apply(inputs, self.weight, self.bias, self.kept)  # type: ignore[no-untyped-call]
        return outputs


def keep_products(module: nn.Module) -> None:
    """Make the large linear layers of a plain stack of torch's own layers keep products, in place.

    In such a stack nothing but backward can ask for a weight's gradient, and each weight is used once. Other models are
    left as they are: a model that differentiates itself, or a hook on a layer or a weight, would miss the gradient.
    """
    parts = list(module.modules())
    own = all(type(part).__module__.startswith("torch.nn.") and not is_hooked(part) for part in parts)
    if not own or not is_plain_stack(module):
        return
    stacked = [layer for stack in parts if is_plain_stack(stack) for layer in stack.children()]
    names = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    for part in stacked:
        if type(part) is nn.Linear and part.weight.numel() >= LARGE and part.weight.requires_grad:
            used_once = names.count(id(part.weight)) == 1
            if used_once and not has_hooks(part.weight):
                part.__class__ = ProductLinear


def has_hooks(parameter: Tensor) -> bool:
    """Return whether somebody watches the parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Products:
    """The products of all layers of a model that keep them; empty for other models."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = {id(part.weight): part for part in module.modules() if isinstance(part, ProductLinear)}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep products inside the block."""
        for layer in self._layers.values():
            layer.kept = []
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.kept = None

    def take(self, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the products kept for a weight since the last time."""
        layer = self._layers.get(id(weight))
        if layer is None or not layer.kept:
            return []
        kept, layer.kept = layer.kept, []
        return kept
