"""Many clients of a small model at once, as batched matrix products.

For a network of a few thousand parameters the time of a step is Python's, not the arithmetic's. So a *cohort* of
clients is trained together: every parameter gets a leading client axis, a linear layer becomes one ``baddbmm``,
and each client still takes its own steps from its own start on its own batches. The result is the per-client
loop's up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradalign.algorithms.plan import Plan
from gradalign.client.exchange import Broadcast, CachedGradient, Gradient, GradientCache, Participant, Update
from gradalign.client.flat import all_finite
from gradalign.client.trainer import Setup
from gradalign.fast.batches import (
    Batches,
    client_losses,
    gather,
    gradient_batches,
    members,
    nonfinite_members,
    pad,
    plan_batches,
    take,
)
from gradalign.fast.products import own_product, shared_product, stepping_product
from gradalign.tasks.data import TensorExamples

COHORT = 25
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""How a linear layer is applied: inputs, weight and bias of all clients."""


class CohortTrainer:
    """Trains cohorts of clients of one task."""

    def __init__(self, setup: Setup, layers: list[nn.Module]) -> None:
        self.setup, self.local, self.layers = setup, setup.local, layers
        self.shapes = [p.shape for layer in layers for p in layer.parameters()]
        self.dtype = next(p.dtype for layer in layers for p in layer.parameters())

    # A cohort's vectors are stored parameter by parameter: all clients' first weights, then all clients' first biases,
    # so that one matrix product sees one contiguous block and element-wise arithmetic one contiguous vector.

    def _blocks(self, stored: Tensor, clients: int) -> list[Tensor]:
        blocks, offset = [], 0
        for shape in self.shapes:
            count = clients * shape.numel()
            blocks.append(stored[offset : offset + count].view(clients, *shape))
            offset += count
        return blocks

    def _store(self, vectors: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """Bring one flat vector per client (None: zero) into the stored order."""
        clients, given = len(vectors), [vector for vector in vectors if vector is not None]
        if len(given) == clients:
            pieces = torch.stack(given).to(self.dtype).split([shape.numel() for shape in self.shapes], dim=1)
            return torch.cat([piece.reshape(-1) for piece in pieces])
        stored = torch.zeros(clients * like.numel(), dtype=self.dtype)
        offset = 0
        for shape, block in zip(self.shapes, self._blocks(stored, clients), strict=True):
            for client, vector in enumerate(vectors):
                if vector is not None:
                    block[client].copy_(vector[offset : offset + shape.numel()].view(shape))
            offset += shape.numel()
        return stored

    def _spread(self, x: Tensor, clients: int) -> Tensor:
        """Give every client the same vector, in the stored order."""
        pieces = x.to(self.dtype).split([shape.numel() for shape in self.shapes])
        return torch.cat([piece.expand(clients, -1).reshape(-1) for piece in pieces])

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

    def _leaves(self, stored: Tensor, gradient: Tensor, clients: int) -> list[Tensor]:
        """Return parameters that are views of ``stored`` and accumulate into views of ``gradient``."""
        leaves = [block.detach().requires_grad_() for block in self._blocks(stored, clients)]
        for leaf, view in zip(leaves, self._blocks(gradient, clients), strict=True):
            leaf.grad = view
        return leaves

    def gradients(
        self,
        told: Broadcast,
        who: Sequence[Participant],
        examples: Sequence[TensorExamples],
        cache: GradientCache | None,
        out: Sequence[Tensor] | None,
    ) -> list[Gradient]:
        """Return ∇f_i(x) of whole clients, or of the first examples that their local steps will see."""
        inputs, targets, starts = gather(examples, self.dtype)
        taken = gradient_batches(self.setup, told, who, examples)
        counts = [len(own) for own in taken]
        vectors, losses, accuracies = self._gradients(told.point.x, inputs, targets, *pad(taken, starts, self.dtype))
        if cache is not None:
            for one, vector in zip(who, vectors, strict=True):
                cache.put(one.client, vector)
        if told.one_by_one:
            return [
                Gradient(
                    **members([one]),
                    vector=vectors[i] if out is None else out[i].copy_(vectors[i]),
                    factor=one.weight,
                    losses=(float(losses[i]),),
                    accuracies=(float(accuracies[i]),),
                    examples=counts[i],
                )
                for i, one in enumerate(who)
            ]
        shares = torch.tensor([one.weight for one in who], dtype=self.dtype)
        total = torch.mv(vectors.T, shares, out=torch.empty_like(vectors[0]) if out is None else out[0])
        if not all_finite(total):
            losses = losses.masked_fill(nonfinite_members([vectors]), math.nan)
        return [
            Gradient(
                **members(who),
                vector=total,
                factor=1.0,
                losses=tuple(losses.tolist()),
                accuracies=tuple(accuracies.tolist()),
                examples=sum(counts),
            )
        ]

    def _gradients(
        self, x: Tensor, inputs: Tensor, targets: Tensor, rows: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the clients' gradients, a row for each, their losses and accuracies."""
        labels, found = take(targets, rows), list[Tensor]()
        with torch.enable_grad():
            shared = [block[0] for block in self._blocks(x.to(self.dtype), 1)]
            outputs = self._outputs(shared, take(inputs, rows), partial(shared_product, found=found))
            losses = client_losses(outputs, labels, weights)
            losses.sum().backward()
        right = (outputs.detach().argmax(dim=2) == labels).double()
        accuracies = right.mean(dim=1) if weights is None else (right * weights).sum(dim=1)
        return torch.cat([each.flatten(1) for each in reversed(found)], dim=1), losses.detach().double(), accuracies

    def train(
        self,
        told: Broadcast,
        who: Sequence[Participant],
        plans: Sequence[Plan],
        examples: Sequence[TensorExamples],
        out: Sequence[Tensor] | None,
        *,
        along: float = 0.0,
        gradients: Sequence[CachedGradient] = (),
    ) -> list[Update]:
        """Execute every client's plan from the server's point; same arithmetic as ``ClientTrainer.train``.

        With ``gradients``, every client starts from x + along·g_i instead.
        """
        if gradients:
            plans = [Plan(displacement=row) for row in along * torch.stack([own.vector for own in gradients])]
        inputs, targets, starts = gather(examples, self.dtype)
        batches = plan_batches(self.setup, told, who, [len(one) for one in examples], starts, self.dtype)
        with torch.enable_grad():
            stored, start, losses = self._walk(told, plans, inputs, targets, batches)
        stored, count = stored.sub_(start), len(who)
        if told.one_by_one:
            rows = list(self._unstore(stored, count))
            rows = rows if out is None else [row.copy_(own) for row, own in zip(out, rows, strict=False)]
            return [batches.report(self.setup, told, who, row, losses, i) for i, row in enumerate(rows)]
        shares = torch.tensor([one.weight for one in who], dtype=self.dtype)
        blocks = self._blocks(stored, count)
        total = torch.empty(told.point.x.shape, dtype=self.dtype) if out is None else out[0]
        torch.cat([shares @ block.view(count, -1) for block in blocks], out=total)
        if not all_finite(total):
            losses = losses.masked_fill(nonfinite_members(blocks), math.nan)
        return [batches.report(self.setup, told, who, total, losses)]

    def _walk(
        self, told: Broadcast, plans: Sequence[Plan], inputs: Tensor, targets: Tensor, batches: Batches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take all steps; return the end, the start (both stored) and each client's summed loss."""
        count, local, lr = len(plans), self.local, told.lr
        pull, inside = plans[0].pull, plans[0].every_step  # one algorithm plans for all clients of a round
        y = self._spread(told.point.x, count)
        shift = self._given([plan.displaced(None) for plan in plans], told.point.x)
        constant = self._given([plan.correction for plan in plans], told.point.x)
        if pull:
            constant = -pull * y if constant is None else constant - pull * y
        inside = inside and shift is not None
        z = y.clone() if inside else y
        if shift is not None and not inside:
            y.add_(shift)
        start = z.clone()
        together = local.weight_decay == 0 or all(active is None for active in batches.active)
        if together and constant is None and not (pull or local.momentum or local.clip_norm or inside):
            return z, start, self._walk_bare(z, count, inputs, targets, batches, lr)
        direction = torch.zeros_like(y)
        leaves = self._leaves(y, direction, count)
        velocity: Tensor | None = None
        total = torch.zeros(count, dtype=torch.float64)
        for rows, weights, active in zip(batches.rows, batches.weights, batches.active, strict=True):
            if inside and shift is not None:
                torch.add(z, shift, out=y)
            losses = self._direction(
                leaves, direction, y, take(inputs, rows), take(targets, rows), weights, constant, pull
            )
            total += losses
            if local.momentum:
                velocity = direction.clone() if velocity is None else velocity.mul_(local.momentum).add_(direction)
            move = direction if velocity is None else velocity
            z.add_(move if active is None else self._spread_scalars(active) * move, alpha=-lr)
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

    def _given(self, vectors: list[Tensor | None], like: Tensor) -> Tensor | None:
        return None if all(vector is None for vector in vectors) else self._store(vectors, like)

    def _spread_scalars(self, scalars: Tensor) -> Tensor:
        """Return one number per client as a stored vector."""
        return torch.cat([scalars.unsqueeze(1).expand(-1, shape.numel()).reshape(-1) for shape in self.shapes])

    def _direction(
        self,
        leaves: list[Tensor],
        direction: Tensor,
        y: Tensor,
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        constant: Tensor | None,
        pull: float,
    ) -> Tensor:
        """Fill ``direction`` with ∇f_i(y_i) + decay·y_i + constant_i for every client; return the losses."""
        decay, clip = self.local.weight_decay + pull, self.local.clip_norm
        losses = client_losses(self._outputs(leaves, inputs), targets, weights)
        if clip is None:
            torch.mul(y, decay, out=direction)
            if constant is not None:
                direction.add_(constant)
            losses.sum().backward()
        else:
            direction.zero_()
            losses.sum().backward()
            norms = torch.linalg.vector_norm(self._unstore(direction, len(losses)), dim=1)
            direction.mul_(self._spread_scalars((clip / norms).clamp(max=1.0)))
            direction.add_(y, alpha=decay)
            if constant is not None:
                direction.add_(constant)
        return losses.detach().double()
