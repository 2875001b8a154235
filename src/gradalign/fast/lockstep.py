"""A few clients of a larger network in lockstep, each large linear weight stored once for all of them.

All clients of a round start from the same weight W, and after some steps on n examples a client's own weight is
W − α·GᵀX with n rows in G and X (see ``linear``). While n is small, nobody writes that out: a layer's outputs are
x·Wᵀ − α·(x·Xᵀ)·G, where the first product is one for all clients and the others are thin. The sum of the clients'
updates is one product of all their rows. Convolutions and small layers have their own weights for every client;
activations and pooling see all clients' examples as one batch.

A gradient at x is of the same form. So a displacement a·g_i − b·ḡ is one large matrix for everybody and thin factors
for each, which wait in the gradient cache between the two phases of a round.

Weight decay multiplies W and the rows so far, by factors that are stored beside them. Steps with momentum, clipping,
correction or pull are not of this form; they take the per-client path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.algorithms.view import Plan
from gradalign.client.exchange import Gradient, GradientCache, Update
from gradalign.client.flat import all_finite
from gradalign.client.trainer import Setup
from gradalign.fast.batches import Batches, Neighbours, client_losses, nonfinite_members, pad, plan_batches, take
from gradalign.fast.cohort import own_product
from gradalign.fast.linear import GradientFactors, LargeWeight, Own, is_large, large_product
from gradalign.fast.spectrum import convolve

TOGETHER = 5
MOST_EXAMPLES = 1000  # of a client: all are gathered, so they should be about as many as a round's steps take


class LockstepTrainer:
    """Trains small groups of clients of one task."""

    def __init__(self, setup: Setup, model: nn.Sequential) -> None:
        self.setup, self.local, self.layers = setup, setup.local, list(model)
        self.shapes = [p.shape for p in model.parameters()]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.large = [is_large(layer) and p.ndim == 2 for layer in model for p in layer.parameters()]
        self.dtype = next(model.parameters()).dtype
        # A thin product of n rows costs n(in + out), the whole one in·out.
        pairs = [shape for shape, large in zip(self.shapes, self.large, strict=True) if large]
        self.most_rows = min(a * b // (2 * (a + b)) for a, b in pairs)
        self.factors = GradientFactors(self.shapes, self.large)

    def fits(self, sizes: Sequence[int], *, with_gradients: bool) -> bool:
        """Return whether clients of these sizes add few enough rows to a large weight, with their gradient's or not."""
        rows = [self.local.steps_for(size) * self.local.batch_for(size) for size in sizes]
        if with_gradients:
            rows = [own + self.gradient_rows(size) for own, size in zip(rows, sizes, strict=True)]
        return max(rows) <= self.most_rows and max(sizes) <= MOST_EXAMPLES

    def gradient_rows(self, size: int) -> int:
        """Return how many rows the gradient of a client of this size has in a large weight's factors."""
        return min(size, self.local.gradient_examples or size)

    def gradients(self, group: Neighbours, cache: GradientCache | None) -> list[Gradient]:
        """Return Σ w_i ∇f_i(x), and put every client's own gradient into the cache, as factors."""
        inputs, targets, starts = self._gather(group)
        taken = group.gradient_rows(self.setup.seed)
        own = self._start(group.told.point.x, [None] * len(taken), factor=1.0)
        losses = self._backward(own, inputs, targets, *pad(taken, starts, self.dtype))
        found, counts = [one if isinstance(one, LargeWeight) else _taken(one) for one in own], [len(r) for r in taken]
        if cache is not None:
            for place, (one, rows) in enumerate(zip(group.who, counts, strict=True)):
                cache.put(one.client, *self.factors.parts(found, place, rows), rows=rows)
        total = group.sum
        losses += self._sum(found, group, total)
        return [group.gradient(total, losses, counts, [None] * len(counts))]

    def train(self, group: Neighbours, plans: Sequence[Plan]) -> list[Update]:
        """Execute every client's plan from the server's point and return Σ w_i Δ_i."""
        inputs, targets, starts = self._gather(group)
        batches = plan_batches(self.setup, group, starts, self.dtype)
        own = self._start(group.told.point.x, [plan.displaced(None) for plan in plans], factor=-group.told.lr)
        if group.gradients:
            own = self.factors.displace(own, group.along, group.gradients)
        before = [None if isinstance(one, LargeWeight) else one.clone() for one in own]
        losses = self._walk(own, inputs, targets, batches, group.told.lr)
        pairs = zip(own, before, strict=True)
        updates = [a if b is None or isinstance(a, LargeWeight) else a.detach() - b for a, b in pairs]
        total = group.sum
        losses += self._sum(updates, group, total)
        return [group.update(total, losses, batches, self.local)]

    def _gather(self, group: Neighbours) -> tuple[Tensor, Tensor, list[int]]:
        inputs, targets, starts = group.gathered(self.dtype)
        return _channels_innermost(inputs), targets, starts

    def _start(self, x: Tensor, displacements: Sequence[Tensor | None], *, factor: float) -> Own:
        """Return x + v_i of every client, parameter by parameter, a large weight once when nobody is displaced."""
        clients, displaced = len(displacements), any(v is not None for v in displacements)
        shifts = [None if v is None else v.split(self.sizes) for v in displacements]
        own: Own = []
        for place, (piece, shape) in enumerate(zip(x.split(self.sizes), self.shapes, strict=True)):
            if self.large[place] and not displaced:
                own.append(LargeWeight.at(piece.view(shape), clients, factor))
                continue
            stacked = piece.new_empty(clients, len(piece))
            for row, shift in zip(stacked, shifts, strict=True):
                row.copy_(piece) if shift is None else torch.add(piece, shift[place], out=row)
            values = stacked.view(-1, *shape)
            own.append(LargeWeight.at(values, clients, factor) if self.large[place] else _channels_innermost(values))
        return own

    def _walk(self, own: Own, inputs: Tensor, targets: Tensor, batches: Batches, lr: float) -> Tensor:
        """Take all steps, changing ``own``; return each client's summed loss."""
        total = torch.zeros(len(batches.steps), dtype=torch.float64)
        for rows, weights, active in zip(batches.rows, batches.weights, batches.active, strict=True):
            decays = self._decays(active, len(rows))
            for one in own:
                if isinstance(one, LargeWeight) and decays is not None:
                    one.shrink = 1 - lr * decays.unsqueeze(1)
            total += self._backward(own, inputs, targets, rows, weights)
            # A client that is done has examples of weight zero only, and so gradients of zero.
            for one in own:
                if isinstance(one, Tensor):
                    gradient = _taken(one)
                    if decays is not None:
                        gradient = gradient + one.detach() * decays.to(self.dtype).view(-1, *[1] * (one.ndim - 1))
                    one.detach().add_(gradient, alpha=-lr)
        return total

    def _decays(self, active: Tensor | None, clients: int) -> Tensor | None:
        """Return each client's weight decay in a step, in float64: none for those that are done."""
        if not self.local.weight_decay:
            return None
        stepping = torch.ones(clients) if active is None else active
        return self.local.weight_decay * stepping.double()

    def _backward(self, own: Own, inputs: Tensor, targets: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Leave the gradients of all clients' losses in ``own``; return the losses."""
        for one in own:
            if isinstance(one, Tensor):
                one.requires_grad_()
        with torch.enable_grad():
            outputs = self._outputs(own, inputs.index_select(0, rows.flatten()), len(rows))
            losses = client_losses(outputs, take(targets, rows), weights)
            losses.sum().backward()
        return losses.detach().double()

    def _outputs(self, own: Own, inputs: Tensor, clients: int) -> Tensor:
        """Return every client's outputs for its own batch: (client, example, class)."""
        left = iter(own)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                inputs = _convolutions(layer, inputs, next(left), next(left) if layer.bias is not None else None)
            elif isinstance(layer, nn.Linear):
                inputs = _linear(inputs, clients, next(left), next(left) if layer.bias is not None else None)
            else:
                inputs = layer(inputs)
        return inputs.view(clients, -1, inputs.shape[-1])

    def _sum(self, vectors: Own, group: Neighbours, out: Tensor) -> Tensor:
        """Write Σ w_i of the clients' vectors, or of what their steps have added to large weights.

        Return zero for every client, NaN for those whose vector is not finite.
        """
        shares = group.weights(self.dtype)
        for piece, shape, each in zip(out.split(self.sizes), self.shapes, vectors, strict=True):
            if isinstance(each, LargeWeight):
                each.sum_of_steps(shares, piece.view(shape))
            else:
                piece.view(shape).copy_(torch.tensordot(shares, each, dims=1))
        clean = torch.zeros(len(shares), dtype=torch.float64)
        if all_finite(out):
            return clean
        parts = [[each.grad_output, each.inputs] if isinstance(each, LargeWeight) else [each] for each in vectors]
        return clean.masked_fill(nonfinite_members([part for pair in parts for part in pair]), math.nan)


def _taken(leaf: Tensor) -> Tensor:
    """Return the gradient that backward has left in a leaf, and take it away."""
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    leaf.grad = None
    return gradient.detach()


def _convolutions(layer: nn.Conv2d, images: Tensor, weights: Any, biases: Any) -> Tensor:
    """Return each client's convolution of its own images."""
    parts = images.chunk(len(weights))
    own = zip(parts, weights, [None] * len(parts) if biases is None else biases, strict=True)
    return torch.cat([convolve(layer, part, weight, bias) for part, weight, bias in own])


def _linear(inputs: Tensor, clients: int, weights: Any, biases: Any) -> Tensor:
    """Return each client's linear map of its own rows, client after client."""
    rows: Tensor = inputs.view(clients, -1, inputs.shape[-1])
    if not isinstance(weights, LargeWeight):
        return own_product(rows, weights, biases).flatten(0, 1)
    outputs = large_product(inputs, weights)
    if biases is not None:
        outputs = (outputs.view(*rows.shape[:2], -1) + biases.unsqueeze(1)).flatten(0, 1)
    return outputs


def _channels_innermost(values: Tensor) -> Tensor:
    """Lay images, or every client's convolution weights, out with the channels innermost."""
    if values.ndim == 5:
        return values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return values.contiguous(memory_format=torch.channels_last) if values.ndim == 4 else values
