"""Many clients of a small model at once, as batched matrix products.

For a network of a few thousand parameters the time of a step is Python's, not the arithmetic's. So a *cohort* of
clients is trained together: every parameter gets a leading client axis, a linear layer becomes one ``baddbmm``,
and each client still takes its own steps from its own start on its own batches. The result is the per-client
loop's up to rounding. Linear layers have a backward of their own: fewer passes than autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradalign.algorithms.view import Plan
from gradalign.client.exchange import Broadcast, Gradient, GradientCache, Update
from gradalign.client.flat import all_finite
from gradalign.client.step import set_out
from gradalign.client.trainer import Setup
from gradalign.fast.batches import Batches, Neighbours, client_losses, nonfinite_members, pad, plan_batches, take

COHORT = 25
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""How a linear layer is applied: inputs, weight and bias of all clients."""


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


class CohortTrainer:
    """Trains cohorts of clients of one task."""

    def __init__(self, setup: Setup, layers: list[nn.Module]) -> None:
        self.setup, self.local, self.layers = setup, setup.local, layers
        self.shapes = [p.shape for layer in layers for p in layer.parameters()]
        self.dtype = next(p.dtype for layer in layers for p in layer.parameters())

    # A cohort's vectors are stored parameter by parameter: all clients' first weights, then all clients' first biases,
    # so that one matrix product sees one contiguous block and element-wise arithmetic one contiguous vector.

    def _blocks(self, stored: Tensor, clients: int) -> list[Tensor]:
        parts = stored.split([clients * shape.numel() for shape in self.shapes])
        return [part.view(clients, *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _store(self, rows: Tensor) -> Tensor:
        """Bring one row per client into the stored order."""
        pieces = rows.to(self.dtype).split([shape.numel() for shape in self.shapes], dim=1)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def _given(self, vectors: list[Tensor | None], like: Tensor) -> Tensor | None:
        """Bring what plans give for each client (None: zero) into the stored order."""
        if all(vector is None for vector in vectors):
            return None
        return self._store(torch.stack([torch.zeros_like(like) if vector is None else vector for vector in vectors]))

    def _unstore(self, stored: Tensor, clients: int) -> Tensor:
        """Return one row per client."""
        return torch.cat([block.reshape(clients, -1) for block in self._blocks(stored, clients)], dim=1)

    def _outputs(self, parameters: Sequence[Tensor], inputs: Tensor, product: Product = own_product) -> Tensor:
        """Return every client's outputs for its own batch: (client, example, class)."""
        left = iter(parameters)
        for layer in self.layers:
            if type(layer) is nn.Linear:
                inputs = product(inputs, next(left), next(left) if layer.bias is not None else None)
            elif type(layer) is nn.Flatten:
                inputs = inputs.flatten(2)
            else:
                inputs = layer(inputs)
        return inputs

    def gradients(self, group: Neighbours, cache: GradientCache | None) -> list[Gradient]:
        """Return ∇f_i(x) of whole clients, or of the first examples that their local steps will see."""
        inputs, targets, starts = group.gathered(self.dtype)
        taken, found = group.gradient_rows(self.setup.seed), list[Tensor]()
        rows, weights = pad(taken, starts, self.dtype)
        labels = take(targets, rows)
        with torch.enable_grad():
            shared = [block[0] for block in self._blocks(group.told.point.x.to(self.dtype), 1)]
            outputs = self._outputs(shared, take(inputs, rows), partial(shared_product, found=found))
            losses = client_losses(outputs, labels, weights)
            losses.sum().backward()
        vectors, losses = torch.cat([each.flatten(1) for each in reversed(found)], dim=1), losses.detach().double()
        right = (outputs.detach().argmax(dim=2) == labels).double()
        accuracies = (right.mean(dim=1) if weights is None else (right * weights).sum(dim=1)).tolist()
        counts = [len(own) for own in taken]
        if cache is not None:
            cache.put_all([one.client for one in group.who], vectors)
        if group.told.one_by_one:
            each = _written(list(vectors), group.out)
            return [group.gradient(v, losses, counts, accuracies, slice(i, i + 1)) for i, v in enumerate(each)]
        total = torch.mv(vectors.T, group.weights(self.dtype), out=group.sum)
        if not all_finite(total):
            losses = losses.masked_fill(nonfinite_members([vectors]), math.nan)
        return [group.gradient(total, losses, counts, accuracies)]

    def train(self, group: Neighbours, plans: Sequence[Plan]) -> list[Update]:
        """Execute every client's plan from the server's point; same arithmetic as ``ClientTrainer.train``."""
        if group.gradients:
            displacements = group.along * torch.stack([own.vector for own in group.gradients])
            plans = [Plan(displacement=own) for own in displacements]
        inputs, targets, starts = group.gathered(self.dtype)
        batches = plan_batches(self.setup, group, starts, self.dtype)
        with torch.enable_grad():
            stored, start, losses = self._walk(group.told, plans, inputs, targets, batches)
        stored, count = stored.sub_(start), len(plans)
        if group.told.one_by_one:
            rows = _written(list(self._unstore(stored, count)), group.out)
            return [group.update(row, losses, batches, self.local, slice(i, i + 1)) for i, row in enumerate(rows)]
        blocks, shares, total = self._blocks(stored, count), group.weights(self.dtype), group.sum
        torch.cat([shares @ block.view(count, -1) for block in blocks], out=total)
        if not all_finite(total):
            losses = losses.masked_fill(nonfinite_members(blocks), math.nan)
        return [group.update(total, losses, batches, self.local)]

    def _walk(
        self, told: Broadcast, plans: Sequence[Plan], inputs: Tensor, targets: Tensor, batches: Batches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take all steps; return the end, the start (both stored) and each client's summed loss."""
        count, local, lr, x = len(plans), self.local, told.lr, told.point.x
        y = self._store(x.expand(count, -1))
        displacement = self._given([plan.displaced(None) for plan in plans], x)
        correction = self._given([plan.correction for plan in plans], x)
        z, constant, shift = set_out(y, plans[0], displacement, correction)  # all are alike but for the vectors
        start = z.clone()
        together = local.weight_decay == 0 or all(active is None for active in batches.active)
        if together and constant is None and shift is None and not (local.momentum or local.clip_norm):
            return z, start, self._walk_bare(z, count, inputs, targets, batches, lr)
        direction, decay = torch.zeros_like(y), local.weight_decay + plans[0].pull
        leaves = [block.detach().requires_grad_() for block in self._blocks(y, count)]
        for leaf, view in zip(leaves, self._blocks(direction, count), strict=True):
            leaf.grad = view
        velocity: Tensor | None = None
        total = torch.zeros(count, dtype=torch.float64)
        for rows, weights, active in zip(batches.rows, batches.weights, batches.active, strict=True):
            if shift is not None:
                torch.add(z, shift, out=y)
            losses = client_losses(self._outputs(leaves, take(inputs, rows)), take(targets, rows), weights)
            self._fill(direction, losses, y, constant, decay)
            total += losses.detach()
            if local.momentum:
                velocity = direction.clone() if velocity is None else velocity.mul_(local.momentum).add_(direction)
            move = direction if velocity is None else velocity
            z.add_(move if active is None else self._scaled(move.clone(), active), alpha=-lr)
        return z, start, total

    def _walk_bare(self, z: Tensor, count: int, inputs: Tensor, targets: Tensor, batches: Batches, lr: float) -> Tensor:
        """Take all steps when a step is just z ← z − lr·(∇f(z) + decay·z), moving ``z``; return the summed losses."""
        parameters, product = self._blocks(z, count), partial(stepping_product, lr=lr, decay=self.local.weight_decay)
        total = torch.zeros(count, dtype=torch.float64)
        for rows, weights in zip(batches.rows, batches.weights, strict=True):
            outputs = self._outputs(parameters, take(inputs, rows), product)
            losses = client_losses(outputs, take(targets, rows), weights)
            # A client that is done has examples of weight zero only, and so gradients of zero.
            losses.sum().backward()
            total += losses.detach()
        return total

    def _scaled(self, stored: Tensor, factors: Tensor) -> Tensor:
        """Multiply every client's part of a stored vector by a number, in place."""
        for block in self._blocks(stored, len(factors)):
            block.mul_(factors.view(-1, *[1] * (block.ndim - 1)))
        return stored

    def _fill(self, direction: Tensor, losses: Tensor, y: Tensor, constant: Tensor | None, decay: float) -> None:
        """Fill ``direction`` with ∇f_i(y_i) + decay·y_i + constant_i of every client, by backward from the losses."""
        clip = self.local.clip_norm
        if clip is None:
            torch.mul(y, decay, out=direction)
            if constant is not None:
                direction.add_(constant)
            losses.sum().backward()
        else:
            direction.zero_()
            losses.sum().backward()
            norms = torch.linalg.vector_norm(self._unstore(direction, len(losses)), dim=1)
            self._scaled(direction, (clip / norms).clamp(max=1.0))
            direction.add_(y, alpha=decay)
            if constant is not None:
                direction.add_(constant)


def _written(vectors: list[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the vectors, in these places when there are any."""
    return vectors if out is None else [row.copy_(own) for row, own in zip(out, vectors, strict=False)]
