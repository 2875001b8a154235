"""The server's sums over one round's replies."""

from __future__ import annotations

import torch
from torch import Tensor

from gradalign.client.exchange import ClientUpdate, GroupUpdate
from gradalign.server.federation import ServerState


class Tally:
    """Sums the replies in client order, in float64, and counts what was spent."""

    def __init__(self, state: ServerState) -> None:
        self.update = torch.zeros(state.point.x.shape, dtype=torch.float64)
        self.floats = torch.zeros(state.point.floats.shape, dtype=torch.float64)
        self.ints = state.point.ints
        self.kept_change: dict[str, Tensor] = {}
        self.kept: dict[str, dict[int, Tensor]] = {}
        self.weight = 0.0
        self.loss = 0.0
        self.reported = 0
        self.steps = 0
        self.examples = 0

    def add(self, reply: ClientUpdate, weight: float) -> None:
        self.update.add_(reply.update.cpu(), alpha=weight)
        self.floats.add_(reply.floats, alpha=weight)
        if not self.reported:
            self.ints = reply.ints.clone()
        self.weight += weight
        self.loss += weight * reply.loss
        self.reported += 1
        self.steps += reply.steps
        self.examples += reply.examples

    def add_sum(self, reply: GroupUpdate) -> None:
        self.update.add_(reply.update.cpu())
        self.floats.add_(reply.floats)
        if not self.reported:
            self.ints = reply.ints.clone()
        self.weight += sum(reply.weights)
        self.loss += sum(weight * loss for weight, loss in zip(reply.weights, reply.losses, strict=True))
        self.reported += len(reply.losses)
        self.steps += reply.steps
        self.examples += reply.examples

    def add_kept(self, label: str, client: int, old: Tensor, new: Tensor, weight: float) -> None:
        self.kept.setdefault(label, {})[client] = new
        change = self.kept_change.setdefault(label, torch.zeros(new.shape, dtype=torch.float64))
        change.add_(new - old, alpha=weight)
