"""A few clients of a larger network in lockstep, each large linear weight kept once for all of them.

All clients of a round start from the same weight W, and after some steps on n examples a client's own weight is
W − α·GᵀX with n rows in G and X (see ``outer``). While n is small, nobody writes that out: a layer's outputs are
x·Wᵀ − α·(x·Xᵀ)·G, where the first product is one for all clients and the others are thin. The sum of the clients'
updates is one product of all their rows. Convolutions and small layers have their own weights for every client;
activations and pooling see all clients' examples as one batch.

Only steps without momentum, decay, clipping, correction or pull are of this form; others take the per-client path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradalign.cohort.batches import Batches, client_losses, gather, plan_batches
from gradalign.flat import Point
from gradalign.outer import LARGE
from gradalign.plan import Plan
from gradalign.replies import GroupUpdate
from gradalign.tasks.data import TensorExamples
from gradalign.training import LocalTraining

TOGETHER = 5
MOST_EXAMPLES = 1000  # of a client: all are gathered, so they should be about as many as a round's steps take


class _LargeWeight:
    """The server's weight (or each client's own start) and the thin factors of what the clients have added to it."""

    def __init__(self, start: Tensor, clients: int, lr: float) -> None:
        self.start, self.lr = start, lr
        self.outwards, self.inputs = (start.new_empty(clients, 0, width) for width in start.shape[-2:])

    def times(self, rows: Tensor, *, backward: bool) -> Tensor:
        """Return rows·Wᵀ for every client, or rows·W when going backward; rows are (client, example, feature)."""
        clients, examples, _ = rows.shape
        start = self.start if backward else self.start.mT
        shared = start.ndim == 2
        product = (rows.flatten(0, 1) @ start).view(clients, examples, -1) if shared else torch.bmm(rows, start)
        if self.inputs.shape[1]:
            first, second = (self.outwards, self.inputs) if backward else (self.inputs, self.outwards)
            product.baddbmm_(torch.bmm(rows, first.mT), second, alpha=-self.lr)
        return product

    def step(self, outwards: Tensor, inputs: Tensor) -> None:
        """Move every client's weight by −lr·outwardsᵀ·inputs."""
        self.inputs = torch.cat([self.inputs, inputs], dim=1)
        self.outwards = torch.cat([self.outwards, outwards], dim=1)

    def sum_of_changes(self, shares: Tensor, out: Tensor) -> None:
        """Write Σ w_i (W_i − start) to ``out``."""
        scaled = self.outwards * (-self.lr * shares).view(-1, 1, 1)
        torch.mm(scaled.flatten(0, 1).t(), self.inputs.flatten(0, 1), out=out)


class _LargeProduct(torch.autograd.Function):
    """A linear layer over all clients' rows that moves its weight by a step as soon as backward has passed it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: _LargeWeight) -> Tensor:
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


class LockstepTrainer:
    """Trains small groups of clients of one task."""

    def __init__(self, local: LocalTraining, seed: int, model: nn.Sequential) -> None:
        self.local, self.seed, self.layers = local, seed, list(model)
        self.shapes = [p.shape for p in model.parameters()]
        self.large = [_is_large(layer) and p.ndim == 2 for layer in model for p in layer.parameters()]
        self.dtype = next(model.parameters()).dtype
        self.plain = not local.momentum and not local.weight_decay and local.clip_norm is None
        # A thin product of n rows costs n(in + out), the whole one in·out.
        pairs = [shape for shape, large in zip(self.shapes, self.large, strict=True) if large]
        self.most_rows = min(a * b // (2 * (a + b)) for a, b in pairs)

    def takes(self, plans: Sequence[Plan], examples: Sequence[TensorExamples]) -> bool:
        """Return whether these clients can and should train in this way."""
        plain = self.plain and not any(plan.pull or plan.correction is not None for plan in plans)
        sizes = [len(one) for one in examples]
        most = max(self.local.steps_for(size) * self.local.batch_for(size) for size in sizes)
        return plain and most <= self.most_rows and max(sizes) <= MOST_EXAMPLES

    def train_sum(
        self,
        point: Point,
        plans: Sequence[Plan],
        examples: Sequence[TensorExamples],
        clients: Sequence[int],
        weights: Sequence[float],
        *,
        round_index: int,
        lr: float,
        out: Tensor,
    ) -> GroupUpdate:
        """Execute every client's plan from the server's point; write Σ w_i Δ_i to ``out``."""
        inputs, targets, starts = gather(examples, self.dtype)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        sizes = [len(one) for one in examples]
        batches = plan_batches(self.local, self.seed, sizes, starts, clients, round_index=round_index, dtype=self.dtype)
        own = self._start(point.x, [plan.displacement for plan in plans], lr)
        before = [None if isinstance(one, _LargeWeight) else one.clone() for one in own]
        total = torch.zeros(len(clients), dtype=torch.float64)
        for losses in self._steps(own, inputs, targets, batches, lr):
            total += losses
        self._sum(own, before, torch.tensor(weights, dtype=self.dtype), out)
        return GroupUpdate(
            update=out,
            floats=torch.empty(0, dtype=self.dtype),
            ints=torch.empty(0, dtype=torch.int64),
            weights=list(weights),
            losses=[loss / steps for loss, steps in zip(total.tolist(), batches.steps, strict=True)],
            steps=sum(batches.steps),
            examples=sum(batches.seen),
        )

    def _start(self, x: Tensor, displacements: list[Tensor | None], lr: float) -> list[Tensor | _LargeWeight]:
        """Return x + v_i of every client, parameter by parameter, a large weight once when nobody is displaced."""
        sizes = [shape.numel() for shape in self.shapes]
        shifts = [[None] * len(sizes) if v is None else v.split(sizes) for v in displacements]
        displaced = any(v is not None for v in displacements)
        own: list[Tensor | _LargeWeight] = []
        for place, (piece, shape) in enumerate(zip(x.split(sizes), self.shapes, strict=True)):
            if self.large[place] and not displaced:
                own.append(_LargeWeight(piece.view(shape), len(displacements), lr))
                continue
            stacked = piece.repeat(len(displacements), 1)
            for row, shift in zip(stacked, shifts, strict=True):
                if shift[place] is not None:
                    row.add_(shift[place])
            values = stacked.view(-1, *shape)
            own.append(_LargeWeight(values, len(values), lr) if self.large[place] else _images_innermost(values))
        return own

    def _steps(
        self, own: list[Tensor | _LargeWeight], inputs: Tensor, targets: Tensor, batches: Batches, lr: float
    ) -> Iterator[Tensor]:
        """Take all steps, changing ``own``; yield each step's losses."""
        leaves = [one.requires_grad_() for one in own if isinstance(one, Tensor)]
        for rows, weights in zip(batches.rows, batches.weights, strict=True):
            with torch.enable_grad():
                outputs = self._outputs(own, inputs.index_select(0, rows.flatten()), len(rows))
                losses = client_losses(outputs, targets[rows], weights)
                losses.sum().backward()
            # A client that is done has examples of weight zero only, and so gradients of zero.
            with torch.no_grad():
                for leaf in leaves:
                    if leaf.grad is not None:
                        leaf.add_(leaf.grad, alpha=-lr)
                        leaf.grad = None
            yield losses.detach().double()

    def _outputs(self, own: list[Tensor | _LargeWeight], inputs: Tensor, clients: int) -> Tensor:
        """Return every client's outputs for its own batch: (client, example, class)."""
        left = iter(own)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                inputs = _convolutions(layer, inputs, next(left), next(left) if layer.bias is not None else None)
            elif isinstance(layer, nn.Linear):
                rows = inputs.view(clients, -1, inputs.shape[-1])
                inputs = _linear(rows, next(left), next(left) if layer.bias is not None else None).flatten(0, 1)
            else:
                inputs = layer(inputs)
        return inputs.view(clients, -1, inputs.shape[-1])

    def _sum(self, own: list[Tensor | _LargeWeight], before: list[Tensor | None], shares: Tensor, out: Tensor) -> None:
        """Write Σ w_i Δ_i, parameter after parameter."""
        pieces = out.split([shape.numel() for shape in self.shapes])
        for piece, shape, end, start in zip(pieces, self.shapes, own, before, strict=True):
            if isinstance(end, _LargeWeight):
                end.sum_of_changes(shares, piece.view(shape))
            elif start is not None:
                piece.view(shape).copy_(torch.tensordot(shares, end.detach() - start, dims=1))


def _convolutions(layer: nn.Conv2d, images: Tensor, weights: Any, biases: Any) -> Tensor:
    """Return each client's convolution of its own images."""
    parts = images.chunk(len(weights))
    own = zip(parts, weights, [None] * len(parts) if biases is None else biases, strict=True)
    return torch.cat([layer._conv_forward(part, weight, bias) for part, weight, bias in own])


def _linear(rows: Tensor, weights: Any, biases: Any) -> Tensor:
    """Return each client's linear map of its own rows."""
    if isinstance(weights, _LargeWeight):
        outputs: Tensor = _LargeProduct.apply(rows, weights)  # type: ignore[no-untyped-call]
        return outputs if biases is None else outputs + biases.unsqueeze(1)
    return rows @ weights.mT if biases is None else torch.baddbmm(biases.unsqueeze(1), rows, weights.mT)


def _images_innermost(values: Tensor) -> Tensor:
    """Lay convolution weights out with the channels innermost."""
    if values.ndim != 5:
        return values
    return values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _is_large(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.weight.numel() >= LARGE
