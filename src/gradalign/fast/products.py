"""Linear layers and losses of many clients at once, each with a backward of its own: fewer passes than autograd's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def own_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return each client's linear map of its own rows: (client, row, in), (client, out, in), (client, out)."""
    return inputs @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)


class _SharedProduct(torch.autograd.Function):
    """From rows, client after client, to rows: a result of its own, which may be changed in place."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, clients: int, found: list[Tensor], needed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.biased, ctx.clients, ctx.found, ctx.needs_grad_input = bias is not None, clients, found, needed
        return F.linear(rows, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (rows, weight), grad_output = ctx.saved_tensors, gradients[0]
        own_rows, own_outputs = (each.reshape(ctx.clients, -1, each.shape[-1]) for each in (rows, grad_output))
        if ctx.biased:
            ctx.found.append(own_outputs.sum(dim=1))
        ctx.found.append(torch.bmm(own_outputs.mT, own_rows))
        return grad_output @ weight if ctx.needs_grad_input else None, None, None, None, None, None


def shared_product(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, found: list[Tensor]) -> Tensor:
    """Return the linear map of all clients' rows (client, row, in) by one weight and bias.

    Backward appends each client's own gradient of the bias, then of the weight, to ``found``: from the last layer to
    the first.
    """
    wanted = inputs.requires_grad
    inputs = inputs if wanted else inputs.detach().requires_grad_()  # or backward would not come by the first layer
    rows, clients = inputs.flatten(0, 1), len(inputs)
    outputs: Tensor = _SharedProduct.apply(rows, weight, bias, clients, found, wanted)  # type: ignore[no-untyped-call]
    return outputs.view(clients, -1, outputs.shape[-1])


class _SteppingProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, lr: float, decay: float, needs_grad_input: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.bias, ctx.needs_grad_input = weight, bias, needs_grad_input
        ctx.lr, ctx.decay = lr, decay
        return own_product(inputs, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (inputs,), grad_output = ctx.saved_tensors, gradients[0]
        grad_input = torch.bmm(grad_output, ctx.weight) if ctx.needs_grad_input else None
        if ctx.decay:  # added to the gradient: 1 − lr·decay may round to 1
            gradient = torch.baddbmm(ctx.weight, grad_output.mT, inputs, beta=ctx.decay)
            ctx.weight.sub_(gradient, alpha=ctx.lr)
        else:
            ctx.weight.baddbmm_(grad_output.mT, inputs, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.sub_(grad_output.sum(dim=1).add_(ctx.bias, alpha=ctx.decay), alpha=ctx.lr)
        return grad_input, None, None, None, None, None


def stepping_product(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, lr: float, decay: float = 0.0) -> Tensor:
    """Return ``own_product``; backward, which is to come by once, takes a step of SGD with weight and bias."""
    wanted = inputs.requires_grad
    inputs = inputs if wanted else inputs.detach().requires_grad_()  # or backward would not come by the first layer
    outputs: Tensor = _SteppingProduct.apply(inputs, weight, bias, lr, decay, wanted)  # type: ignore[no-untyped-call]
    return outputs


class _CrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logarithms, places = torch.log_softmax(outputs, dim=2), targets.unsqueeze(2)
        each = logarithms.gather(2, places).squeeze(2)
        ctx.save_for_backward(logarithms, places, weights)
        return each.mean(dim=1).neg_() if weights is None else each.mul_(weights).sum(dim=1).neg_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logarithms, places, weights = ctx.saved_tensors
        factors = gradients[0].unsqueeze(1) * (1 / places.shape[1] if weights is None else weights)
        grad_output = logarithms.exp()  # the gradient of −log p is p − 1 where the target is, p elsewhere
        grad_output.scatter_add_(2, places, grad_output.new_full((1, 1, 1), -1.0).expand(places.shape))
        return grad_output.mul_(factors.unsqueeze(2)), None, None


def cross_entropies(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return each client's sum of its examples' cross-entropies times ``weights``, their mean when None.

    Outputs are (client, example, class); every target must be a class.
    """
    losses: Tensor = _CrossEntropies.apply(outputs, targets, weights)  # type: ignore[no-untyped-call]
    return losses
