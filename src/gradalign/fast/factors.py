"""Where a client's gradient waits between the phases of a round: whole, or as factors for a large weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradalign.fast.large import LargeWeight


class Shelf:
    """How a gradient lies in one flat vector, long enough for the rows of the largest client.

    First the number of rows in the factors, then each parameter in turn: a small one's gradient, or a large weight's
    rows grad_output and as many grad_input.
    """

    def __init__(self, shapes: Sequence[torch.Size], large: Sequence[bool]) -> None:
        self.shapes, self.large = shapes, large

    def _rooms(self, rows: int) -> list[int]:
        return [rows * sum(s) if big else s.numel() for s, big in zip(self.shapes, self.large, strict=True)]

    def length(self, rows: int) -> int:
        """Return how many numbers a gradient with so many rows takes."""
        return 1 + sum(self._rooms(rows))

    def _parts(self, shelf: Tensor, rows: int) -> list[Tensor]:
        return list(shelf[1 : self.length(rows)].split(self._rooms(rows)))

    def _factors(self, part: Tensor, shape: torch.Size, rows: int) -> tuple[Tensor, Tensor]:
        """Return the views (rows, out) and (rows, in) of a large weight's part."""
        out, into = shape
        return part[: rows * out].view(rows, out), part[rows * out :].view(rows, into)

    def put(self, gradients: Sequence[Tensor | LargeWeight], rows: Sequence[int], shelves: Sequence[Tensor]) -> None:
        """Put every client's gradient on its shelf; it has so many rows of its own in the large weights' factors."""
        for client, (shelf, count) in enumerate(zip(shelves, rows, strict=True)):
            shelf[0] = count
            for part, shape, each in zip(self._parts(shelf, count), self.shapes, gradients, strict=True):
                if isinstance(each, LargeWeight):
                    grad_output, inputs = self._factors(part, shape, count)
                    grad_output.copy_(each.grad_output[client, :count])
                    inputs.copy_(each.inputs[client, :count])
                else:
                    part.view(shape).copy_(each[client])

    def displace(
        self, own: Sequence[Tensor | LargeWeight], along: float, shelves: Sequence[Tensor]
    ) -> list[Tensor | LargeWeight]:
        """Return the clients' parameters moved by ``along`` times the gradients on their shelves."""
        rows = [int(shelf[0]) for shelf in shelves]
        parts = [self._parts(shelf, count) for shelf, count in zip(shelves, rows, strict=True)]
        moved: list[Tensor | LargeWeight] = []
        for place, (shape, each) in enumerate(zip(self.shapes, own, strict=True)):
            if isinstance(each, LargeWeight):
                thin = [self._factors(part[place], shape, count) for part, count in zip(parts, rows, strict=True)]
                grad_output, inputs = (_stacked([pair[side] for pair in thin]) for side in range(2))
                moved.append(LargeWeight(each.start, grad_output.mul_(along), inputs, each.factor))
            else:
                for value, part in zip(each, parts, strict=True):
                    value.add_(part[place].view(shape), alpha=along)
                moved.append(each)
        return moved


def _stacked(clients: list[Tensor]) -> Tensor:
    """Return (client, row, feature), short clients filled up with rows of zeros."""
    return torch.nn.utils.rnn.pad_sequence(clients, batch_first=True)
