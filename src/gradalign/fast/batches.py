"""The batches of clients that step together, those of the per-client path laid side by side, and their losses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from gradalign.client import LocalTraining
from gradalign.client.exchange import Broadcast, CachedGradient, Gradient, Participant, Update
from gradalign.client.trainer import Setup, gradient_rows, shuffled_passes
from gradalign.seeding import Purpose, stream_seeds
from gradalign.tasks.batches import TensorExamples

IGNORED = -100  # torch's mark of a label that does not count
ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """What each of K steps takes: row numbers into the clients' data and each row's weight in its client's mean."""

    steps: list[int]
    """K of every client."""
    seen: list[int]
    """The examples every client takes in all its steps."""
    rows: list[Tensor] = field(default_factory=list)
    weights: list[Tensor | None] = field(default_factory=list)
    """None where every client has a full batch: all weights are 1 / batch."""
    active: list[Tensor | None] = field(default_factory=list)
    """None while every client still steps; else 1 for those that do."""


@dataclass(frozen=True)
class Neighbours:
    """Clients that do their work of one phase together."""

    told: Broadcast
    who: Sequence[Participant]
    examples: Sequence[TensorExamples]
    out: Sequence[Tensor] | None = None
    """Where the replies' vectors are wanted, one after the other."""
    along: float = 0.0
    gradients: Sequence[CachedGradient] = ()
    """With these, every client starts from x + along·g_i."""

    @property
    def sizes(self) -> list[int]:
        return [len(own) for own in self.examples]

    @property
    def sum(self) -> Tensor:
        """Where the sum of their vectors is to be written."""
        return torch.empty_like(self.told.point.x) if self.out is None else self.out[0]

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
        """Return the clients' inputs and targets client after client, and where each client begins."""
        examples, starts = self.examples, [0, *itertools.accumulate(self.sizes)][:-1]
        cut = [one.rows for one in examples if one.rows is not None and one.tensors is examples[0].tensors]
        if len(cut) == len(examples):  # from one pool of tensors: all in one go
            inputs, targets = (tensor.index_select(0, torch.cat(cut)) for tensor in examples[0].tensors)
            return inputs.to(dtype), targets, starts
        # What lies in tensors of its own is taken as it is.
        parts = [one.tensors if one.rows is None else one.batch(torch.arange(len(one))) for one in examples]
        inputs, targets = (torch.cat(side) for side in zip(*parts, strict=True))
        return inputs.to(dtype), targets, starts

    def weights(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor([one.weight for one in self.who], dtype=dtype)

    def gradient_rows(self, seed: int) -> list[Tensor]:
        """Return the rows of every client's gradient phase: those of the per-client path."""
        limit, index, pairs = self.told.gradient_examples, self.told.round, zip(self.examples, self.who, strict=True)
        return [gradient_rows(len(own), limit, seed, index, one.client) for own, one in pairs]

    def gradient(
        self, vector: Tensor, losses: Tensor, counts: list[int], accuracies: Sequence[float | None], own: slice = ALL
    ) -> Gradient:
        """Return the answer of all, given Σ w_i ∇f_i(x), or that of one alone, given its gradient."""
        return Gradient(
            **self._whose(own),
            vector=vector,
            losses=tuple(losses[own].tolist()),
            accuracies=tuple(accuracies[own]),
            examples=sum(counts[own]),
        )

    def update(
        self, vector: Tensor, losses: Tensor, batches: Batches, local: LocalTraining, own: slice = ALL
    ) -> Update:
        """Return the answer of all, given Σ w_i Δ_i, or that of one alone, given Δ_i; such models have no buffers.

        ``losses`` are each client's, summed over its steps.
        """
        steps = batches.steps[own]
        return Update(
            **self._whose(own),
            vector=vector,
            losses=tuple(loss / count for loss, count in zip(losses[own].tolist(), steps, strict=True)),
            examples=sum(batches.seen[own]),
            floats=vector.new_empty(0),
            ints=torch.empty(0, dtype=torch.int64),
            steps=tuple(steps),
            total_step_sizes=tuple(local.total_step_size(self.told.lr, count) for count in steps),
        )

    def _whose(self, own: slice) -> dict[str, Any]:
        who = self.who[own]
        return {
            "clients": tuple(one.client for one in who),
            "weights": tuple(one.weight for one in who),
            "factor": 1.0 if own is ALL else who[0].weight,
        }


def pad(per_client: Sequence[Tensor], starts: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return (client, example) row numbers, short batches filled up with rows of weight zero."""
    counts = torch.tensor([len(rows) for rows in per_client], dtype=torch.float64).unsqueeze(1)
    table = pad_sequence(list(per_client), batch_first=True).add_(torch.tensor(starts).unsqueeze(1))
    here = torch.arange(table.shape[1]) < counts
    return table, None if here.all() else (here / counts).to(dtype)


def plan_batches(setup: Setup, group: Neighbours, starts: Sequence[int], dtype: torch.dtype) -> Batches:
    """Lay out all steps of clients whose data begin at ``starts``; the batches are those of the per-client path."""
    seeds = stream_seeds(setup.seed, Purpose.SHUFFLE, group.told.round, last=[one.client for one in group.who])
    generator = torch.Generator()  # one for all, in turn: making one costs more than seeding it
    lengths, drawn, ends = list[list[int]](), list[Tensor](), [0]
    for seed, size in zip(seeds, group.sizes, strict=True):
        width = setup.local.batch_for(size)
        one_pass = [min(width, size - first) for first in range(0, size, width)]
        lengths.append(list(itertools.islice(itertools.cycle(one_pass), setup.local.steps_for(size))))
        passes = -(-sum(lengths[-1]) // size)
        drawn += itertools.islice(shuffled_passes(size, generator.manual_seed(seed)), passes)
        ends.append(ends[-1] + passes * size)
    orders, steps = torch.cat(drawn), [len(own) for own in lengths]
    found = Batches(steps=steps, seen=[sum(own) for own in lengths])
    if len(set(group.sizes)) == 1:  # all take the same steps
        table = orders.view(len(lengths), -1)[:, : found.seen[0]].add_(torch.tensor(starts).unsqueeze(1))
        found.rows.extend(table.split(lengths[0], dim=1))
        found.weights.extend([None] * steps[0])
        found.active.extend([None] * steps[0])
        return found
    taken = np.array([own + [0] * (max(steps) - len(own)) for own in lengths])  # (client, step)
    begins = np.array(ends[:-1])[:, None] + np.cumsum(taken, axis=1) - taken
    shuffled, first = orders.numpy(), np.array(starts)[:, None]
    for k in range(max(steps)):  # short batches are filled up with rows of weight zero
        own = taken[:, k : k + 1]
        places = np.arange(own.max())
        here = places < own
        rows = first + np.where(here, shuffled[np.where(here, begins[:, k : k + 1] + places, 0)], 0)
        found.rows.append(torch.from_numpy(rows))
        share = None if here.all() else torch.from_numpy(np.where(here, 1.0 / np.maximum(own, 1), 0.0)).to(dtype)
        found.weights.append(share)
        still = [float(k < count) for count in steps]
        found.active.append(None if all(still) else torch.tensor(still, dtype=dtype))
    return found


def take(values: Tensor, rows: Tensor) -> Tensor:
    """Return the values at a table of row numbers; faster than indexing."""
    return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])


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


def client_losses(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return each client's mean cross-entropy over its batch, as torch has it; outputs are (client, example, class)."""
    lowest, highest = targets.aminmax()
    if int(lowest) >= 0 and int(highest) < outputs.shape[2]:
        return cross_entropies(outputs, targets, weights)
    return _mean_of_counted(outputs, targets, weights)


def _mean_of_counted(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over the examples whose label is not to be ignored; zero for a client without examples."""
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    here = torch.ones_like(each) if weights is None else (weights > 0).to(each.dtype)
    counted = here * (targets != IGNORED)
    number = counted.sum(dim=1)
    return (each * counted).sum(dim=1) / torch.where(here.any(dim=1), number, torch.ones_like(number))


def nonfinite_members(vectors: Sequence[Tensor]) -> Tensor:
    """Return for each client whether any of its numbers is not finite; tensors are (client, …)."""
    return torch.stack([~torch.isfinite(vector.flatten(1)).all(dim=1) for vector in vectors]).any(dim=0)
